"""Distributes the chunks of an artifact over several connections and sources.

Each idle stream takes the next chunk, so a slow stream delays one chunk and not a quarter of the artifact,
and a fast source delivers more. Connections to one peer stay open between artifacts, so that a small delta
needs no handshake.

Each stream keeps about one core busy at each end, and training needs some too. So a stream is kept only if it
raises the throughput by a tenth. The result holds for a while; then one more, or one fewer, is tried again,
because networks and other processes on the node change.

A chunk that arrived damaged is requested from another source, if there is one. A chunk that is pending for
long may be requested from a second source as well, so that a stalled source delays nothing. A source that
sends damaged chunks repeatedly is dropped.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from tiercheck.protocol.version import Digests
from tiercheck_sidecar.digest import CHUNK, length_of
from tiercheck_sidecar.exchange.frames import Wire, WireBroken

DAMAGED_MOST = 2
"""The number of damaged chunks after which a source is dropped."""
OVERDUE = 1.0
"""Seconds after which a pending chunk is requested from another source too."""


class ChunkScheduler:
    """Assigns chunks to sources (workers). Not thread-safe. Times are seconds of any monotonic clock."""

    def __init__(self, chunks: int, sources: Collection[int]) -> None:
        self._waiting = deque(range(chunks))
        self._asked: dict[int, dict[int, float]] = {}
        self._damaged: dict[int, set[int]] = {}
        self._faults: Counter[int] = Counter()
        self._live = set(sources)
        self._missing = set(range(chunks))

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def over(self) -> bool:
        """Returns whether all chunks arrived, or no source is left for the rest."""
        return not self._missing or not self._live

    def is_here(self, index: int) -> bool:
        return index not in self._missing

    def is_live(self, source: int) -> bool:
        return source in self._live

    def brought_damaged(self, source: int) -> bool:
        """Returns whether any of its chunks was damaged: its copy or the connection may be bad."""
        return self._faults[source] > 0

    def take(self, source: int, now: float) -> int | None:
        """Returns the chunk to request from `source`; None if there is none for it now."""
        if source not in self._live:
            return None
        index = self._first_waiting(source)
        if index is None:
            index = self._overdue(source, now)
        if index is not None:
            self._asked.setdefault(index, {})[source] = now
        return index

    def arrived(self, index: int, source: int) -> bool:
        """Records a chunk that arrived and was verified. Returns False if it was here already."""
        self._answered(index, source)
        if index not in self._missing:
            return False
        self._missing.discard(index)
        if index in self._waiting:
            self._waiting.remove(index)
        return True

    def damaged(self, index: int, source: int) -> None:
        """Records a chunk that arrived and does not match its digest."""
        self._damaged.setdefault(index, set()).add(source)
        self._faults[source] += 1
        self.lost((index,), source)
        if self._faults[source] >= DAMAGED_MOST:
            self.drop(source)

    def lost(self, indices: Iterable[int], source: int) -> None:
        """Queues requested chunks again that will not arrive."""
        for index in indices:
            self._answered(index, source)
            if index in self._missing and index not in self._asked and index not in self._waiting:
                self._waiting.append(index)

    def drop(self, source: int) -> None:
        """Requests nothing more from `source`; its pending chunks go to others."""
        self._live.discard(source)
        self.lost([index for index, asked in self._asked.items() if source in asked], source)

    def _answered(self, index: int, source: int) -> None:
        asked = self._asked.get(index)
        if asked is not None:
            asked.pop(source, None)
            if not asked:
                del self._asked[index]

    def _first_waiting(self, source: int) -> int | None:
        for place, index in enumerate(self._waiting):
            spoiled = self._damaged.get(index, set())
            if source not in spoiled or self._live <= spoiled:
                del self._waiting[place]
                return index
        return None

    def _overdue(self, source: int, now: float) -> int | None:
        late = [
            (since, index)
            for index, asked in self._asked.items()
            if len(asked) == 1 and source not in asked and source not in self._damaged.get(index, set())
            for since in asked.values()
            if now - since >= OVERDUE and index in self._missing
        ]
        return min(late)[1] if late else None


STREAMS = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
"""The most connections per artifact: restores use all (nothing trains), copies what is found by trial."""
_CHUNKS_PER_STREAM = 2
_WINDOW = 0.25
"""Seconds of sending that make a measurement, over one artifact or several small ones."""


class TooDamaged(Exception):
    """A chunk arrived damaged again and again."""


class ChunkQueue:
    """A thread-safe queue of missing chunks, each given out at most `tries` times."""

    def __init__(self, chunks: int, verified: Collection[int] = (), tries: int = 3) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(index for index in range(chunks) if index not in verified)
        self._given: Counter[int] = Counter()
        self._tries = tries

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> int | None:
        """Returns the next chunk; None if there is none at the moment."""
        with self._lock:
            if not self._waiting:
                return None
            index = self._waiting.popleft()
            self._given[index] += 1
            return index

    def is_again(self, index: int) -> bool:
        """Returns whether the chunk arrived damaged before.

        It is then not sent bare: its own tag distinguishes damage on the way from damage at the source."""
        with self._lock:
            return self._given[index] > 1

    def ask_again(self, index: int) -> None:
        """Queues a damaged chunk again. Raises TooDamaged if that was its last try."""
        with self._lock:
            if self._given[index] >= self._tries:
                raise TooDamaged(f"chunk {index} arrived damaged {self._tries} times")
            self._waiting.append(index)


def stream_count(digests: Digests, missing: int | None = None, most: int = STREAMS) -> int:
    """Returns 1 for small artifacts, up to `most` for large ones. `missing`: chunks still to be sent."""
    chunks = len(digests.values) if missing is None else missing
    return max(1, min(most, chunks // _CHUNKS_PER_STREAM))


_AHEAD = 2
"""The number of chunks that are pending on a connection, so that it is never idle."""


def ask_ahead(take: Callable[[], int | None], ask: Callable[[int], None], asked: deque[int]) -> Iterator[int]:
    """Requests chunks, a few ahead, and yields each when it is to be received.

    `asked`: those not received yet. Ends when `take` returns None while none is pending."""
    while True:
        while len(asked) < _AHEAD and (index := take()) is not None:
            asked.append(index)
            ask(index)
        if not asked:
            return
        yield asked[0]
        asked.popleft()


def receive_header(wire: Wire, digests: Digests, index: int) -> None:
    """Receives the header of chunk `index`. Raises WireBroken, also if it is another chunk's."""
    if wire.receive_chunk_header() != (index, length_of(digests, index)):
        raise WireBroken("it sent a chunk that was not asked for")


