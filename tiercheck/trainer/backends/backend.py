"""Defines where artifacts go: in a cluster to the sidecar, on a laptop to a folder; and of which rank.

Both are one small interface. Its methods are called by the saver's thread, except where stated.

torch.distributed tells the rank if it runs, else torchrun's environment; DTensor tells the place of its shard
in the whole tensor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tiercheck.protocol.artifacts.pieces import Box, Piece
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.report import Exact
from tiercheck.protocol.version import Kind, Version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def gather_from_all(mine: T) -> list[T]:
    """What each rank gives, in their order. A collective call."""
    if not is_distributed() or dist.get_world_size() == 1:
        return [mine]
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def is_true_anywhere(mine: bool) -> bool:
    """Whether it is so at any rank. A collective call."""
    return any(gather_from_all(mine))


def rank_and_world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) for a process on its own."""
    if is_distributed():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Shard:
    piece: Piece
    replicated: tuple[DeviceMesh, tuple[int, ...]]
    """The dimensions of the mesh along which other ranks hold the same."""


def shard_of(value: Tensor, local: Tensor) -> Shard | None:
    """Of a DTensor, whose local shard is `local`; None for other tensors, and where torch's own account does
    not fit the shard."""
    mesh, placements = getattr(value, "device_mesh", None), getattr(value, "placements", None)
    if mesh is None or placements is None or any(placement.is_partial() for placement in placements):
        return None
    return _placed(mesh, tuple(placements), tuple(value.shape), tuple(local.shape))


@lru_cache(maxsize=64 * 1024)
def _placed(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], local: tuple[int, ...]
) -> Shard | None:
    """Remembered, because torch takes long to tell it, and it is asked for every tensor at every snapshot."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    extent, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    if tuple(extent) != local or len(offset) != len(extent):
        return None
    dims = tuple(
        dim for dim, placement in enumerate(placements) if placement.is_replicate() and mesh.size(dim) > 1
    )
    return Shard(Piece(shape, Box(tuple(offset), tuple(extent))), (mesh, dims))


log = logging.getLogger("tiercheck")

_held: set[tuple[int, str]] = set()
"""Process and place of each `Claim`."""
_first: dict[tuple[int, str], str] = {}
"""The first training that each process saved to each place."""

Ranges = Sequence[tuple[int, int]]
"""Of bytes in a slot: from the first to before the second."""


class Skipped(Exception):
    """This artifact is not taken. `kind` is a CamelCase word; each kind is logged once."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RestoreError(RuntimeError):
    """What to restore cannot be found out or read, so training must not begin."""


@dataclass(frozen=True)
class Offer:
    """Verified slots to restore from: a snapshot, and the deltas to replay on it, in order."""

    version: Version
    path: str
    """Empty if other ranks than these have saved the version."""
    deltas: tuple[str, ...] = ()
    world_size: int = 0
    """Ranks that saved it."""
    source: str = ""
    """Where it comes from, for people."""
    borrow: Callable[[int, Ranges], str] | None = None
    """How to get at the slots of all of them (`resharding.OtherRanks`); None: only the own one can be read.
    """


