"""What keeping every single step costs a training loop that does real work.

Two equal trainings take turns in one process: one with a Checkpointer on a real sidecar, one without. What is
judged is the time that the training thread spends in TierCheck's code, per step.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.amounts import MIB, bytes_text, seconds_text
from benchmarks.figure import Figure, Outcome
from benchmarks.job import Job
from benchmarks.models import Gpt
from benchmarks.scale import Scale
from benchmarks.workload import UpdateClock
from tiercheck import Checkpointer
from tiercheck.protocol.directive import DeltaMode

NAME = "training blocked per step, a delta at every step"
THREADS = 1
"""As in the comparison with peers."""


class Turn:
    """One of the two trainings."""

    def __init__(
        self, width: int, layers: int, batch: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.model = Gpt(width, layers).to(device=device, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=device != "cpu")
        self.tokens = torch.randint(0, 4096, (batch, 256), device=device)
        self.clock = UpdateClock(self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.tokens).backward()
        self.clock.step()

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def run(scale: Scale) -> Outcome:
    """Blocks of steps in turn; the job chooses the cadence of snapshots."""
    torch.set_num_threads(THREADS)
    width, layers, batch = (64, 2, 2) if scale.quick else (384, 6, 4)
    plain, kept = Turn(width, layers, batch), Turn(width, layers, batch)
    found = alternate(plain, kept, blocks=3 if scale.quick else 8, block=4)
    return Outcome(figures(found, kept), found)


def alternate(plain: Turn, kept: Turn, blocks: int, block: int) -> dict[str, Any]:
    """Seconds of every step of both, and what was blocked in those that are kept."""
    result: dict[str, Any] = {"plain": [], "kept": [], "blocked": []}
    with protected(kept) as (job, checkpointer):
        for _ in range(blocks + 1):
            for _ in range(block):
                result["plain"].append(_timed(plain))
            for _ in range(block):
                seconds, blocked = _kept(kept, checkpointer)
                result["kept"].append(seconds)
                result["blocked"].append(blocked)
            checkpointer.wait(60)  # what goes on in the background must not slow the other training
        counted = counts(job)
    for values in result.values():
        del values[:block]  # the first block warms up
    return result | counted | {"steps": (blocks + 1) * block, "block": block}


@contextlib.contextmanager
def protected(kept: Turn) -> Iterator[tuple[Job, Checkpointer]]:
    """A job of one worker that keeps every step of this training; it chooses the cadence of snapshots."""
    with Job(limit=12 * 12 * kept.parameters + 256 * MIB, every=None, delta=DeltaMode.AUTO) as job:
        job.begin()
        os.environ |= job.trainer_env(0)
        with Checkpointer(kept.model, kept.optimizer) as checkpointer:
            checkpointer.restore()
            yield job, checkpointer


def counts(job: Job) -> dict[str, Any]:
    """What was taken until now."""
    report = job.report(0)
    return {
        "deltas": report.counters.deltas,
        "deltas_skipped": report.counters.deltas_skipped,
        "snapshots": report.counters.captured,
        "no_deltas": report.trainer.no_deltas,
        "cadence": report.snapshot_every,
    }


def _timed(turn: Turn) -> float:
    start = time.perf_counter()
    turn.step()
    return time.perf_counter() - start


def _kept(turn: Turn, checkpointer: Checkpointer) -> tuple[float, float]:
    turn.clock.take()
    start = time.perf_counter()
    turn.step()
    called = time.perf_counter()
    checkpointer.step()
    blocked = time.perf_counter() - called
    return time.perf_counter() - start, blocked + turn.clock.take()


def _best_block(values: list[float], block: int) -> float:
    """Mean over the best block of steps: each has snapshots in it, and what else runs on the machine only
    ever adds."""
    return min(statistics.fmean(values[begin : begin + block]) for begin in range(0, len(values), block))


def figures(found: dict[str, Any], kept: Turn) -> list[Figure]:
    """Judged by what was blocked; the steps' whole length beside it."""
    if not found["deltas"]:
        return [Figure(NAME, bound=0.02, unit="%", note=found["no_deltas"] or "no deltas were kept")]
    step, with_us, blocked = (_best_block(found[key], found["block"]) for key in ("plain", "kept", "blocked"))
    medians = " and ".join(seconds_text(statistics.median(found[key])) for key in ("plain", "kept"))
    about = (
        f"{bytes_text(4 * kept.parameters)} of gradients; {found['deltas']} deltas, {found['snapshots']} "
        "snapshots in "
        f"{found['steps']} steps, {found['deltas_skipped']} deltas skipped"
    )
    return [
        Figure(
            NAME,
            seconds_text(blocked),
            f"step {seconds_text(step)}",
            blocked / step,
            0.02,
            note=about,
            unit="%",
        ),
        Figure(
            "step longer altogether, a delta at every step",
            seconds_text(with_us - step),
            f"step {seconds_text(step)}",
            (with_us - step) / step,
            note=f"medians {medians}; with what the copies take from the step",
            unit="%",
        ),
    ]
