"""The copy of one snapshot: lazy, so training goes on meanwhile, yet never torn.

State changes only inside `optimizer.step`. The copy runs in a thread between two updates, and the barrier in front of
the next update waits for what is left of it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiercheck.protocol.slot import SlotLayout
from tiercheck.trainer.capture import Entry, versions

CHUNK = 16 * 1024 * 1024
"""Bytes per copy call: long enough to be efficient, short enough that other threads get the interpreter in between."""


@dataclass
class Snapshot:
    """One capture on its way into a slot. Its tensors are those of the model itself; small ones are already copies."""

    step: int
    entries: Sequence[Entry]
    layout: SlotLayout
    blob: bytes
    device: torch.device | None = None
    """The CUDA device, if any."""
    ready: torch.cuda.Event | None = None
    """Recorded in the training stream: the state is final once it has passed."""
    seen: tuple[int, ...] = ()
    granted: threading.Event = field(default_factory=threading.Event)
    """The copy has begun, or never will."""
    copied: threading.Event = field(default_factory=threading.Event)
    """No byte of the model is read any more."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    cancelled: bool = False
    """The barrier gave it up, and has counted it."""

    def __post_init__(self) -> None:
        self.seen = versions(self.entries)

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

    def end(self) -> None:
        """Thread: whatever happened, the model is free."""
        self.granted.set()
        self.copied.set()

    def changed(self) -> set[str]:
        """Names of tensors that something else than the optimizer has changed since the capture."""
        lazy = [entry.name for entry in self.entries if entry.lazy]
        return {name for name, old, new in zip(lazy, self.seen, versions(self.entries), strict=True) if old != new}


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """CPU to CPU, releasing the interpreter lock; chunked, so that no single call is long."""
    if not source.is_contiguous():
        target.copy_(source)
        return
    flat, to = source.view(-1), target.view(-1)
    count = max(1, CHUNK // source.element_size())
    for start in range(0, flat.numel(), count):
        to[start : start + count].copy_(flat[start : start + count])


def copy_all(snapshot: Snapshot, views: Mapping[str, Tensor], stream: torch.cuda.Stream | None) -> None:
    """Bring every tensor into its place; when this returns, nothing of the model is read any more."""
    with torch.no_grad():
        if stream is None or snapshot.ready is None:
            for entry in snapshot.entries:
                copy_tensor(views[entry.name], entry.tensor)
            return
        stream.wait_event(snapshot.ready)
        with torch.cuda.stream(stream):
            for entry in snapshot.entries:
                views[entry.name].copy_(entry.tensor, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        done.synchronize()  # the tensors are referenced until here, so their memory cannot be given away


def non_finite(entries: Sequence[Entry], views: Mapping[str, Tensor]) -> str | None:
    """Name of a parameter or optimizer tensor in the slot that holds an infinity or a NaN. Buffers may (masks do)."""
    for entry in entries:
        view = views[entry.name]
        if not entry.lazy or not view.is_floating_point() or view.element_size() < 2:
            continue
        flat = view.view(-1)
        count = max(1, CHUNK // view.element_size())
        for start in range(0, flat.numel(), count):
            low, high = torch.aminmax(flat[start : start + count])
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return entry.name
    return None
