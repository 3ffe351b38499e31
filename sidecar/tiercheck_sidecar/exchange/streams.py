"""Deals the chunks of an artifact over several connections, and decides which source brings which.

Whoever is free takes the next, so a slow stream holds up one chunk and not a quarter of the artifact, and a
fast source brings more. Connections to one peer are kept open between artifacts, so that a small delta pays
for no handshake.

Each stream keeps about one core busy at each end, and training needs some too. So a stream stays only if it
brings a tenth more. What was found holds for a while; then one more, or one fewer, is tried again, because
networks and neighbours change.

A chunk that came damaged is asked of another source, if there is one. What a source owes for long may be
asked of a second one as well, so that one that stalls holds up nobody. A source that brings damaged chunks
repeatedly is dropped.
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
from enum import Enum
from functools import partial
from types import TracebackType

from tiercheck.protocol.version import Digests
from tiercheck_sidecar.digest import CHUNK, length_of
from tiercheck_sidecar.exchange.frames import Wire, WireBroken

DAMAGED_MOST = 2
"""Damaged chunks after which a source is dropped."""
OVERDUE = 1.0
"""Seconds after which a chunk that was asked for is asked of another source too."""


class Gathering:
    """Not thread-safe. A source is a worker. Times are seconds of any monotonic clock."""

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
        """Complete, or nobody is left who could bring the rest."""
        return not self._missing or not self._live

    def is_here(self, index: int) -> bool:
        return index not in self._missing

    def is_live(self, source: int) -> bool:
        return source in self._live

    def brought_damaged(self, source: int) -> bool:
        """Whether anything from it did not match: its copy may be bad, or the line."""
        return self._faults[source] > 0

    def take(self, source: int, now: float) -> int | None:
        """The chunk that `source` should be asked for; None if there is none for it now."""
        if source not in self._live:
            return None
        index = self._first_waiting(source)
        if index is None:
            index = self._overdue(source, now)
        if index is not None:
            self._asked.setdefault(index, {})[source] = now
        return index

    def arrived(self, index: int, source: int) -> bool:
        """It came, and is verified. False if it was here already."""
        self._answered(index, source)
        if index not in self._missing:
            return False
        self._missing.discard(index)
        if index in self._waiting:
            self._waiting.remove(index)
        return True

    def damaged(self, index: int, source: int) -> None:
        """It came, and does not match its digest."""
        self._damaged.setdefault(index, set()).add(source)
        self._faults[source] += 1
        self.lost((index,), source)
        if self._faults[source] >= DAMAGED_MOST:
            self.drop(source)

    def lost(self, indices: Iterable[int], source: int) -> None:
        """They were asked for, and will not come."""
        for index in indices:
            self._answered(index, source)
            if index in self._missing and index not in self._asked and index not in self._waiting:
                self._waiting.append(index)

    def drop(self, source: int) -> None:
        """Nothing more is asked of it; what it owes is asked of others."""
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
"""Most connections for one artifact. A restore uses them all, as nothing trains meanwhile; a copy what
`Breadth` says."""
_CHUNKS_PER_STREAM = 2
_WINDOW = 0.25
"""Seconds of sending that make a measurement, of one artifact or of several small ones."""


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


_AHEAD = 2
"""Chunks asked for before the previous one has arrived, so that no line is ever idle."""


def ask_ahead(take: Callable[[], int | None], ask: Callable[[int], None], asked: deque[int]) -> Iterator[int]:
    """Asks for chunks, a few ahead, and yields each when it is to be received. `asked`: those that have not
    been. It ends when `take` gives none while nothing is asked for."""
    while True:
        while len(asked) < _AHEAD and (index := take()) is not None:
            asked.append(index)
            ask(index)
        if not asked:
            return
        yield asked[0]
        asked.popleft()


def receive_header(wire: Wire, digests: Digests, index: int) -> None:
    """Receives the header of chunk `index`, which was asked for. Raises WireBroken, also if it is another
    one's."""
    if wire.receive_chunk_header() != (index, length_of(digests, index)):
        raise WireBroken("it sent a chunk that was not asked for")


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


FEW = 2
"""Streams to begin with."""
GAIN = 1.1
"""What a stream must bring, as a factor."""
REST = 40
"""Measurements until another number is tried."""


