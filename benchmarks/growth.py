"""Measures what grows how: time blocked and memory with the state, time to copy with the workers.

A slope of 1 in log-log scales is linear growth. Workers share one machine here, so the work that is copied
grows with them.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import blocked
from benchmarks.harness import GIB, MIB, Figure, Outcome, Scale, bytes_text, rate_text, seconds_text
from benchmarks.job import Job, until
from tests.sidecar.world import FakeRank
from tiercheck.protocol import names
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.local import Hello
from tiercheck.protocol.version import Version

_PIECE = 16 * MIB
_SPARE = 2 * GIB
"""Memory that must stay free, or the machine swaps and the figures are worthless."""


def run(scale: Scale) -> Outcome:
    """States one after the other, then workers."""
    states, skipped = [], []
    for size in scale.growth_states:
        # Beside the slots: the state, its gradients, and what a part of it is copied into.
        slots = next((count for count in (3, 2) if (1.34 + count) * size + GIB + _SPARE <= available()), 0)
        if slots == 0:
            skipped.append(f"{bytes_text(size)} not run")
            continue
        if slots == 2:
            skipped.append(f"{bytes_text(size)} with two slots")
        print(f"  state of {bytes_text(size)}", file=sys.stderr, flush=True)
        states.append(_of_state(size, scale, slots))
    share = 8 * MIB if scale.quick else 64 * MIB
    workers = [_of_workers(count, share) for count in scale.growth_workers]
    data = {"states": states, "workers": workers, "skipped": skipped, "share": share}
    return Outcome(figures(data), data)


def figures(data: dict[str, Any]) -> list[Figure]:
    """Rows. The time blocked is judged by how a plain copy grows in the same processes: a small state lies in
    the cache in part, a large one does not, and nobody copies it faster. Its own slope is told, and that of
    the processor time of saving, without any waiting for a core."""
    states, workers = data["states"], data["workers"]
    about, copy = list(data["skipped"]), 1.0
    if len(states) > 1:
        copy = slope([(point["bytes"], point["copy"]) for point in states])
        own = slope([(point["bytes"], point["blocked"]) for point in states])
        work = [(point["bytes"], point["aside"]) for point in states if point.get("aside")]
        about.insert(0, f"by itself: {own:.3g}")
        if len(work) > 1:
            about.insert(1, f"processor time of saving: {slope(work):.3g}")
    return [
        _slope_row(
            "growth of the time blocked with the state",
            states,
            ("bytes", "blocked"),
            bytes_text,
            "; ".join(about),
            beside=("a plain copy", copy),
        ),
        _slope_row(
            "growth of the time to copy all to peers, with the workers",
            workers,
            ("workers", "seconds"),
            lambda count: f"{count:.0f} workers",
            f"{bytes_text(data['share'])} per worker; {rate_text(workers[-1]['rate'])} altogether at the "
            "last",
        ),
        _budget_row("memory used, of the computed budget, by state", states, "bytes", bytes_text),
        _budget_row(
            "memory used, of the computed budget, by workers",
            workers,
            "workers",
            lambda n: f"{n:.0f} workers",
        ),
    ]


def slope(points: list[tuple[float, float]]) -> float:
    """Of the straight line through the logarithms, by least squares."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def available() -> int:
    """Bytes of memory that a process can still get."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@dataclass(frozen=True)
class _Memory:
    used: int
    budget: int


def _memory(job: Job) -> _Memory:
    """The fullest worker's: bytes that its volume really takes, and what the sizes said beforehand that it
    would."""
    workers = [
        _Memory(job.memory_used(worker), job.report(worker).memory.needed) for worker in range(job.workers)
    ]
    return max(workers, key=lambda memory: memory.used / max(1, memory.budget))


def _of_state(size: int, scale: Scale, slots: int) -> dict[str, Any]:
    found: list[_Memory] = []
    result = blocked.measure(blocked.WORST, size, scale, lambda job: found.append(_memory(job)), slots)
    waits = sorted(cycle["blocked"] for cycle in result["cycles"])
    return {
        "bytes": result["state_bytes"],
        # The least: whatever else ran on this machine only ever adds.
        "blocked": waits[0],
        "copy": result["copy_seconds"],
        "aside": min(cycle["aside"] for cycle in result["cycles"]),
        "used": found[0].used,
        "budget": found[0].budget,
    }


def _of_workers(count: int, share: int) -> dict[str, Any]:
    """All ranks save at once; how long until each one's holder has verified its copy. The best of a few."""
    print(f"  {count} workers", file=sys.stderr, flush=True)
    with Job(count, limit=6 * share + 64 * MIB) as job, contextlib.ExitStack() as stack:
        job.begin()
        ranks = [stack.enter_context(_Rank(job, rank)) for rank in range(count)]
        for rank in ranks:
            rank.reserve(share)
        times = []
        for step in (1, 2, 3):
            for rank in ranks:
                until(lambda rank=rank, step=step: rank.save(step), "a slot is free")
            start = time.perf_counter()
            for worker in range(count):
                rank, version = (worker - 1) % count, Version(step, job.attempt)
                until(
                    lambda worker=worker, rank=rank, version=version: job.holds(
                        worker, rank, version, Tier.PEER
                    ),
                    f"worker {worker} holds a copy",
                )
            times.append(time.perf_counter() - start)
        memory = _memory(job)
    seconds = min(times[1:])
    return {
        "workers": count,
        "seconds": seconds,
        "rate": count * share / seconds,
        "used": memory.used,
        "budget": memory.budget,
    }


