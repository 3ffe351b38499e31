"""What it costs to listen to the sidecars of a job that trains, and how old what they have said gets."""

from __future__ import annotations

import asyncio
import time

from benchmarks.scale_operator.stage import Crowd, CrowdedJob, Stopwatch
from tiercheck_operator.model.observed import WorkerReport


async def listen(job: CrowdedJob, crowd: Crowd, seconds: float) -> dict[str, float]:
    """For a while, once what they hold is not asked for any more. The loop of the job goes on meanwhile."""
    client = job.client
    while not all(map(_lean, client.reports.values())):  # noqa: ASYNC110  what is waited for is a state
        await asyncio.sleep(0.2)
    watch, theirs, ages = Stopwatch(), crowd.cpu(), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(0.5)
        now = time.time()
        ages.append([now - (entry.answered_at or 0.0) for entry in client.reports.values()])
    wall, cpu = watch.read()
    return {
        "CPU s per s": cpu / wall,
        "of the simulated sidecars, CPU s per s": (crowd.cpu() - theirs) / wall,
        "oldest report, s": max(map(max, ages)),
        "mean age, s": sum(map(sum, ages)) / sum(map(len, ages)),
    }


def _lean(entry: WorkerReport) -> bool:
    return entry.report is not None and not entry.report.holdings
