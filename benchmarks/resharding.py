"""Measures a restore on another mesh, beside reading each shard whole and beside torch DCP.

Each ratio is that of two restores in one round of the same processes, the median over the rounds.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ranks
from benchmarks.amounts import MIB, bytes_text, seconds_text
from benchmarks.figure import Figure, Outcome, Sense
from benchmarks.machine import shared_memory
from benchmarks.scale import Scale
from benchmarks.sharing import paired

CHANGES = {
    "FSDP 4 to 2": (4, "fsdp", 2),
    "FSDP 2 to 4": (2, "fsdp", 4),
    "FSDP 4 to 3": (4, "fsdp", 3),
    "FSDP 4 to TP 2 x DP 2": (4, "tensor-data", 4),
}


def run(scale: Scale) -> Outcome:
    """The same state, saved by FSDP on two and on four ranks."""
    size, rounds = (48 if scale.quick else 512) * MIB, 2 if scale.quick else 7
    found: dict[str, dict[str, Any]] = {}
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-bench-", dir=shared_memory()))
    try:
        for before in sorted({change[0] for change in CHANGES.values()}):
            saved = folder / str(before)
            saved.mkdir()
            ranks.run("benchmarks.resharding_rank", before, saved, "save", size, rounds)
        for name, (before, kind, after) in CHANGES.items():
            found[name] = together(
                ranks.run("benchmarks.resharding_rank", after, folder / str(before), kind, size, rounds)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(figures(found), {"changes": found})


def together(each: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks read, and in each round the seconds of the slowest."""
    return {
        "needed": sum(rank["needed"] for rank in each),
        "read": {how: sum(rank["read"][how] for rank in each) for how in ("ranged", "whole")},
        "seconds": {
            how: [max(seconds) for seconds in zip(*(rank["seconds"][how] for rank in each), strict=True)]
            for how in each[0]["seconds"]
        },
    }


def figures(found: dict[str, dict[str, Any]]) -> list[Figure]:
    """Three rows for each change: bytes, seconds, and DCP."""
    rows = []
    for name, each in found.items():
        read, seconds, needed = each["read"], each["seconds"], each["needed"]
        usual = {how: seconds_text(statistics.median(values)) for how, values in seconds.items()}
        count = len(seconds["ranged"])
        rows += [
            Figure(f"resharding, {name}: bytes read", bytes_text(read["ranged"]),
                f"whole shards: {bytes_text(read['whole'])}", read["ranged"] / read["whole"], 1.0,
                note=f"{read['ranged'] / needed:.2f} bytes read for each held"),
            Figure(f"resharding, {name}: restore by ranges", usual["ranged"],
                f"whole shards: {usual['whole']}", paired(seconds["ranged"], seconds["whole"]), 1.05,
                note=f"median of {count} paired ratios"),
            Figure(f"resharding, {name}: restore in place, against torch DCP load", usual["in place"],
                usual["dcp"], paired(seconds["dcp"], seconds["in place"]), 1.0, Sense.AT_LEAST,
                note="neither verifies here"),
        ]  # fmt: skip
    return rows
