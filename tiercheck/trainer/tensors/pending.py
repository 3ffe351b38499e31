"""Lets two threads agree on an artifact on its way: begun, given up, or copied."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tiercheck.trainer.tensors.accelerator import Accelerator, Mark


@dataclass(kw_only=True)
class Pending:
    """One artifact on its way into a slot, as the training thread and the saver's see it."""

    step: int
    device: Accelerator | None = None
    """Where it lies, if not in host memory."""
    ready: Mark | None = None
    """Of the training stream: what is to be copied is final once the device has passed it."""
    granted: threading.Event = field(default_factory=threading.Event)
    """The copy has begun, or never will."""
    copied: threading.Event = field(default_factory=threading.Event)
    """No byte of the model is read any more, or of a device's once it has passed `done`."""
    done: Mark | None = None
    """Set before `copied`, where a device still has something to read."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    moved: threading.Event = field(default_factory=threading.Event)
    """The next update may have begun: the model is not what was captured any more."""
    cancelled: bool = False
    """The barrier gave it up, and has counted it."""

    def start(self) -> bool:
        """Thread: may the copy begin? False once the barrier has given up."""
        with self._lock:
            if not self.cancelled:
                self.granted.set()
            return not self.cancelled

    def cancel(self) -> bool:
        """Barrier: give up, unless the copy has begun."""
        with self._lock:
            self.cancelled = not self.granted.is_set()
            return self.cancelled

    def let_go(self) -> None:
        """Barrier: the next update is about to begin."""
        self.moved.set()

    def end(self) -> None:
        """Thread: whatever happened, the model is free."""
        self.granted.set()
        self.copied.set()
