"""The copy of an artifact: lazy, so training goes on meanwhile, yet never torn.

State changes only inside `optimizer.step`. The copy runs in a thread between two updates, and the barrier in front of
the next update waits for what is left of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiercheck.failpoints import failpoint
from tiercheck.trainer.accelerator import Accelerator, Mark
from tiercheck.trainer.counters import Counters
from tiercheck.trainer.crew import Crew
from tiercheck.trainer.leaves import Entry
from tiercheck.trainer.proof import Proof
from tiercheck.trainer.user_state import Packed

CHUNK = 16 * 1024 * 1024
"""Bytes per copy call: long enough to be efficient, short enough that other threads get the interpreter in between."""


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


@dataclass(kw_only=True)
class Snapshot(Pending):
    """A capture of the whole state. Its tensors are those of the model itself; small ones are already copies."""

    entries: Sequence[Entry]
    blob: Packed
    proof: Proof
    """What the state was when `step` was called."""
    crew: Crew | None = None
    """Set before the copy begins, where the training thread can take part in it."""
    _changed: set[str] | None = None

    def __post_init__(self) -> None:
        self._lazy = [entry for entry in self.entries if entry.lazy]
        # Those of the live tensors: if one moves during the copy, the copy is torn.
        self._counters = Counters([entry.tensor if entry.origin is None else entry.origin for entry in self._lazy])
        self._seen = self._counters.read()

    def changed(self) -> set[str]:
        """Names of tensors that something else than the optimizer has changed since the capture. Whoever asks first decides: when the copy has
        ended, or the next update begins.
        """
        with self._lock:
            if self._changed is None:
                moved = self._counters.moved(self._seen, self._counters.read())
                self._changed = {self._lazy[number].name for number in moved}
            return self._changed

    def let_go(self) -> None:
        if self.device is not None:
            self.changed()  # the copy goes on while the update changes everything, as seen by this thread
        super().let_go()


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """CPU to CPU, releasing the interpreter lock; chunked, so that no single call is long."""
    for to, chunk in _chunks(target, source):
        failpoint("mid-copy")
        to.copy_(chunk)


def pieces(items: Iterable[tuple[str, Tensor]], views: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(target, source) of every chunk of the named tensors."""
    return [piece for name, tensor in items for piece in _chunks(views[name], tensor)]


def _chunks(target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    if not source.is_contiguous():
        return [(target, source)]
    count = max(1, CHUNK // source.element_size())
    flat, to = source.view(-1), target.view(-1)
    return [(to[at : at + count], flat[at : at + count]) for at in range(0, flat.numel(), count)] or [(to, flat)]


def non_finite(named: Sequence[tuple[str, Tensor]]) -> str | None:
    """Name of the first floating-point tensor in the slot that holds an infinity or a NaN."""
    for name, view in named:
        if not view.is_floating_point() or view.element_size() < 2 or not view.numel():
            continue
        flat = view.view(-1)
        count = max(1, CHUNK // view.element_size())
        for start in range(0, flat.numel(), count):
            low, high = torch.aminmax(flat[start : start + count])
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None
