"""Holds what the saver's thread needs to write an artifact into a slot, and the tasks it is given.

A snapshot's layout rarely changes from one to the next, and slots must be made before they are needed. So
known layouts are remembered.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor

from tiercheck.protocol.artifacts.pieces import pieces_table
from tiercheck.protocol.artifacts.slot import PIECES, PROOF, SlotLayout
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends.backend import Backend, Skipped
from tiercheck.trainer.proof.proof import SUM_BYTES
from tiercheck.trainer.replicas.equality import Equality
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.staging import Flight
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.slot_file import USER_BLOB, OpenSlots, SlotWriter
from tiercheck.trainer.tensors.accelerator import Pending
from tiercheck.trainer.tensors.leaves import Entry, NotCapturable, dtype_name


class Sanity:
    """Verdicts come from the training thread (the loss) and from the saver's (gradient, state), a step may
    get several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad = 0
        self._first = 0
        self._in_a_row = 0

    @property
    def in_a_row(self) -> int:
        """Steps refused, up to now, since the last good one."""
        return self._in_a_row

    def refused(self, step: int) -> None:
        """Loss, gradient or state of `step` is not finite. So were the steps since the last refused one,
        unless one was good."""
        with self._lock:
            if step > self._bad:
                if self._in_a_row == 0:
                    self._first = step
                self._bad = step
                self._in_a_row = step - self._first + 1

    def good(self, step: int) -> None:
        """All that was looked at is finite. Does not take back what was refused for the same step."""
        with self._lock:
            if step > self._bad:
                self._in_a_row = 0


class UnknownRoom(Enum):
    """What is said of a delta slot's bytes where no number is."""

    AS_BEFORE = "as before"
    KNOWN_SOON = "known soon"
    """So slots are not asked for yet."""


DeltaRoom = int | UnknownRoom
"""Bytes of a delta slot; 0: no delta is taken."""


@dataclass(frozen=True)
class Planned:
    """A snapshot's layout, and the table of its pieces, which goes into it as it is."""

    slot: SlotLayout
    pieces: bytes


class Layouts:
    """May be used by several threads: the training thread asks early, the saver's when it knows how long the
    user blob is."""

    def __init__(self, reserve: Callable[[int, DeltaRoom], None]) -> None:
        """`reserve` is told the size of each new layout, and the room for deltas as `plan` was."""
        self._reserve = reserve
        self._lock = threading.Lock()
        self._layout: Planned | None = None
        self._signature: tuple[Any, ...] = ()
        self._capacity = 0

    @property
    def known(self) -> bool:
        """Whether there is one yet."""
        return self._layout is not None

    def plan(
        self, entries: Sequence[Entry], blob_bytes: int, delta_room: DeltaRoom = UnknownRoom.AS_BEFORE
    ) -> Planned:
        """The layout for these tensors; the same object until the set of tensors changes or the blob outgrows
        its place.

        Raises NotCapturable.
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
                stored = [
                    (
                        entry.name,
                        dtype_name(entry.tensor.dtype),
                        tuple(entry.tensor.shape),
                        entry.tensor.nbytes,
                    )
                    for entry in entries
                ]
                try:
                    slot = SlotLayout.plan(
                        [
                            (PIECES, "U8", (len(pieces),), len(pieces)),
                            (PROOF, "U8", (SUM_BYTES * len(entries),), SUM_BYTES * len(entries)),
                            *stored,
                            (USER_BLOB, "U8", (self._capacity,), self._capacity),
                        ]
                    )
                except (TypeError, ValueError) as error:
                    raise NotCapturable(str(error)) from error
                self._layout, self._signature = Planned(slot, pieces), signature
                self._reserve(slot.size, delta_room)
            return self._layout


class Cancelled(Exception):
    """The barrier gave the artifact up before its copy began."""


@dataclass
class Desk:
    """Of the saver's thread."""

    backend: Backend
    rank: int
    world_size: int
    gate: Callable[[], bool]
    """Whether what is not finite is refused."""
    verify_all: Callable[[], bool]
    """Whether every byte is compared before the next update."""
    sanity: Sanity
    layouts: Layouts
    """Of snapshots."""
    equality: Equality
    snapshot_room: int = 0
    """Bytes of a snapshot slot, as far as known."""
    delta_room: int = 0
    """Bytes reserved for a delta."""
    _slots: OpenSlots = field(default_factory=OpenSlots)

    def version(self, step: int) -> Version:
        return Version(step, self.backend.attempt)

    def open(self, path: str) -> SlotWriter:
        """The slot at `path`, mapped. Raises OSError or ValueError."""
        return self._slots.open(path)

    def follow(self, pending: Pending) -> None:
        """What is given to the artifact's device from now on comes after the step that it is of."""
        if pending.device is not None and pending.ready is not None:
            pending.device.follow(pending.ready)


class Job(ABC):
    """One artifact on its way. All methods raise Skipped, `copy` also Cancelled; then nothing is left
    behind.
    """

    kind: ClassVar[Kind]

    def __init__(self, desk: Desk, pending: Pending) -> None:
        self._desk, self.pending = desk, pending
        self._path = ""
        self._views: dict[str, Tensor] = {}
        self._flight: Flight | None = None

    @abstractmethod
    def copy(self) -> None:
        """Urgent: training waits for the end of it before the next update."""

    @abstractmethod
    def land(self) -> None:
        """Wait until a device has copied what `copy` gave to it."""

    @abstractmethod
    def finish(self) -> None:
        """The rest: nothing of the model is needed for it."""

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do `work`; if it fails, however, the slot is given back. Raises Skipped or Cancelled, and what
        nobody thought of."""
        try:
            work()
        except BaseException as error:  # invariant: a slot that stays begun is one less for all that follows
            self._desk.backend.abandon(self._path, self.pending.step, self.kind)
            if isinstance(error, OSError | ValueError | RuntimeError):
                raise Skipped("CannotWrite", str(error)) from error
            raise

    def _refuse_non_finite(self, names: Sequence[str]) -> None:
        """Raises Skipped if one of these holds an infinity or a NaN. After the landing."""
        if self._flight is not None:
            name = self._flight.non_finite(frozenset(names))
        else:
            name = staging.non_finite([(name, self._views[name]) for name in names])
        if name:
            self._desk.sanity.refused(self.pending.step)
            raise Skipped("NotFinite", f"{name} holds an infinity or a NaN")
        self._desk.sanity.good(self.pending.step)


@dataclass(frozen=True)
class Submitted:
    """Artifacts of one step. A device is given all of them before any is waited for."""

    artifacts: tuple[Pending, ...]


@dataclass(frozen=True)
class CopyArtifact:
    """One of them: urgent, because the next update waits for it."""

    artifact: Pending


@dataclass(frozen=True)
class FinishJob:
    """The rest of what was copied: hand it over."""

    job: Job


@dataclass(frozen=True)
class CallBackend:
    """A request of the training thread that ends at the backend: one thread asks a sidecar, and training
    waits for no answer."""

    call: Callable[[], None]


@dataclass(frozen=True)
class End:
    """Nothing comes any more."""


Message = CallBackend | End
"""What can wait until everything that was copied is handed over."""
Task = CopyArtifact | FinishJob | Message
"""What the thread does at one go."""
