"""The copy of an artifact: lazy, so training goes on meanwhile, yet never torn.

State changes only inside `optimizer.step`. The copy runs in a thread between two updates, and the barrier in front of
the next update waits for what is left of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiercheck.trainer.capture import versions
from tiercheck.trainer.crew import Crew
from tiercheck.trainer.leaves import Entry
from tiercheck.trainer.proof import Proof
from tiercheck.trainer.user_state import Packed

CHUNK = 16 * 1024 * 1024
"""Bytes per copy call: long enough to be efficient, short enough that other threads get the interpreter in between."""
_IN_FLIGHT = 4
"""Chunks given to the GPU ahead of the one that is waited for."""


@dataclass(kw_only=True)
class Pending:
    """One artifact on its way into a slot, as the training thread and the saver's see it."""

    step: int
    device: torch.device | None = None
    """The CUDA device, if any."""
    ready: torch.cuda.Event | None = None
    """Recorded in the training stream: what is to be copied is final once it has passed."""
    granted: threading.Event = field(default_factory=threading.Event)
    """The copy has begun, or never will."""
    copied: threading.Event = field(default_factory=threading.Event)
    """No byte of the model is read any more."""
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
    seen: tuple[int, ...] = ()
    crew: Crew | None = None
    """Set before the copy begins, where the training thread can take part in it."""

    def __post_init__(self) -> None:
        self.seen = versions(self.entries)

    def changed(self) -> set[str]:
        """Names of tensors that something else than the optimizer has changed since the capture."""
        lazy = [entry.name for entry in self.entries if entry.lazy]
        return {name for name, old, new in zip(lazy, self.seen, versions(self.entries), strict=True) if old != new}


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """CPU to CPU, releasing the interpreter lock; chunked, so that no single call is long."""
    for to, chunk in _chunks(target, source):
        to.copy_(chunk)


@torch.no_grad()
def copy_all(
    items: Iterable[tuple[str, Tensor]],
    views: Mapping[str, Tensor],
    stream: torch.cuda.Stream | None,
    copied: Callable[[str], None] = lambda name: None,
) -> None:
    """Bring every named tensor into its place; when this returns, nothing of the model is read any more.

    With a `stream`, which already waits for the tensors to be final, the chunks go through it, a few at a time. `copied`
    is told each name as soon as its tensor may be let go; until then it is referenced here, so that its memory is not given away.
    """
    if stream is None:
        for name, tensor in items:
            copy_tensor(views[name], tensor)
            copied(name)
        return
    flying: deque[tuple[torch.cuda.Event, Tensor, str]] = deque()
    with torch.cuda.stream(stream):
        for name, tensor in items:
            chunks = _chunks(views[name], tensor)
            for number, (target, source) in enumerate(chunks, start=1):
                target.copy_(source, non_blocking=True)
                passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waits without spinning
                passed.record(stream)
                flying.append((passed, source, name if number == len(chunks) else ""))
                if len(flying) > _IN_FLIGHT:
                    _land(flying, copied)
    while flying:
        _land(flying, copied)


def _land(flying: deque[tuple[torch.cuda.Event, Tensor, str]], copied: Callable[[str], None]) -> None:
    passed, _, name = flying.popleft()
    passed.synchronize()
    if name:
        copied(name)


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
