"""Measures that what a rank captures, and how long it takes, falls with data parallelism.

Each ratio is that of two captures in one round of one process, the median over the rounds: what else the
machine does changes more slowly than that. One rank captures while the others wait, as if each had a machine
of its own.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ranks
from benchmarks.amounts import MIB, bytes_text, seconds_text
from benchmarks.figure import Figure, Outcome
from benchmarks.machine import shared_memory
from benchmarks.scale import Scale

DEGREES = (1, 2, 4)
_SLACK = 1.25
"""How much longer than its part of the whole a share may take: what a capture costs whatever its size, and
reading the table."""


def run(scale: Scale) -> Outcome:
    """One model under DDP of each degree, AdamW, fp32."""
    size, rounds = (48 if scale.quick else 768) * MIB, 4 if scale.quick else 15
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-bench-", dir=shared_memory()))
    try:
        each = ranks.run("benchmarks.sharing_rank", max(DEGREES), folder, size, rounds, *DEGREES)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {
        degree: {**each[0][degree], "bytes": max(rank[degree]["bytes"] for rank in each)}
        for degree in each[0]
    }
    return Outcome(
        figures(found), {"degrees": found, "state": sum(rank[str(max(DEGREES))]["bytes"] for rank in each)}
    )


def figures(found: dict[str, dict[str, Any]]) -> list[Figure]:
    """For each degree bytes and seconds against a rank without replicas; then each beside a plain copy."""
    alone = found[str(DEGREES[0])]
    rows = []
    for degree in DEGREES[1:]:
        share = found[str(degree)]
        rows.append(Figure(f"bytes captured per rank, data parallel on {degree}", bytes_text(share["bytes"]),
            f"on 1: {bytes_text(alone['bytes'])}", share["bytes"] / alone["bytes"], 1.01 / degree,
            note=f"ideal: {1 / degree:.3g}; DDP, AdamW, fp32"))  # fmt: skip
    for degree in DEGREES[1:]:
        share = found[str(degree)]
        rows.append(Figure(f"capture per rank, data parallel on {degree}",
            seconds_text(statistics.median(share["capture"])),
            f"on 1: {seconds_text(statistics.median(alone['capture']))}",
            paired(share["capture"], alone["capture"]), _SLACK / degree,
            note=f"ideal: {1 / degree:.3g}; median of {len(alone['capture'])} paired ratios"))  # fmt: skip
    for degree in DEGREES:
        share = found[str(degree)]
        rows.append(Figure(f"capture per rank, data parallel on {degree}, against a copy of its share",
            seconds_text(statistics.median(share["capture"])),
            f"copy of {bytes_text(share['bytes'])}: {seconds_text(statistics.median(share['copy']))}",
            paired(share["capture"], share["copy"]),
            note="medians; one thread copies, two capture"))  # fmt: skip
    return rows


def paired(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios round by round."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
