"""Deals the chunks of one artifact over several connections.

Whoever is free takes the next, so a slow stream holds up one chunk and not a quarter of the artifact.
Connections to one peer are kept open between artifacts, so that a small delta pays for no handshake.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from tiercheck.protocol.manifest import Digests
from tiercheck_sidecar.exchange.frames import Wire

STREAMS = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
"""Connections for one large artifact: a stream keeps about one core busy at each end, and training needs some
too."""
_CHUNKS_PER_STREAM = 2


class TooDamaged(Exception):
    """A chunk arrived damaged again and again."""


class Deal:
    """Thread-safe queue of the chunks that are not there yet, each given out at most `tries` times."""

    def __init__(self, chunks: int, verified: Collection[int] = (), tries: int = 3) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(index for index in range(chunks) if index not in verified)
        self._given: Counter[int] = Counter()
        self._tries = tries

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> int | None:
        """The next chunk; None if there is none right now."""
        with self._lock:
            if not self._waiting:
                return None
            index = self._waiting.popleft()
            self._given[index] += 1
            return index

    def is_again(self, index: int) -> bool:
        """Whether it arrived damaged before. Then it does not travel bare: what it meets on its way is told
        from what it was."""
        with self._lock:
            return self._given[index] > 1

    def ask_again(self, index: int) -> None:
        """It arrived damaged. Raises TooDamaged."""
        with self._lock:
            if self._given[index] >= self._tries:
                raise TooDamaged(f"chunk {index} arrived damaged {self._tries} times")
            self._waiting.append(index)


def stream_count(digests: Digests, missing: int | None = None, most: int = STREAMS) -> int:
    """One connection for small artifacts, `most` for large ones. `missing`: chunks that are still to come."""
    chunks = len(digests.values) if missing is None else missing
    return max(1, min(most, chunks // _CHUNKS_PER_STREAM))


def run_all(bodies: list[Callable[[], None]]) -> None:
    """Run all, the last in this thread; raises the first error once all have ended."""
    *others, mine = bodies
    if not others:
        mine()
        return
    with ThreadPoolExecutor(len(others), thread_name_prefix="stream") as pool:
        futures = [pool.submit(body) for body in others]
        mine()
        for future in futures:
            future.result()


class Line:
    """Used by one thread at a time; each of its wires may then be used by another one."""

    def __init__(self, connect: Callable[[], Wire]) -> None:
        self._connect = connect
        self._wires: list[Wire] = []
        self._spent = 0

    @property
    def is_open(self) -> bool:
        """Whether it was connected before: then the peer may have hung up since without our knowing."""
        return bool(self._wires)

    @property
    def sent(self) -> int:
        """Bytes of chunks that were sent on it, over all its connections."""
        return self._spent + sum(wire.sent for wire in self._wires)

    def wires(self, count: int) -> list[Wire]:
        """The first `count` connections, made as needed. Raises WireBroken, PeerRefused."""
        while len(self._wires) < count:
            self._wires.append(self._connect())
        return self._wires[:count]

    def drop(self) -> None:
        """Hang up; the next use connects again."""
        self._spent = self.sent
        for wire in self._wires:
            wire.close()
        self._wires.clear()

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
