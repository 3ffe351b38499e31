"""Runs one rank of `benchmarks.sharing`: a model under several degrees of data parallelism.

Each round has one capture of each.

Slots are files in memory that are there already, as a sidecar grants them. What becomes of a full one is no
business of the trainer's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import be_rank
from tiercheck import Checkpointer
from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.checkpointer import Found

_LAYERS = 16
_WARM = 3


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
    """By degree: bytes of this rank's share; of rank 0, in each round, seconds of a capture and of a copy of
    as many bytes."""
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
    shares: dict[int, list[Tensor]] = {}
    for degree in degrees:
        groups = [list(range(first, first + degree)) for first in range(0, world, degree)]
        group = dist.new_subgroups_by_enumeration(groups)[0]
        replicated = nn.parallel.DistributedDataParallel(model, process_group=group)
        slots = Found(Slots(folder / str(degree), rank, world, keep=1), None)
        checkpointers[degree] = Checkpointer(replicated, optimizer, every=1, found=slots)
        checkpointers[degree].restore()
        trained = checkpointers[degree]._trained
        entries = trained.shares.own(trained.inventories.take())
        shares[degree] = [entry.tensor for entry in entries]
    found: dict[str, Any] = {
        str(degree): {"bytes": sum(tensor.nbytes for tensor in own), "capture": [], "copy": []}
        for degree, own in shares.items()
    }
    dist.barrier()
    for number in range(
        _WARM + rounds if rank == 0 else 0
    ):  # the others wait, as if they were other machines
        for degree, checkpointer in checkpointers.items():
            seconds = {"capture": capture(checkpointer), "copy": copy(shares[degree])}
            if number >= _WARM:
                for what, each in seconds.items():
                    found[str(degree)][what].append(each)
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


def copy(tensors: list[Tensor]) -> float:
    """Seconds of copying them into memory that is there."""
    into = [torch.zeros_like(tensor) for tensor in tensors]
    start = time.perf_counter()
    for target, source in zip(into, tensors, strict=True):
        target.copy_(source)
    return time.perf_counter() - start


if __name__ == "__main__":
    be_rank(measure)
