"""What is needed to write artifacts into slots, whatever their kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

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
    """One artifact on its way. Both methods raise Skipped, `copy` also Cancelled; then nothing is left behind."""

    @property
    def pending(self) -> Pending: ...

    @property
    def kind(self) -> Kind: ...

    def copy(self) -> None:
        """Urgent: training waits for the end of it before the next update."""
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
    stream: torch.cuda.Stream | None = None
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

    def on_gpu(self, pending: Pending, writer: SlotWriter) -> None:
        """If the artifact comes from a GPU: page-lock the slot, and let the side stream wait until it is final."""
        self.wait_for(pending)
        if pending.device is not None:
            writer.pin()

    def wait_for(self, pending: Pending) -> None:
        """Let the side stream, if one is needed, wait until what is to be copied is final."""
        if pending.device is None or pending.ready is None:
            return
        torch.cuda.set_device(pending.device)  # of this thread: else it would open the first GPU as well
        self.stream = self.stream or torch.cuda.Stream(pending.device)  # type: ignore[no-untyped-call]
        self.stream.wait_event(pending.ready)

    def on_stream(self, pending: Pending) -> contextlib.AbstractContextManager[object]:
        """Within it, what is read of a GPU is read in the order of the copies."""
        return contextlib.nullcontext() if pending.device is None else torch.cuda.stream(self.stream)

    def abandoning(self, pending: Pending, kind: Kind, path: str, work: Callable[[], None]) -> None:
        """Do `work`; if it fails the slot is given back. Raises Skipped or Cancelled."""
        try:
            work()
        except (Skipped, Cancelled):
            self.backend.abandon(path, pending.step, kind)
            raise
        except (OSError, ValueError, RuntimeError) as error:
            self.backend.abandon(path, pending.step, kind)
            raise Skipped("CannotWrite", str(error)) from error
