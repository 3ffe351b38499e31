"""Defines the interface to where artifacts go: the sidecar in a cluster, a folder on a laptop.

Its methods are called by the saver's thread, except where stated.

The rank is that of torch.distributed if it runs, else of torchrun's environment; DTensor gives the place of
its shard in the whole tensor.
"""

from __future__ import annotations

import logging
import os
import sys
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
from tiercheck.protocol.local import (
    DeclineDeltas,
    ReportCannotSave,
    ReportFailing,
    ReportMismatch,
    ReportRestored,
    ReportResume,
)
from tiercheck.protocol.version import Kind, Version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


T = TypeVar("T")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def gather_from_all(mine: T) -> list[T]:
    """Returns what each rank gives, in their order. A collective call."""
    if not is_distributed() or dist.get_world_size() == 1:
        return [mine]
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def is_true_anywhere(mine: bool) -> bool:
    """Returns whether `mine` is true at any rank. A collective call."""
    return any(gather_from_all(mine))


def rank_and_world() -> tuple[int, int]:
    """Returns (rank, number of ranks); (0, 1) for a process on its own."""
    if is_distributed():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Shard:
    piece: Piece
    replicated: tuple[DeviceMesh, tuple[int, ...]]
    """The mesh, and its dimensions along which other ranks hold the same."""


def shard_of(value: Tensor, local: Tensor) -> Shard | None:
    """Returns the shard `local` of a DTensor; None for other tensors, or if torch computes another shape."""
    mesh, placements = getattr(value, "device_mesh", None), getattr(value, "placements", None)
    if mesh is None or placements is None or any(placement.is_partial() for placement in placements):
        return None
    return _placed(mesh, tuple(placements), tuple(value.shape), tuple(local.shape))


@lru_cache(maxsize=64 * 1024)
def _placed(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], local: tuple[int, ...]
) -> Shard | None:
    """Computes a shard once, because torch takes long and every snapshot needs it of every tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    extent, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    if tuple(extent) != local or len(offset) != len(extent):
        return None
    dims = tuple(
        dim for dim, placement in enumerate(placements) if placement.is_replicate() and mesh.size(dim) > 1
    )
    return Shard(Piece(shape, Box(tuple(offset), tuple(extent))), (mesh, dims))


class _UnconfiguredLogging(logging.Handler):
    """Writes warnings to stderr while the script has configured no logging, as Python's last resort does.

    The prefix shows who speaks, and the launcher does not take the lines for the reason of a failure."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and log.handlers == [self]:
            print(f"tiercheck: {self.format(record)}", file=sys.stderr, flush=True)


log = logging.getLogger("tiercheck")
log.addHandler(_UnconfiguredLogging(logging.WARNING))

_held: set[tuple[int, str]] = set()
"""The process and place of each `Claim`."""
_first: dict[tuple[int, str], str] = {}
"""The first training that each process saved to each place."""

Ranges = Sequence[tuple[int, int]]
"""Byte ranges in a slot: from the first to before the second."""


class Skipped(Exception):
    """This artifact is not taken. `kind` is a CamelCase word; each kind is logged once."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RestoreError(RuntimeError):
    """The version to restore cannot be determined or read, so training must not begin."""


@dataclass(frozen=True)
class Offer:
    """Verified slots to restore from: a snapshot, and the deltas to replay on it, in order."""

    version: Version
    path: str
    """The path of the snapshot; empty if other ranks than these have saved the version."""
    deltas: tuple[str, ...] = ()
    world_size: int = 0
    source: str = ""
    """The place that it comes from, for people."""
    borrow: Callable[[int, Ranges], str] | None = None
    """A function for the slots of all of them (`resharding.SavedRanks`); None: only the own is readable."""


RankReport = ReportRestored | ReportResume | ReportMismatch | ReportFailing | ReportCannotSave | DeclineDeltas


class Backend(Protocol):
    """The interface to where artifacts go. Reports are dropped unless a backend overrides the method.

    `patience`: seconds that the barrier waits for a slot to be granted before it gives the artifact up; None:
    no limit.
    """

    attempt: int
    place: str
    """The place where artifacts go, for people: one Checkpointer of a process has it."""
    patience: float | None
    numa: int
    """The NUMA node of the trainer's device, set by the trainer; -1: none is known."""
    journal: Path
    """The path of this rank's journal of steps (`proof.journal`)."""
    left_out: str
    """The reason why something that was found is not taken, and how to take it; empty: nothing."""
    is_folder: bool
    """True if a folder stands in for all tiers, with a place of its own for each training.

    Nothing else then holds the last step when the script ends.
    """

    @property
    def every(self) -> int:
        """Returns the number of steps between snapshots, unless the script sets it; 0: not decided yet."""
        ...

    @property
    def delta(self) -> DeltaMode:
        """Returns whether deltas are wanted."""
        ...

    @property
    def sanity_gate(self) -> bool:
        """Returns whether a state that is not finite is refused, unless the script decides otherwise."""
        ...

    @property
    def verify_all(self) -> bool:
        """Returns whether every byte is verified before the next update, unless the script decides it."""
        ...

    def find(self) -> Offer | None:
        """Returns what to restore, None for a fresh start. Raises RestoreError.

        Called by the training thread, before the first step.
        """
        ...

    def report(self, report: RankReport) -> None:
        """Reports what the message says, from any thread. Never raises."""
        return

    def reserve(self, size: int, delta_size: int) -> None:
        """Requests slots of `size` bytes for snapshots, `delta_size` for deltas (0: none). Raises Skipped."""
        return

    def begin(self, step: int, size: int, kind: Kind) -> str:
        """Returns the path of a file of at least `size` bytes for the artifact of `step`. Raises Skipped."""
        ...

    def complete(self, path: str, step: int, size: int, kind: Kind) -> None:
        """Hands over the written file; its first `size` bytes are the complete artifact. Raises Skipped."""
        ...

    def abandon(self, path: str, step: int, kind: Kind) -> None:
        """Gives up the file, which will not be completed. Never raises."""
        ...

    def pass_over(self, step: int) -> None:
        """Reports that a snapshot due after `step` is not taken, so that none waits for it. Never raises."""
        return

    def progress(self, step: int, loss: float | None, seconds: float | None, not_finite: int) -> None:
        """Reports that `step` was reached, the last `not_finite` steps refused. Never blocks, never raises.

        Called by the training thread.
        """
        return

    def flush(self) -> bool:
        """Sends progress that is still pending. Returns True if nothing is left. Never raises."""
        return True

    def close(self) -> None:
        return


class Claim:
    """The exclusive use of a `Backend.place`, until it is released.

    Two Checkpointers of one process, as for the two models of a GAN, would write over each other's versions.
    """

    def __init__(self, place: str, run: str) -> None:
        """Raises ValueError if another one of this process has it. A forked process begins anew."""
        self._key = os.getpid(), place
        if self._key in _held:
            raise ValueError(
                f"another Checkpointer of this process saves to {place}: close it first, or give all models "
                "and optimizers to one (torch.nn.ModuleDict, a list of optimizers)"
            )
        _held.add(self._key)
        self.is_second = _first.setdefault(self._key, run) != run
        """True if another training of this process had the place before."""

    def release(self) -> None:
        """Releases the place. May be called twice."""
        _held.discard(self._key)


class WarnOnce:
    """Logs a warning once for every kind of trouble, and at debug level when it happens again."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, kind: str, message: str) -> None:
        level = logging.DEBUG if kind in self._seen else logging.WARNING
        self._seen.add(kind)
        log.log(level, "%s: %s", kind, message)