class Backend(Protocol):
    """`patience`: seconds that the barrier waits for a slot to be granted before it gives the artifact up;
    None: no limit. What only the rest of a job has to know goes nowhere unless a backend overrides it."""

    attempt: int
    place: str
    """Where artifacts go, for people: one Checkpointer of a process has it."""
    patience: float | None
    numa: int
    """Set by the trainer: the NUMA node of its device; -1: none is known."""
    journal: Path
    """Where this rank's journal of steps is kept (`proof.journal`)."""
    left_out: str
    """What was found and is not taken, and how to take it; empty: nothing."""
    is_folder: bool
    """Whether a folder stands in for all tiers: nothing else holds the last step when the script ends, and
    each training has a place of its own."""

    @property
    def every(self) -> int:
        """Steps between snapshots, unless the script says otherwise; 0: not decided yet."""
        ...

    @property
    def delta(self) -> DeltaMode:
        """Whether deltas are wanted."""
        ...

    @property
    def sanity_gate(self) -> bool:
        """Whether what is not finite is refused, unless the script says otherwise."""
        ...

    @property
    def verify_all(self) -> bool:
        """Whether every byte of a snapshot is compared with the state before the next update, unless the
        script says otherwise."""
        ...

    def find(self) -> Offer | None:
        """Training thread, before the first step: what to restore, None for a fresh start. Raises
        RestoreError."""
        ...

    def restored(self, step: int) -> None:
        """Training thread: the offer was loaded."""
        return

    def resumed(self, step: int, exact: Exact, steps: int, message: str, suspected: bool) -> None:
        """Training thread: the steps trained again after `step` were compared with the life before.
        `suspected`: what differs is a step that was suspected. Never raises."""
        return

    def mismatch(self, step: int, message: str, kind: Kind = Kind.DELTA) -> None:
        """Training thread, before the first step: the replay of the delta of `step` went wrong, or the
        snapshot of `step` is of replicas that differed. Never raises."""
        return

    def reserve(self, size: int, delta_size: int) -> None:
        """Slots of `size` bytes will be needed for snapshots, of `delta_size` for deltas (0: none). Raises
        Skipped."""
        return

    def begin(self, step: int, size: int, kind: Kind) -> str:
        """Path of a file of at least `size` bytes for the artifact after `step`. Raises Skipped."""
        ...

    def complete(self, path: str, step: int, size: int, kind: Kind) -> None:
        """The file is written, state word included; its first `size` bytes are the artifact. Raises
        Skipped.
        """
        ...

    def abandon(self, path: str, step: int, kind: Kind) -> None:
        """The file will not be completed. Never raises."""
        ...

    def pass_over(self, step: int) -> None:
        """A snapshot was due after `step` and is not taken, so nobody should wait for it. Never raises."""
        return

    def no_deltas(self, message: str, since: int = 0) -> None:
        """This rank takes no deltas, and why; empty: it takes them again. `since`: those of this step and
        later ones, of this process, must not be replayed either;
        0: nothing is known against them. Never raises."""
        return

    def cannot_save(self, message: str) -> None:
        """Nothing of this rank can be saved, and why; empty: it can again. Never raises."""
        return

    def progress(self, step: int, loss: float | None, seconds: float | None, not_finite: int) -> None:
        """Training thread: `step` was reached, the last `not_finite` of them refused. Never blocks, never
        raises."""
        return

    def failing(self, reason: str, message: str, exit_code: int) -> None:
        """This process is about to end with `exit_code`, and why. Never raises."""
        return

    def flush(self) -> bool:
        """Deliver what progress is still owed; True if nothing is left. Never raises."""
        return True

    def close(self) -> None:
        return


class Claim:
    """Of a `Backend.place`, until it is released: two Checkpointers of one process, as for the two models of
    a GAN, would write over each other's versions.
    """

    def __init__(self, place: str, run: str) -> None:
        """Raises ValueError if another one of this process has it. A forked one begins anew."""
        self._key = os.getpid(), place
        if self._key in _held:
            raise ValueError(
                f"another Checkpointer of this process saves to {place}: close it first, or give all "
                "models and optimizers to"
                " one (torch.nn.ModuleDict, a list of optimizers)"
            )
        _held.add(self._key)
        self.is_second = _first.setdefault(self._key, run) != run
        """Whether another training of this process had the place before."""

    def release(self) -> None:
        """May be called twice."""
        _held.discard(self._key)


class WarnOnce:
    """A log line for every kind of trouble, not for every time it happens."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, kind: str, message: str) -> None:
        level = logging.DEBUG if kind in self._seen else logging.WARNING
        self._seen.add(kind)
        log.log(level, "%s: %s", kind, message)