class _Rank(FakeRank):
    """A rank without torch, whose snapshots are random bytes, written as fast as they can be."""

    def __init__(self, job: Job, rank: int) -> None:
        hello = Hello("rank", os.getpid(), rank, job.workers, job.attempt)
        super().__init__(job.run_dir(rank) / names.SOCKET_NAME, hello)
        self._bytes = os.urandom(_PIECE)

    def write(self, path: str, step: int, *_: Any, **__: Any) -> None:
        assert self.layout is not None
        version = Version(step, self.hello.attempt)
        with open(path, "r+b", buffering=0) as file:
            file.seek(8)
            file.write(self.layout.header(self.hello.rank, version, self.hello.world_size, {}))
            left = self.layout.size - self.layout.data_begin
            while left > 0:
                left -= file.write(self._bytes[: min(left, _PIECE)])
            file.seek(0)
            file.write(self.layout.state_word)


def _slope_row(
    name: str,
    points: list[dict[str, Any]],
    axes: tuple[str, str],
    text: Any,
    note: str,
    *,
    beside: tuple[str, float] = ("linear", 1.0),
) -> Figure:
    """`beside`: what it is held against, and the slope of that."""
    x, y = axes
    if len(points) < 2:
        return Figure(name, bound=1.05, note=note)
    first, last = points[0], points[-1]
    return Figure(
        name,
        f"{seconds_text(first[y])} at {text(first[x])}, {seconds_text(last[y])} at {text(last[x])}",
        f"{beside[0]}: {beside[1]:.3g}",
        slope([(point[x], point[y]) for point in points]) / beside[1],
        1.05,
        unit="",
        note=note,
    )


def _budget_row(name: str, points: list[dict[str, Any]], x: str, text: Any) -> Figure:
    known = [point for point in points if point["budget"]]
    if not known:
        return Figure(name, bound=1.0, note="the sidecar computed no budget")
    worst = max(known, key=lambda point: point["used"] / point["budget"])
    return Figure(
        name,
        f"{bytes_text(worst['used'])} at {text(worst[x])}",
        bytes_text(worst["budget"]),
        worst["used"] / worst["budget"],
        1.0,
        unit="%",
        note=f"the worst of {len(known)} points",
    )
