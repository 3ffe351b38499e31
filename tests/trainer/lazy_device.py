"""Plays a device of host memory whose copies happen only when somebody waits for them.

The training stream is the program itself, so a copy that the next update does not come after reads what the
update has written.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.scripted_sidecar import DEADLINE


@dataclass
class LateMark:
    device: LazyDevice
    position: int

    def query(self) -> bool:
        return self.device.done >= self.position

    def synchronize(self) -> None:
        self.device.waits[threading.current_thread().name] += 1
        assert self.device.running.wait(DEADLINE)
        self.device.advance(self.position)


@dataclass
class LazyDevice:
    given: int = 0
    done: int = 0
    holds: int = 0
    follows: int = 0
    streams: int = 1
    """Of training. With more than one, what is held is only one of them, and copies stay late for the others.
    """
    waits: Counter[str] = field(default_factory=Counter)
    """How often each thread waited, by its name."""
    running: threading.Event = field(default_factory=threading.Event)
    """Until it is set nobody who waits comes on; the training stream does."""
    landed: Callable[[Tensor], None] = lambda target: None
    """Told of each copy that has ended."""
    _work: deque[tuple[Tensor, Tensor]] = field(default_factory=deque)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.running.set()

    def __hash__(self) -> int:
        return id(self)

    def numa_node(self) -> int:
        return 0

    def has(self, tensor: Tensor) -> bool:
        return True

    def final(self) -> LateMark:
        return self.passed()

    def hold(self, mark: LateMark) -> None:
        self.holds += 1
        if self.streams == 1:
            self.advance(mark.position)

    def follow(self, mark: LateMark) -> None:
        self.follows += 1
        self.advance(mark.position)

    def passed(self) -> LateMark:
        with self._lock:
            return LateMark(self, self.given)

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        with self._lock:
            self.given += 1
            self._work.append((target, source))

    put = fetch

    @torch.no_grad()
    def advance(self, position: int) -> None:
        with self._lock:
            while self.done < position:
                target, source = self._work.popleft()
                target.copy_(source)
                self.landed(target)
                self.done += 1
