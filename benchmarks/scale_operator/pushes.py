"""What it costs to tell every worker what is wanted: an ordinary recovery, and one of another size."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from benchmarks.scale_operator.crowd import SAVED
from benchmarks.scale_operator.stage import RANKS, CrowdedJob, Stopwatch
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.version import Branch, History
from tiercheck_operator.controller.attempt.directives import due_directives
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.observed import Observation, WorkerReport
from tiercheck_operator.model.status import JobRecord, Recovery
from tiercheck_operator.sidecars import DirectiveEncoder


def recovering(obs: Observation, number: int, *, resized: bool) -> JobRecord:
    """The status of attempt `number`; resized: it was one worker more before."""
    workers = obs.size
    before = (workers + resized) * RANKS
    history = History((Branch(1, 0, before),)).after(number, SAVED.step, workers * RANKS)
    return replace(obs.job.status, attempt=number, history=history)


async def ask(job: CrowdedJob) -> dict[str, float]:
    """Everybody says what he holds, as after a failure: connections are begun for it."""
    client, watch = job.client, Stopwatch()
    client.want_holdings(True)
    while not all(map(_told, client.reports.values())):  # noqa: ASYNC110  what is waited for is a state
        await asyncio.sleep(0.02)
    wall, cpu = watch.read()
    return {"s": wall, "CPU s": cpu}


async def push(job: CrowdedJob, number: int, *, resized: bool) -> dict[str, float]:
    """One round of directives to restore: what is to be told is decided, and told."""
    now = time.time()
    recovery = Recovery(
        cause="NodeLost", message="", detected_at=now, failed_at=now, attempt=number, step=SAVED.step,
        version_attempt=SAVED.attempt, decided_at=now,
    )  # fmt: skip
    watch = Stopwatch()
    obs = job.observe(recovery)
    situation = Situation.of(obs)
    status = recovering(obs, number, resized=resized)
    due = due_directives(obs, status, situation.members, situation.placement, Phase.HOLD)
    decided = watch.read()
    watch = Stopwatch()
    await job.loop._executor.run(obs.job, due, job.client)
    told = watch.read()
    lacking = [action for action in due if not _follows(job, action)]
    if lacking or len(due) != obs.size:
        raise RuntimeError(f"{len(due)} directives were due, and {len(lacking)} of them are not followed")
    encoder = DirectiveEncoder()
    size = max(sum(map(len, encoder.encode(action.directive))) for action in due)
    return {
        "deciding, s": decided[0],
        "deciding, CPU s": decided[1],
        "telling, s": told[0],
        "telling, CPU s": told[1],
        "bytes of a directive": size,
    }


def _told(entry: WorkerReport) -> bool:
    return entry.report is not None and bool(entry.report.holdings)


def _follows(job: CrowdedJob, action: Push) -> bool:
    report = job.client.reports[action.pod_uid].report
    return report is not None and report.revision == action.directive.revision
