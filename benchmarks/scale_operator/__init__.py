"""Measures what many workers, and many jobs, cost the operator: directives and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from benchmarks.figure import Figure, Outcome
from benchmarks.scale import Scale
from benchmarks.scale_operator.memory import measure
from benchmarks.scale_operator.pushes import ask, push
from benchmarks.scale_operator.stage import crowded_job

WORKERS = (512, 4000)
PUBLISHED = {512: 84.0, 4000: 5700.0}
"""Processor seconds of one round of directives of another size, before sources were told in a table."""
_LIMIT = {512: 1.0, 4000: 10.0}
"""Seconds, as promised."""
_MOST_MEMORY = 200
"""MiB, as promised."""
_TURNS = 3
"""Of telling a restore of another size."""
_IDLE = 65.0
"""Seconds, after which no connection but those of the long polls is left."""


def run(scale: Scale, parts: Collection[str] = (), earlier: Mapping[str, Any] | None = None) -> Outcome:
    """Rows for the sizes that something is promised of; the numbers have all. `parts`: only these are
    measured, and the others are as `earlier`: workers, or jobs and workers of each ("500 x 4")."""
    sizes, idle = ((8, 16), 0.0) if scale.quick else (WORKERS, _IDLE)
    known = earlier if parts and earlier is not None else {}
    found: dict[int, dict[str, Any]] = {int(size): each for size, each in known.get("workers", {}).items()}
    memory: dict[str, dict[str, float]] = {**known.get("memory", {})}
    for workers in sizes:
        if not parts or str(workers) in parts:
            found[workers] = asyncio.run(_of(workers, idle))
    crowds = ((1, 8), (2, 4)) if scale.quick else ((1, 1000), (500, 4))
    for jobs, workers in crowds:
        if not parts or f"{jobs} x {workers}" in parts:
            memory[f"{jobs} x {workers}"] = measure(jobs, workers)
    rows = [_row(workers, found[workers]) for workers in sizes if workers in found]
    for jobs, workers in crowds:
        figures = memory.get(f"{jobs} x {workers}")
        if figures is None:
            continue
        most = max(value for name, value in figures.items() if name.endswith("MiB"))
        crowd = f"{jobs:,} job{'s' if jobs > 1 else ''} of {workers:,} workers"
        rows.append(
            Figure(
                f"peak memory of the operator, {crowd}",
                f"{most:.0f} MiB",
                f"promised: {_MOST_MEMORY} MiB",
                most / _MOST_MEMORY,
                1.0,
            )
        )
    return Outcome(rows, {"workers": {str(number): each for number, each in found.items()}, "memory": memory})


async def _of(workers: int, idle: float) -> dict[str, Any]:
    """The best of several turns."""
    with crowded_job(workers) as job:
        await job.running()
        await asyncio.sleep(idle)
        await job.pause()
        await ask(job)
        turns = [await push(job, number) for number in range(2, 2 + _TURNS)]
        await job.end()
    return {"resized": min(turns, key=lambda turn: turn["telling, s"])}


def _row(workers: int, found: dict[str, Any]) -> Figure:
    resized, limit = found["resized"], _LIMIT.get(workers)
    published = f", before: {PUBLISHED[workers]:,.0f} s" if workers in PUBLISHED else ""
    return Figure(
        f"restore of another size told to {workers:,} workers",
        f"{resized['telling, s']:.2f} s",
        f"promised: {limit:.0f} s{published}" if limit else "",
        resized["telling, s"] / limit if limit else None,
        1.0 if limit else None,
        note=f"{resized['telling, CPU s']:.2f} s of a core, to decide {resized['deciding, CPU s']:.2f} s",
    )
