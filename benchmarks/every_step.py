"""What keeping every single step costs a training loop that does real work.

Two equal trainings take turns in one process: one with a Checkpointer on a real sidecar, one without. What is
judged is the time that the training thread spends in TierCheck's code, per step.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from benchmarks.harness import MIB, Figure, Outcome, Scale, bytes_text, seconds_text
from benchmarks.job import Job
from benchmarks.workload import Turn
from tiercheck import Checkpointer
from tiercheck.protocol.directive import DeltaMode

NAME = "training blocked per step, a delta at every step"
THREADS = 1
"""As in the comparison with peers."""


def run(scale: Scale) -> Outcome:
    """Blocks of steps in turn; the job chooses the cadence of snapshots."""
    torch.set_num_threads(THREADS)
    shape = (64, 2, 2) if scale.quick else (384, 6, 4)
    plain, kept = Turn(shape, foreach=False), Turn(shape, foreach=False)
    found = alternate(plain, kept, blocks=3 if scale.quick else 8, block=4)
    return Outcome(figures(found, kept), found)


def alternate(plain: Turn, kept: Turn, blocks: int, block: int) -> dict[str, Any]:
    """Seconds of every step without us, and what was blocked in those that are kept."""
    result: dict[str, Any] = {"plain": [], "blocked": []}
    limit = 12 * 12 * sum(parameter.numel() for parameter in kept.model.parameters()) + 256 * MIB
    with Job(limit=limit, every=None, delta=DeltaMode.AUTO) as job:
        job.begin()
        os.environ |= job.trainer_env(0)
        with Checkpointer(kept.model, kept.optimizer) as kept.checkpointer:
            kept.checkpointer.restore()
            for _ in range(blocks + 1):
                for _ in range(block):
                    began = time.perf_counter()
                    plain.step()
                    result["plain"].append(time.perf_counter() - began)
                for _ in range(block):
                    kept.take_blocked()
                    kept.step()
                    result["blocked"].append(kept.take_blocked())
                # What goes on in the background must not slow the other training.
                kept.checkpointer.wait(60)
            report = job.report(0)
    for values in result.values():
        del values[:block]  # the first block warms up
    return result | {
        "deltas": report.counters.deltas,
        "deltas_skipped": report.counters.deltas_skipped,
        "snapshots": report.counters.captured,
        "no_deltas": report.trainer.no_deltas,
        "cadence": report.snapshot_every,
        "steps": (blocks + 1) * block,
        "block": block,
    }


def _best_block(values: list[float], block: int) -> float:
    """Mean over the best block of steps: each has snapshots in it, and what else runs on the machine only
    ever adds."""
    return min(statistics.fmean(values[begin : begin + block]) for begin in range(0, len(values), block))


def figures(found: dict[str, Any], kept: Turn) -> list[Figure]:
    """Judged by what was blocked."""
    if not found["deltas"]:
        return [Figure(NAME, bound=0.02, unit="%", note=found["no_deltas"] or "no deltas were kept")]
    step, blocked = (_best_block(found[key], found["block"]) for key in ("plain", "blocked"))
    gradients = sum(parameter.nbytes for parameter in kept.model.parameters())
    about = (
        f"{bytes_text(gradients)} of gradients; {found['deltas']} deltas, {found['snapshots']} snapshots in "
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
        )
    ]
