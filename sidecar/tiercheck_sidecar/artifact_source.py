"""Reads artifacts from places that may fail or never answer, such as a mount of a dead server.

A restore, a rank on another mesh and a rehearsal read by the same methods, whatever the place: own memory, a
peer, parity or the remote tier. All of them fail by the same errors.

Each call to a place has a thread of its own, and is abandoned when nothing comes. No thread can be ended from
outside, and one that waits for a dead file server not even by SIGKILL. An abandoned call gets an exception at
its next byte, and releases what it holds. Until then its place is called again only now and then, ever more
seldom: one that hangs costs a thread for each call that was under way, and few more.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tiercheck.plain_files import open_plain
from tiercheck.protocol.directive import RESTORE_STALL
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Digests, Version
from tiercheck.supervised import begin
from tiercheck_sidecar.digest import chunk_view, length_of
from tiercheck_sidecar.vault import Seal, Vault


class SourceFailed(Exception):
    """An artifact that a source could not give; the message is a sentence. `bad`: copies that proved bad."""

    def __init__(self, message: str, bad: Sequence[Quarantined] = ()) -> None:
        super().__init__(message)
        self.bad = tuple(bad)


class SourceGone(SourceFailed):
    """An artifact that the source does not have, or not any more."""


class SourceCorrupt(SourceFailed):
    """A source that gave bytes that do not match their digests: it must not be asked again."""


class FetchFailed(SourceFailed):
    """An artifact that none of several sources could give; each of `reasons` names one."""

    def __init__(self, reasons: Sequence[str], bad: Sequence[Quarantined] = ()) -> None:
        super().__init__("; ".join(reasons) or "no source is known", bad)
        self.reasons = tuple(reasons)


class ArtifactSink:
    """Stores an artifact's chunks at their places in `view`, all bytes of the open `file`."""

    def __init__(self, view: memoryview, file: int) -> None:
        self.view, self._file = view, file

    def room(self, digests: Digests, index: int) -> memoryview:
        """Returns the memory that receives chunk `index`."""
        return chunk_view(self.view, digests, index)

    def put(self, digests: Digests, index: int, chunk: memoryview) -> None:
        """Writes a verified chunk from other memory. Raises OSError.
        That costs less than touching a fresh mapping page by page."""
        offset = index * digests.chunk
        while chunk:
            written = os.pwrite(self._file, chunk, offset)
            offset, chunk = offset + written, chunk[written:]


class ChunkBuffer(ArtifactSink):
    """Stores one chunk at a time, each in the place of the one before."""

    def __init__(self) -> None:
        super().__init__(memoryview(b""), -1)

    def room(self, digests: Digests, index: int) -> memoryview:
        length = length_of(digests, index)
        if len(self.view) < length:
            self.view = memoryview(bytearray(length))
        return self.view[:length]

    def put(self, digests: Digests, index: int, chunk: memoryview) -> None:
        self.room(digests, index)[:] = chunk


@dataclass(frozen=True)
class OpenArtifact:
    """An artifact that can be read, chunk by chunk. Used by one thread."""

    seal: Seal
    """The seal of an own slot that is filled from it."""
    read: Callable[[Sequence[int], ArtifactSink], None]
    """Reads these chunks and verifies each. Raises SourceFailed (SourceGone, SourceCorrupt), OSError."""
    bad: Sequence[Quarantined] = ()
    """Parts of it that have proved bad so far, and were replaced by others."""


@dataclass(frozen=True)
class FilledSlot:
    """An artifact that was brought into an own slot."""

    seal: Seal
    bad: tuple[Quarantined, ...] = ()
    workers: tuple[int, ...] = ()
    """The workers that delivered chunks of it, if they gave copies."""


class ArtifactSource(ABC):
    """A place that artifacts are read from.
    Every method raises SourceFailed (SourceGone, SourceCorrupt), OSError."""

    @abstractmethod
    def list(self, rank: int, version: Version, call: BoundedCall) -> Mapping[Artifact, int]:
        """Returns the artifacts of `rank` that a restore of `version` could read there, with bytes."""

    @abstractmethod
    def open(self, artifact: Artifact, call: BoundedCall) -> AbstractContextManager[OpenArtifact]:
        """Opens the artifact, which the place keeps as long as it is open."""

    def fill(self, vault: Vault, artifact: Artifact, call: BoundedCall) -> FilledSlot:
        """Fills an own slot with all of an artifact and seals it.
        Raises also NoFreeSlot, NotASlot; after an error no slot is taken."""
        with self.open(artifact, call) as found:
            draft = vault.draft(found.seal)
            try:
                with open(open_plain(draft.path, write=True), "r+b") as file:
                    sink = ArtifactSink(draft.view, file.fileno())
                    found.read(range(len(found.seal.digests.values)), sink)
                draft.keep()
            finally:
                draft.release()
            return FilledSlot(found.seal, tuple(found.bad))

    def close(self) -> None:  # noqa: B027  (most hold nothing while nothing is open)
        """Releases what is held between two artifacts."""


