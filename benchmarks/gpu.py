"""Measures on a GPU what every step costs, and copies off the device against pinned ones.

Both as `benchmarks.gpu_acceptance` does (P3 and P2), which checks what else is promised about GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu_acceptance.checks import Setting
from benchmarks.gpu_acceptance.steps import every_step_kept
from benchmarks.gpu_acceptance.transfers import copy_rates
from benchmarks.harness import Figure, Outcome, Scale, Sense, rate_text, scratch

OVERHEAD = Figure("GPU: step longer, small GPT in bf16, a delta at every step", bound=0.02, unit="%")
COPY = Figure("GPU: copy off the device into a slot", bound=0.85, sense=Sense.AT_LEAST, unit="%")


def run(scale: Scale) -> Outcome:
    """Nothing without a GPU, and the table says so."""
    if not torch.cuda.is_available():
        return Outcome([replace(figure, note="not run: no GPU") for figure in (OVERHEAD, COPY)])
    with scratch() as folder:
        setting = Setting("cuda", scale.quick, folder)
        kept, rates = every_step_kept(setting), copy_rates(setting)
    longer, about = kept.figures[0].ratio if kept.good else None, kept.text.partition(";")[0]
    pinned, ours = rate_text(rates.pinned), rate_text(rates.quiet)
    return Outcome(
        [
            replace(OVERHEAD, ratio=longer, note=about),
            replace(COPY, ours=ours, against=f"pinned: {pinned}", ratio=rates.quiet / rates.pinned),
        ]
    )
