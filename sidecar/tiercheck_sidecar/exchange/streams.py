"""Deals the chunks of one artifact over several connections: whoever is free takes the next, so a slow stream holds up
one chunk and not a quarter of the artifact.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tiercheck.protocol.manifest import Digests

STREAMS = 4
_CHUNKS_PER_STREAM = 2


class TooDamaged(Exception):
    """A chunk arrived damaged again and again."""


class Deal:
    """Thread-safe queue of chunk indices, each given out at most `tries` times."""

    def __init__(self, chunks: int, tries: int = 3) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(range(chunks))
        self._given: Counter[int] = Counter()
        self._tries = tries

    def take(self) -> int | None:
        """The next chunk; None if there is none right now."""
        with self._lock:
            if not self._waiting:
                return None
            index = self._waiting.popleft()
            self._given[index] += 1
            return index

    def again(self, index: int) -> None:
        """It arrived damaged. Raises TooDamaged."""
        with self._lock:
            if self._given[index] >= self._tries:
                raise TooDamaged(f"chunk {index} arrived damaged {self._tries} times")
            self._waiting.append(index)


def stream_count(digests: Digests) -> int:
    """One connection for small artifacts, `STREAMS` for large ones."""
    return max(1, min(STREAMS, len(digests.values) // _CHUNKS_PER_STREAM))


def run_all(bodies: list[Callable[[], None]]) -> None:
    """Run all, the last in this thread; raises the first error once all have ended."""
    *others, mine = bodies
    with ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="stream") as pool:
        futures = [pool.submit(body) for body in others]
        mine()
        for future in futures:
            future.result()
