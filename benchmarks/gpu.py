"""Measures on a GPU what every step costs, and copies off the device against pinned ones.

Whole blocks of steps are compared, snapshots among them, and nobody waits for the device within one. What
else is promised about GPUs is checked by `benchmarks.gpu_acceptance`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.amounts import rate_text, seconds_text
from benchmarks.blocks import longer, mean_step
from benchmarks.every_step import Turn, counts, protected
from benchmarks.figure import Figure, Outcome, Sense
from benchmarks.gpu_acceptance.checks import Setting
from benchmarks.gpu_acceptance.transfers import copy_rates
from benchmarks.machine import shared_memory
from benchmarks.scale import Scale

OVERHEAD = "GPU: step longer, small GPT in bf16, a delta at every step"
COPY = "GPU: copy off the device into a slot"
_BLOCK = 24
"""Steps that are measured together: as many times over as any cadence of snapshots that the job may choose.
"""


def run(scale: Scale) -> Outcome:
    """Nothing without a GPU, and the table says so."""
    if not torch.cuda.is_available():
        note = "not run: no GPU"
        return Outcome(
            [
                Figure(OVERHEAD, bound=0.02, unit="%", note=note),
                Figure(COPY, bound=0.85, sense=Sense.AT_LEAST, unit="%", note=note),
            ]
        )
    width, layers, batch = (256, 4, 8) if scale.quick else (1024, 24, 32)
    plain, kept = (Turn(width, layers, batch, "cuda", torch.bfloat16) for _ in range(2))
    found = alternate(plain, kept, torch.cuda.synchronize, blocks=2 if scale.quick else 6, block=_BLOCK)
    return Outcome([*figures(found), _copy(scale)], found)


def alternate(plain: Turn, kept: Turn, settle: Callable[[], None], blocks: int, block: int) -> dict[str, Any]:
    """Mean seconds of a step in blocks of both in turn, and what was blocked of those that are kept. `settle`
    waits for the device."""
    result: dict[str, Any] = {"plain": [], "kept": [], "blocked": []}
    with protected(kept) as (job, checkpointer):
        called = 0.0

        def kept_step() -> None:
            nonlocal called
            kept.step()
            began = time.perf_counter()
            checkpointer.step()
            called += time.perf_counter() - began

        for number in range(blocks + 1):
            bare = mean_step(plain.step, block, settle)
            called, _ = 0.0, kept.clock.take()
            ours = mean_step(kept_step, block, settle)
            checkpointer.wait(60)  # what goes on in the background must not slow the other training
            if number:  # the first block warms up
                result["plain"].append(bare)
                result["kept"].append(ours)
                result["blocked"].append((called + kept.clock.take()) / block)
        return result | counts(job) | {"steps": (blocks + 1) * block, "block": block}


def figures(found: dict[str, Any]) -> list[Figure]:
    """Judged by the steps' whole length; what the training thread spends in our calls beside it."""
    if not found["deltas"]:
        return [Figure(OVERHEAD, bound=0.02, unit="%", note=found["no_deltas"] or "no deltas were kept")]
    bare, ours, blocked = (min(found[key]) for key in ("plain", "kept", "blocked"))
    about = (
        f"median of {len(found['plain'])} pairs; {found['deltas']} deltas, {found['snapshots']} snapshots in "
        f"{found['steps']} steps, {found['deltas_skipped']} deltas skipped"
    )
    ratio = longer(found["plain"], found["kept"])
    step = f"step {seconds_text(bare)}"
    return [
        Figure(OVERHEAD, seconds_text(ours), step, ratio, 0.02, note=about, unit="%"),
        Figure(
            "GPU: training blocked per step, a delta at every step",
            seconds_text(blocked),
            step,
            blocked / bare,
            note="mean over the best block: in step() and in hooks",
            unit="%",
        ),
    ]


def _copy(scale: Scale) -> Figure:
    """The trainer's own copy of many tensors into a mapped, registered slot against copies into pinned
    memory."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        rates = copy_rates(Setting("cuda", scale.quick, Path(folder)))
    against = f"pinned: {rate_text(rates.pinned)}"
    ratio = rates.quiet / rates.pinned
    return Figure(COPY, rate_text(rates.quiet), against, ratio, 0.85, Sense.AT_LEAST, unit="%")