class Trial(Enum):
    """What the number of streams was changed by for the next measurement."""

    NONE = 0
    ONE_MORE = 1
    ONE_FEWER = -1


@dataclass(frozen=True)
class Breadth:
    """How many streams there should be now, and why: by what one more or one fewer did to the throughput."""

    count: int = FEW
    trial: Trial = Trial.NONE
    before: float = 0.0
    """Throughput that the trial is compared with."""
    rest: int = 0
    """Measurements to come before the next trial."""
    next: Trial = Trial.ONE_MORE
    """That trial."""

    def measured(self, throughput: float, most: int) -> Breadth:
        """After `throughput` was measured with `count` streams. There are never more than `most`, nor fewer
        than one."""
        worth = {
            Trial.NONE: False,
            Trial.ONE_MORE: throughput >= self.before * GAIN,
            Trial.ONE_FEWER: throughput * GAIN > self.before,
        }
        if worth[self.trial]:
            return self._try(self.trial, throughput, most)
        if self.trial is not Trial.NONE:
            return self._settle(self.count - self.trial.value)
        if self.rest:
            return Breadth(self.count, rest=self.rest - 1, next=self.next)
        return self._try(self.next, throughput, most)

    def _try(self, trial: Trial, throughput: float, most: int) -> Breadth:
        count = self.count + trial.value
        if not 1 <= count <= most:
            return self._settle(min(self.count, most), trial)
        return Breadth(count, trial, throughput, next=trial)

    def _settle(self, count: int, tried: Trial | None = None) -> Breadth:
        other = Trial.ONE_FEWER if (tried or self.trial) is Trial.ONE_MORE else Trial.ONE_MORE
        return Breadth(count, rest=REST, next=other)


class Gauge:
    """Adds up what was sent with one number of streams, until that makes a measurement."""

    def __init__(self) -> None:
        self.breadth = Breadth()
        self._bytes, self._seconds = 0, 0.0

    def sent(self, size: int, seconds: float, most: int) -> None:
        """By `breadth.count` streams at once."""
        self._bytes, self._seconds = self._bytes + size, self._seconds + seconds
        if self._seconds >= _WINDOW:
            self.breadth = self.breadth.measured(self._bytes / self._seconds, most)
            self._bytes, self._seconds = 0, 0.0


class Line:
    """Used by one thread at a time; each of its wires may then be used by another one."""

    def __init__(self, connect: Callable[[], Wire]) -> None:
        self._connect = connect
        self._wires: list[Wire] = []
        self._spent = 0
        self.gauge = Gauge()

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


Take = Callable[[], int | None]
"""The next chunk for a stream; None: it has no more to send."""


class StreamCrew:
    """Carries what `deal` holds over the first wires of `line`: as many at once as its gauge says, and at
    most `most`."""

    def __init__(
        self,
        line: Line,
        deal: Deal,
        most: int,
        body: Callable[[Wire, Take], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`body` sends chunks on a wire, as long as it is given some."""
        self._line, self._deal, self._most = line, deal, most
        self._body, self._clock = body, clock
        self._lock, self._connecting = threading.Lock(), threading.Lock()
        self._begun: set[int] = set()
        """Places of streams that have a thread."""
        self._sending: set[int] = set()
        self._seen = (0, 0.0)
        """Bytes and time, when as many were sending as should be."""
        self._futures: list[Future[None]] = []

    def run(self) -> None:
        """Until all is sent. Raises the first stream's error, or else another's, once all have ended."""
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
            wanted = min(self._line.gauge.breadth.count, self._most)
            if place >= wanted:
                return None
            for other in range(min(wanted, len(self._deal))):
                if other not in self._begun:
                    self._begun.add(other)
                    self._futures.append(self._pool.submit(self._stream, other))
        return self._deal.take()

    def _measure(self) -> None:
        """Under the lock. What was sent while streams came or went says nothing of any number of them."""
        gauge, (sent, then) = self._line.gauge, self._seen
        if len(self._sending) != gauge.breadth.count:
            self._seen = (0, 0.0)
            return
        self._seen = (self._line.sent, self._clock())
        if then:
            gauge.sent(self._seen[0] - sent, self._seen[1] - then, STREAMS)


class Scratch:
    """At most `count` buffers of one chunk, made when first needed. Who finds none waits, and TCP holds back
    the sender."""

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
