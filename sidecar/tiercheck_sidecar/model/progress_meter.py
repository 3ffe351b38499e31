"""Measures how far a restore is and since when nothing came, to tell stuck from slow."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tiercheck.protocol.report import RestoreProgress

_NAMED = 8
"""Sources that a report names."""


class ProgressMeter:
    """Of one restore at a time. Thread-safe. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wanted: dict[int, int] = {}
        self._done: Counter[int] = Counter()
        self._waiting: Counter[str] = Counter()
        self._stalled: dict[str, None] = {}
        self._moved = clock()

    def begin(self) -> None:
        """Another restore is wanted from now on."""
        with self._lock:
            self._wanted, self._done, self._stalled = {}, Counter(), {}
            self._moved = self._clock()

    def plan(self, rank: int, wanted: int, done: int) -> None:
        """Of `wanted` bytes that the rank needs, `done` are here and verified."""
        with self._lock:
            self._wanted[rank], self._done[rank] = wanted, done
            self._moved = self._clock()

    def arrived(self, rank: int, count: int) -> None:
        """So many more bytes came for the rank, or were read again where they lie."""
        with self._lock:
            self._done[rank] += count
            self._moved = self._clock()

    @contextlib.contextmanager
    def waiting(self, source: str) -> Iterator[None]:
        """While `source` is waited for."""
        with self._lock:
            self._waiting[source] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[source] -= 1

    def given_up(self, source: str) -> None:
        """Nothing came from `source` for too long. To go on to the next one is progress."""
        with self._lock:
            self._stalled[source] = None
            self._moved = self._clock()

    @property
    def stalled(self) -> tuple[str, ...]:
        """The sources that this restore has given up."""
        with self._lock:
            return tuple(self._stalled)[:_NAMED]

    def describe(self) -> RestoreProgress:
        """For the report."""
        with self._lock:
            return RestoreProgress(
                bytes=sum(min(self._done[rank], wanted) for rank, wanted in self._wanted.items()),
                wanted=sum(self._wanted.values()),
                idle_seconds=round(max(0.0, self._clock() - self._moved), 1),
                sources=tuple(sorted(+self._waiting))[:_NAMED],
            )