FEW = 2
"""The number of streams to begin with."""
GAIN = 1.1
"""The factor by which an additional stream must raise the throughput."""
REST = 40
"""The number of measurements until another number of streams is tried."""


@dataclass(frozen=True)
class StreamCountTuner:
    """The intended number of streams, found by trying the throughput with one more or one fewer."""

    count: int = FEW
    trial: int = 0
    """1 or -1 while one more or one fewer is tried; 0: neither."""
    before: float = 0.0
    """The throughput that the trial is compared with."""
    rest: int = 0
    """The number of measurements before the next trial."""
    next: int = 1

    def measured(self, throughput: float, most: int) -> StreamCountTuner:
        """Returns the state after `throughput` was measured with `count` streams; 1 to `most` are tried."""
        better, no_worse = throughput >= self.before * GAIN, throughput * GAIN > self.before
        if (self.trial == 1 and better) or (self.trial == -1 and no_worse):
            return self._try(self.trial, throughput, most)
        if self.trial:
            return self._settle(self.count - self.trial, self.trial)
        if self.rest:
            return StreamCountTuner(self.count, rest=self.rest - 1, next=self.next)
        return self._try(self.next, throughput, most)

    def _try(self, trial: int, throughput: float, most: int) -> StreamCountTuner:
        count = self.count + trial
        if not 1 <= count <= most:
            return self._settle(min(self.count, most), trial)
        return StreamCountTuner(count, trial, throughput, next=trial)

    def _settle(self, count: int, tried: int) -> StreamCountTuner:
        return StreamCountTuner(count, rest=REST, next=-tried)


