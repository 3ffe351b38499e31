"""What it costs to tell every worker what is wanted: an ordinary recovery, and one of another size."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from benchmarks.scale_operator.crowd import SAVED
from benchmarks.scale_operator.stage import RANKS, CrowdedJob, Stopwatch
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.version import Branch, History
from tiercheck_operator.controller.attempt.barrier import due_directives
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord, Recovery


def recovering(obs: Observation, *, resized: bool) -> JobRecord:
    """The status of the next attempt; resized: it was one worker more before."""
    status, workers = obs.job.status, obs.size
    before = (workers + resized) * RANKS
    number = status.attempt + 1
    history = History((Branch(1, 0, before),)).after(number, SAVED.step, workers * RANKS)
    recovery = Recovery(
        cause="NodeLost", message="", detected_at=obs.now, failed_at=obs.now, attempt=number, step=SAVED.step,
        version_attempt=SAVED.attempt, decided_at=obs.now,
    )  # fmt: skip
    return replace(status, attempt=number, history=history, recovery=recovery)


async def push(job: CrowdedJob, *, resized: bool) -> dict[str, float]:
    """One round: what is to be told is decided, and told."""
    watch = Stopwatch()
    obs = job.observe()
    situation = Situation.of(obs)
    due = due_directives(
        obs, recovering(obs, resized=resized), situation.members, situation.placement, Phase.HOLD
    )
    decided = watch.read()
    watch = Stopwatch()
    await job.loop._executor.run(obs.job, due, job.client)
    told = watch.read()
    followed = sum(_follows(job, action) for action in due)
    return {
        "directives": len(due),
        "followed": followed,
        "deciding, s": decided[0],
        "deciding, CPU s": decided[1],
        "telling, s": told[0],
        "telling, CPU s": told[1],
        "in all, s": decided[0] + told[0],
        "in all, CPU s": decided[1] + told[1],
    }


def _follows(job: CrowdedJob, action: Push) -> bool:
    report = job.client.reports[action.pod_uid].report
    return report is not None and report.revision == action.directive.revision


async def settle(job: CrowdedJob) -> None:
    """Until every sidecar has answered with what it holds."""
    while True:
        known = [entry.report for entry in job.client.reports.values()]
        if all(report is not None and report.holdings for report in known):
            return
        await asyncio.sleep(0.2)
