"""What is needed to write artifacts into slots, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.version import Version
from tiercheck.trainer.backend import Backend, Skipped
from tiercheck.trainer.copying import Pending
from tiercheck.trainer.equality import Equality
from tiercheck.trainer.layouts import Layouts
from tiercheck.trainer.sanity import Sanity
from tiercheck.trainer.slot_file import OpenSlots, SlotWriter


class Cancelled(Exception):
    """The barrier gave the artifact up before its copy began."""


class Job(Protocol):
    """One artifact on its way. All methods raise Skipped, `copy` also Cancelled; then nothing is left behind."""

    @property
    def pending(self) -> Pending: ...

    @property
    def kind(self) -> Kind: ...

    def copy(self) -> None:
        """Urgent: training waits for the end of it before the next update."""
        ...

    def land(self) -> None:
        """Wait until a device has copied what `copy` gave to it."""
        ...

    def finish(self) -> None:
        """The rest: nothing of the model is needed for it."""
        ...


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

    def abandoning(self, pending: Pending, kind: Kind, path: str, work: Callable[[], None]) -> None:
        """Do `work`; if it fails, however, the slot is given back. Raises Skipped or Cancelled, and what nobody thought of."""
        try:
            work()
        except BaseException as error:  # invariant: a slot that stays begun is one less for all that is saved later
            self.backend.abandon(path, pending.step, kind)
            if isinstance(error, OSError | ValueError | RuntimeError):
                raise Skipped("CannotWrite", str(error)) from error
            raise
