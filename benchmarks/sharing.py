"""Measures that what a rank captures, and how long it takes, falls with data parallelism.

Each ratio is that of two captures in one round of one process, the median over the rounds: what else the
machine does changes more slowly than that. One rank captures while the others wait, as if each had a machine
of its own.

Slots are files in memory that are there already, as a sidecar grants them. What becomes of a full one is no
business of the trainer's.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import (
    MIB,
    Figure,
    Outcome,
    Scale,
    be_rank,
    bytes_text,
    run_ranks,
    scratch,
    seconds_text,
)
from tiercheck import Checkpointer
from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.checkpointer import Found

DEGREES = (1, 2, 4)
_LAYERS = 16
_WARM = 3
_SLACK = 1.25
"""How much longer than its part of the whole a share may take: what a capture costs whatever its size, and
reading the table."""


def run(scale: Scale) -> Outcome:
    """One model under DDP of each degree, AdamW, fp32."""
    size, rounds = (48 if scale.quick else 768) * MIB, 4 if scale.quick else 15
    with scratch() as folder:
        each = run_ranks("benchmarks.sharing", max(DEGREES), folder, size, rounds, *DEGREES)
    found = {
        degree: {**each[0][degree], "bytes": max(rank[degree]["bytes"] for rank in each)}
        for degree in each[0]
    }
    return Outcome(
        figures(found), {"degrees": found, "state": sum(rank[str(max(DEGREES))]["bytes"] for rank in each)}
    )


def figures(found: dict[str, dict[str, Any]]) -> list[Figure]:
    """For each degree bytes and seconds against a rank without replicas."""
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
    return rows


def paired(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios round by round."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


# One rank


class Slots(FolderBackend):
    """Two of them, in turn."""

    def begin(self, step: int, size: int, kind: Kind = Kind.SNAPSHOT) -> str:
        path = self._folder / f"slot-{self._rank}-{step % 2}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        return str(path)

    def complete(self, path: str, step: int, size: int, kind: Kind = Kind.SNAPSHOT) -> None:
        return


def measure(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """By degree: bytes of this rank's share; of rank 0, in each round, seconds of a capture."""
    size, rounds, degrees = int(arguments[0]), int(arguments[1]), [int(each) for each in arguments[2:]]
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    width = int((size / 12 / _LAYERS) ** 0.5) // 16 * 16
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # so that the moments exist
    checkpointers: dict[int, Checkpointer] = {}
    found: dict[str, Any] = {}
    for degree in degrees:
        groups = [list(range(first, first + degree)) for first in range(0, world, degree)]
        group = dist.new_subgroups_by_enumeration(groups)[0]
        replicated = nn.parallel.DistributedDataParallel(model, process_group=group)
        slots = Found(Slots(folder / str(degree), rank, world, keep=1), None)
        checkpointers[degree] = Checkpointer(replicated, optimizer, every=1, found=slots)
        checkpointers[degree].restore()
        trained = checkpointers[degree]._trained
        own = [entry.tensor.nbytes for entry in trained.shares.own(trained.inventories.take())]
        found[str(degree)] = {"bytes": sum(own), "capture": []}
    dist.barrier()
    for number in range(
        _WARM + rounds if rank == 0 else 0
    ):  # the others wait, as if they were other machines
        for degree, checkpointer in checkpointers.items():
            seconds = capture(checkpointer)
            if number >= _WARM:
                found[str(degree)]["capture"].append(seconds)
    dist.barrier()
    for checkpointer in checkpointers.values():
        if rank == 0 and checkpointer.skipped:
            raise RuntimeError("snapshots were skipped")
        checkpointer.close()
    return found


def capture(checkpointer: Checkpointer) -> float:
    """Seconds from the end of a step until the next update may change the state."""
    start = time.perf_counter()
    checkpointer.step()
    checkpointer._saver.barrier()
    seconds = time.perf_counter() - start
    checkpointer.wait()
    return seconds


if __name__ == "__main__":
    be_rank(measure)
