"""Measures what it costs to tell every worker of a restore of another size."""

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
from tiercheck_operator.model.status import Recovery
from tiercheck_operator.sidecars import DirectiveEncoder


async def ask(job: CrowdedJob) -> None:
    """Has all sidecars report what they hold, as after a failure."""
    client = job.client
    client.want_holdings(True)
    while not all(entry.report and entry.report.holdings for entry in client.reports.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def push(job: CrowdedJob, number: int) -> dict[str, float]:
    """One round of directives to restore in attempt `number` what one worker more has saved: what is to be
    told is decided, and told."""
    now = time.time()
    recovery = Recovery(
        cause="NodeLost", message="", detected_at=now, failed_at=now, attempt=number, step=SAVED.step,
        version_attempt=SAVED.attempt, decided_at=now,
    )  # fmt: skip
    watch = Stopwatch()
    obs = job.observe(recovery)
    situation = Situation.of(obs)
    history = History((Branch(1, 0, (obs.size + 1) * RANKS),)).after(number, SAVED.step, obs.size * RANKS)
    status = replace(obs.job.status, attempt=number, history=history)
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


def _follows(job: CrowdedJob, action: Push) -> bool:
    report = job.client.reports[action.pod_uid].report
    return report is not None and report.revision == action.directive.revision
