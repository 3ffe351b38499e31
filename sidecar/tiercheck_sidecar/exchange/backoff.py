"""When to try again what went wrong: longer each time, so that a holder without room is not asked in a circle."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST, LONGEST = 0.1, 5.0
"""Seconds until the next try."""


class Backoff(Generic[Key]):
    """Times are seconds of any monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._failures: dict[Key, int] = {}
        self._after: dict[Key, float] = {}

    def ready(self, key: Key, now: float) -> bool:
        return self._after.get(key, now) <= now

    def until(self, key: Key) -> float:
        """When it is ready."""
        return self._after.get(key, 0.0)

    def failed(self, key: Key, now: float) -> int:
        """How often in a row."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._after[key] = now + min(LONGEST, FIRST * 2 ** min(failures - 1, 10))
        return failures

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._after.pop(key, None)