class ThroughputMeter:
    """Adds up the bytes sent with one number of streams, until they make a measurement."""

    def __init__(self) -> None:
        self.tuner = StreamCountTuner()
        self._bytes, self._seconds = 0, 0.0

    def sent(self, size: int, seconds: float, most: int) -> None:
        """Adds bytes that `tuner.count` streams sent together."""
        self._bytes, self._seconds = self._bytes + size, self._seconds + seconds
        if self._seconds >= _WINDOW:
            self.tuner = self.tuner.measured(self._bytes / self._seconds, most)
            self._bytes, self._seconds = 0, 0.0


class ConnectionPool:
    """The connections to one peer. Used by one thread at a time; each wire may have its own thread."""

    def __init__(self, connect: Callable[[], Wire]) -> None:
        self._connect = connect
        self._wires: list[Wire] = []
        self._spent = 0
        self.meter = ThroughputMeter()

    @property
    def is_open(self) -> bool:
        """Returns whether it was connected before; the peer may have closed the connection since."""
        return bool(self._wires)

    @property
    def sent(self) -> int:
        """Returns the bytes of chunks sent so far, over all its connections."""
        return self._spent + sum(wire.sent for wire in self._wires)

    def wires(self, count: int) -> list[Wire]:
        """Returns the first `count` connections, made as needed. Raises WireBroken, PeerRefused."""
        while len(self._wires) < count:
            self._wires.append(self._connect())
        return self._wires[:count]

    def drop(self) -> None:
        """Closes all connections; the next use connects again."""
        self._spent = self.sent
        for wire in self._wires:
            wire.close()
        self._wires.clear()

    def __enter__(self) -> ConnectionPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()


Take = Callable[[], int | None]
"""A function that returns the next chunk for a stream; None: the stream has no more to send."""


class StreamPool:
    """Sends the chunks of `deal` over wires of `line`, as many as its gauge decides, at most `most`."""

    def __init__(
        self,
        line: ConnectionPool,
        deal: ChunkQueue,
        most: int,
        body: Callable[[Wire, Take], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`body` sends chunks on a wire until it gets no more."""
        self._line, self._deal, self._most = line, deal, most
        self._body, self._clock = body, clock
        self._lock, self._connecting = threading.Lock(), threading.Lock()
        self._begun: set[int] = set()
        """The places of streams that have a thread."""
        self._sending: set[int] = set()
        self._seen = (0, 0.0)
        """Bytes and time at the last moment when the intended number of streams was sending."""
        self._futures: list[Future[None]] = []

    def run(self) -> None:
        """Sends all chunks. Raises the first stream's error, or else another's, once all have ended."""
        with ThreadPoolExecutor(self._most, thread_name_prefix="stream") as self._pool:
            self._begun.add(0)
            self._stream(0)
            for future in self._futures:  # it grows only while one of them runs
                future.result()

    def _stream(self, place: int) -> None:
        try:
            with self._connecting:
                wire = self._line.wires(place + 1)[place]
            self._body(wire, partial(self._take, place))
        finally:
            with self._lock:
                self._begun.discard(place)
                self._sending.discard(place)
                self._seen = (0, 0.0)

    def _take(self, place: int) -> int | None:
        with self._lock:
            if place not in self._sending:
                self._sending.add(place)
                self._seen = (0, 0.0)
            self._measure()
            wanted = min(self._line.meter.tuner.count, self._most)
            if place >= wanted:
                return None
            for other in range(min(wanted, len(self._deal))):
                if other not in self._begun:
                    self._begun.add(other)
                    self._futures.append(self._pool.submit(self._stream, other))
        return self._deal.take()

    def _measure(self) -> None:
        """Measures throughput, but not while streams start or end. Called under the lock."""
        meter, (sent, then) = self._line.meter, self._seen
        if len(self._sending) != meter.tuner.count:
            self._seen = (0, 0.0)
            return
        self._seen = (self._line.sent, self._clock())
        if then:
            meter.sent(self._seen[0] - sent, self._seen[1] - then, STREAMS)


class Scratch:
    """Holds up to `count` chunk buffers, made on demand. While none is free, TCP slows the sender."""

    def __init__(self, count: int = 8) -> None:
        self._room = threading.BoundedSemaphore(count)
        self._free: list[memoryview] = []

    @contextlib.contextmanager
    def buffer(self) -> Iterator[memoryview]:
        with self._room:
            try:
                view = self._free.pop()
            except IndexError:
                view = memoryview(bytearray(CHUNK))
            try:
                yield view
            finally:
                self._free.append(view)
