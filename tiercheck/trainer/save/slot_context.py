"""Holds the context in which the saver thread writes artifacts to slots, and defines its tasks.

A snapshot's layout rarely changes from one to the next, and slots must be made before they are needed, so
layouts are cached.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from tiercheck.protocol.artifacts.pieces import pieces_table
from tiercheck.protocol.artifacts.slot import PIECES, PROOF, SlotLayout
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends.backend import Backend, Skipped
from tiercheck.trainer.proof.proof import SUM_BYTES
from tiercheck.trainer.replicas.equality import Equality
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.staging import DeviceCopy
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.slot_file import USER_BLOB, OpenSlots, plan_slot
from tiercheck.trainer.tensors.accelerator import Pending
from tiercheck.trainer.tensors.tensor_parts import Entry


class Sanity:
    """Counts consecutive steps that are not finite. A step may get several results.

    They come from the training thread (the loss) and from the saver thread (gradient, state)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad = 0
        self._first = 0
        self.in_a_row = 0
        """The number of refused steps since the last good one."""

    def refused(self, step: int) -> None:
        """Notes that loss, gradient or state of `step` is not finite.

        Steps since the last refused one count too, unless one was good."""
        with self._lock:
            if step > self._bad:
                if self.in_a_row == 0:
                    self._first = step
                self._bad = step
                self.in_a_row = step - self._first + 1

    def good(self, step: int) -> None:
        """Notes that the examined values are finite. Does not undo a refusal of the same step."""
        with self._lock:
            if step > self._bad:
                self.in_a_row = 0


class UnknownRoom(Enum):
    """The values for a delta slot's bytes without a number."""

    AS_BEFORE = "as before"
    KNOWN_SOON = "known soon"
    """Slots are not requested yet."""


DeltaRoom = int | UnknownRoom
"""Bytes of a delta slot; 0: no delta is taken."""


@dataclass(frozen=True)
class Planned:
    """A snapshot's layout, and the encoded table of its pieces, which is stored in it."""

    slot: SlotLayout
    pieces: bytes


class Layouts:
    """Plans and caches snapshot layouts. Thread-safe.

    The training thread plans early, the saver thread when the length of the user blob is known."""

    def __init__(self, reserve: Callable[[int, DeltaRoom], None]) -> None:
        """Calls `reserve` with the size of each new layout, and with the `delta_room` of `plan`."""
        self._reserve = reserve
        self._lock = threading.Lock()
        self._layout: Planned | None = None
        self._signature: tuple[Any, ...] = ()
        self._capacity = 0

    @property
    def known(self) -> bool:
        return self._layout is not None

    def plan(
        self, entries: Sequence[Entry], blob_bytes: int, delta_room: DeltaRoom = UnknownRoom.AS_BEFORE
    ) -> Planned:
        """Returns the layout for these tensors. Raises NotCapturable.

        It is the same object until the set of tensors changes or the blob outgrows its place.
        """
        with self._lock:
            self._capacity = user_state.capacity_for(blob_bytes, self._capacity)
            signature = (
                self._capacity,
                *((entry.name, entry.tensor.dtype, entry.tensor.shape, entry.piece) for entry in entries),
            )
            if self._layout is None or signature != self._signature:
                pieces = pieces_table(
                    {entry.name: entry.piece for entry in entries if entry.piece is not None}
                )
                before = {PIECES: len(pieces), PROOF: SUM_BYTES * len(entries)}
                tensors = [(entry.name, entry.tensor) for entry in entries]
                slot = plan_slot(before, tensors, {USER_BLOB: self._capacity})
                self._layout, self._signature = Planned(slot, pieces), signature
                self._reserve(slot.size, delta_room)
            return self._layout


class Cancelled(Exception):
    """The error for an artifact that the barrier cancelled before its copy began."""


@dataclass
class SaveContext:
    """The context in which the saver thread writes artifacts to slots."""

    backend: Backend
    rank: int
    world_size: int
    gate: Callable[[], bool]
    """A function that returns whether artifacts that are not finite are refused."""
    verify_all: Callable[[], bool]
    """A function that returns whether every byte is compared before the next update."""
    sanity: Sanity
    layouts: Layouts
    equality: Equality
    snapshot_room: int = 0
    """Bytes of a snapshot slot, as far as known."""
    delta_room: int = 0
    """Bytes reserved for a delta slot."""
    slots: OpenSlots = field(default_factory=OpenSlots)

    def follow(self, pending: Pending) -> None:
        """Orders later work on the artifact's device after the step of the artifact."""
        if pending.device is not None and pending.ready is not None:
            pending.device.follow(pending.ready)


class Job(ABC):
    """The saving of one artifact. All methods raise Skipped, `copy` also Cancelled; then nothing is left."""

    kind: ClassVar[Kind]

    def __init__(self, context: SaveContext, pending: Pending) -> None:
        self._context, self.pending = context, pending
        self._path = ""
        self._layout: SlotLayout
        self._views: dict[str, Tensor] = {}
        self._device_copy: DeviceCopy | None = None

    @abstractmethod
    def copy(self) -> None:
        """Copies the artifact. Urgent: training waits for its end before the next update."""

    @abstractmethod
    def land(self) -> None:
        """Waits until a device has done the copies that `copy` gave to it."""

    def finish(self) -> None:
        """Completes the artifact, without access to the model."""
        self._guarded(self._finish)
        self._context.backend.complete(self._path, self.pending.step, self._layout.size, self.kind)

    @abstractmethod
    def _finish(self) -> None: ...

    def _seal(self, metadata: Mapping[str, str]) -> None:
        context = self._context
        version = Version(self.pending.step, context.backend.attempt)
        slot = context.slots.open(self._path)
        slot.finish(self._layout, context.rank, version, context.world_size, metadata, kind=self.kind)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Does `work`, and gives the slot back on any error. Raises Skipped, Cancelled, unexpected errors."""
        try:
            work()
        except BaseException as error:  # invariant: a slot left in use is lost for later artifacts
            self._context.backend.abandon(self._path, self.pending.step, self.kind)
            if isinstance(error, OSError | ValueError | RuntimeError):
                raise Skipped("CannotWrite", str(error)) from error
            raise

    def _refuse_non_finite(self, names: Sequence[str]) -> None:
        """Raises Skipped if one of these holds an infinity or a NaN. Call after `land`."""
        if self._device_copy is not None:
            name = self._device_copy.non_finite(frozenset(names))
        else:
            name = staging.non_finite([(name, self._views[name]) for name in names])
        if name:
            self._context.sanity.refused(self.pending.step)
            raise Skipped("NotFinite", f"{name} holds an infinity or a NaN")
        self._context.sanity.good(self.pending.step)


Message = partial[None] | None
"""A call of the backend that can wait until all copied artifacts are handed over; None ends the thread.

Only the saver thread calls the sidecar, and training does not wait for the reply."""
Task = Pending | Job | Message
"""A unit of work of the thread: an artifact to copy, which the next update waits for; one to complete."""
