"""The same on a GPU: what every step costs a small GPT in bf16, and how near the copy off the device comes to a pinned one."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.amounts import GIB, rate_text
from benchmarks.every_step import Turn, alternate
from benchmarks.every_step import figures as figures_of_turns
from benchmarks.figure import Figure, Outcome, Sense
from benchmarks.scale import Scale

OVERHEAD = "GPU: step longer, small GPT in bf16, a delta at every step"
COPY = "GPU: copy off the device into a slot"


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
    found = alternate(plain, kept, blocks=3 if scale.quick else 8, block=8)
    step, with_us = statistics.median(found["plain"]), statistics.median(found["kept"])
    rows = [
        Figure(
            OVERHEAD,
            f"{1e3 * with_us:.2f} ms",
            f"{1e3 * step:.2f} ms",
            (with_us - step) / step,
            0.02,
            unit="%",
            note=f"{found['deltas']} deltas and {found['snapshots']} snapshots in {found['steps']} steps",
        ),
        *(row for row in figures_of_turns(found, kept) if row.bound is not None),
        _copy(scale),
    ]
    return Outcome(rows, found)


def _copy(scale: Scale) -> Figure:
    """The trainer's own copy into a mapped, registered file against a copy into pinned memory."""
    import tempfile

    from benchmarks.job import shared_memory
    from tiercheck.protocol.slot import SlotLayout
    from tiercheck.trainer.slot_file import SlotWriter

    size = GIB // 8 if scale.quick else 2 * GIB
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    layout = SlotLayout.plan([("bytes", "U8", (size,), size)])
    with tempfile.NamedTemporaryFile(dir=shared_memory()) as file:
        file.truncate(layout.size)
        writer = SlotWriter(file.name)
        view = writer.begin(layout)["bytes"]
        view.zero_()
        writer.pin()
        rates = [(_seconds(source, view), _seconds(source, pinned)) for _ in range(7)]
    ours, limit = (size / min(times) for times in zip(*rates, strict=True))
    return Figure(COPY, rate_text(ours), f"pinned: {rate_text(limit)}", ours / limit, 0.85, Sense.AT_LEAST, unit="%")


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start
