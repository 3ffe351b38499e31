"""What the saver's thread is told to do, by the training thread or by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tiercheck.trainer.save.slot_context import DeltaRoom, Job
from tiercheck.trainer.tensors.pending import Pending


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
    """A request of the training thread to the backend: one thread asks a sidecar, and training waits for no
    answer."""

    call: Callable[[], None]


@dataclass(frozen=True)
class ReserveRoom:
    """Slots of these bytes will be needed."""

    snapshot: int
    delta: DeltaRoom


@dataclass(frozen=True)
class TellCannotSave:
    """As `Backend.cannot_save`."""

    why: str


@dataclass(frozen=True)
class Flush:
    """Deliver what progress is owed, then set `done`: somebody waits for it."""

    done: threading.Event


@dataclass(frozen=True)
class End:
    """Nothing comes any more."""


Message = CallBackend | ReserveRoom | TellCannotSave | Flush | End
"""What can wait until everything that was copied is handed over."""
Task = CopyArtifact | FinishJob | Message
"""What the thread does at one go."""