class Connection(Protocol):
    """A connection that a call may own."""

    on_received: Callable[[int], None]

    def cut(self) -> None: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)
T = TypeVar("T")

_LOOK_EVERY = 1.0
_AGAIN = 300.0
"""Seconds, for each abandoned call, until its place is called once more.
What hangs may be one file of many."""
_LONGEST_LOOK = 5.0
"""Seconds. One wait counts for no more: after a longer one this process had been suspended."""


class Stalled(SourceFailed):
    """A place from which nothing came for too long."""


class CallAbandoned(BaseException):
    """The end of an abandoned call.
    It is no Exception, so that no code on the way takes it for a failure of the place."""


class BoundedCall:
    """A call to a place, as its own thread uses it. Thread-safe."""

    def __init__(self, on_received: Callable[[int], None] = lambda count: None) -> None:
        """The callback receives the number of bytes that come, as long as a caller waits for them."""
        self._received = on_received
        self._lock = threading.Lock()
        self._wires: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.left = self.over = False

    def arrived(self, count: int) -> None:
        """Counts received bytes; 0 only checks that the call goes on. Raises CallAbandoned."""
        if self.left:
            raise CallAbandoned
        if count:
            self._received(count)

    def own(self, wire: C) -> C:
        """Registers a connection that serves this call alone, and ends with it. Raises CallAbandoned."""
        with self._lock:
            self._wires.add(wire)
            wire.on_received = self.arrived
        if self.left:
            wire.close()
            raise CallAbandoned
        return wire

    def leave(self) -> None:
        self.left = True
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.cut()


class BoundedCalls:
    """Calls places, and abandons calls that hang. Thread-safe."""

    def __init__(
        self,
        seconds: Callable[[], float] = lambda: RESTORE_STALL,
        changed: Callable[[Mapping[str, int]], None] = lambda left: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Abandons a call after `seconds` without a byte from its place.
        `changed` receives the number of abandoned calls, by place."""
        self._seconds, self._changed, self._clock = seconds, changed, clock
        self._lock, self._publishing = threading.Lock(), threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._tried: dict[str, float] = {}
        """The time at which each place with abandoned calls was last called."""

    def make(
        self,
        place: str,
        body: Callable[[BoundedCall], T],
        on_received: Callable[[int], None] = lambda count: None,
    ) -> T:
        """Returns what `body` returns.
        Raises what it raises, Stalled, and RuntimeError if the system gives no thread."""
        with self._lock:
            if self._left[place]:
                if self._clock() - self._tried[place] < _AGAIN * self._left[place]:
                    raise Stalled("an earlier call to it has not come back")
                self._tried[place] = self._clock()
        future = Future[T]()

        def count(more: int) -> None:
            with self._lock:
                self._bytes[place] += more
            on_received(more)

        call = BoundedCall(count)

        def run() -> None:
            try:
                future.set_result(body(call))
            except BaseException as error:  # the waiting caller gets it
                future.set_exception(error)
            self._end(place, call)

        begin(f"call-{place}", run)
        quiet, seconds, known = 0.0, self._seconds(), self._bytes[place]
        while not future.done():
            before = self._clock()
            wait([future], min(_LOOK_EVERY, max(0.0, seconds - quiet)))
            # All bytes from the place count, because calls wait for each other there.
            came, looked = self._bytes[place], min(_LONGEST_LOOK, self._clock() - before)
            quiet, known = 0.0 if came != known else quiet + looked, came
            if quiet >= seconds and self._leave(place, call):
                raise Stalled(f"nothing came from it for {quiet:.0f} s")
        return future.result()

    def _leave(self, place: str, call: BoundedCall) -> bool:
        """Abandons a call; returns False if it has ended."""
        with self._lock:
            if call.over:
                return False
            call.leave()
            self._left[place] += 1
            self._tried[place] = self._clock()
        self._publish()
        return True

    def _end(self, place: str, call: BoundedCall) -> None:
        with self._lock:
            call.over = True
            if call.left:
                self._left[place] -= 1
        if call.left:
            self._publish()

    def _publish(self) -> None:
        with self._publishing:
            with self._lock:
                left = dict(+self._left)
            self._changed(left)
