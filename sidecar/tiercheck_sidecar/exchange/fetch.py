"""Pulls an artifact from the memory of several holders at once into a slot, verifying each chunk.

All holders of an artifact have the same digests, so any of them can bring any chunk. One that breaks off or
brings damaged chunks drops out, and the others go on; what has arrived verified is never asked for again.

A chunk is received into its place and checked there. Its place is one stream's at a time, and nobody's once
it is verified. What a second holder brings of a chunk that the first is late with waits beside its place.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Share
from tiercheck_sidecar.artifact_source import SourceCorrupt, SourceFailed, SourceGone, TriedInVain
from tiercheck_sidecar.digest import chunk_view
from tiercheck_sidecar.exchange.frames import Altered, Ask, ListedArtifact, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.session import Chunks
from tiercheck_sidecar.exchange.streams import OVERDUE, Gathering, ask_ahead, receive_header, stream_count
from tiercheck_sidecar.tags import is_well_described
from tiercheck_sidecar.vault import Seal, Vault


@dataclass(frozen=True)
class Dial:
    """A way to reach one holder."""

    worker: int
    connect: Callable[[], Wire]
    """Raises WireBroken, PeerRefused."""


@dataclass(frozen=True)
class Opening:
    """A connection on which chunks of a holder's copy can be asked for."""

    dial: Dial
    wire: Wire
    seal: Seal
    """What we will hold, if its copy is as it says."""

    def chunks(self) -> Chunks:
        """What it sends."""
        return Chunks.over(self.wire, self.seal.artifact, self.seal.digests, self.seal.tags)


@contextlib.contextmanager
def failing_as_source() -> Iterator[None]:
    """What fails of a connection is the source's. Raises SourceFailed."""
    try:
        yield
    except (PeerRefused, OSError) as error:
        raise SourceFailed(str(error)) from error


def open_copy(artifact: Artifact, dial: Dial, *, bare: bool = False, share: Share | None = None) -> Opening:
    """Returns a connection on which chunks of an artifact, or of the parity block `share`, can be asked for
    by index. `bare`: whether they may come so; they are received with `Opening.chunks` then.

    Raises SourceFailed (SourceGone, SourceCorrupt if what is said of the copy cannot be true).
    """
    with failing_as_source():
        wire = dial.connect()
        try:
            wire.send(Ask.about("read", artifact, bare=bare, share=share))
            said = wire.receive(Say)
            if said.state != "found" or said.digests is None:
                raise SourceGone(said.message or "it has no such artifact")
            if not is_well_described(said.digests, said.tags):
                raise SourceCorrupt(f"the copy of worker {dial.worker} has senseless digests")
        except BaseException:
            wire.close()
            raise
    seal = Seal(
        artifact.rank, artifact.version, said.world_size, Tier.LOCAL, said.digests, artifact.kind, share,
        said.members, said.tags,
    )  # fmt: skip
    return Opening(dial, wire, seal)


def holdings(dial: Dial, rank: int = -1, share: Share | None = None) -> tuple[ListedArtifact, ...]:
    """Returns the whole artifacts of `rank` that a peer holds, or those of the parity block `share`. Raises
    SourceFailed."""
    with failing_as_source(), contextlib.closing(dial.connect()) as wire:
        return list_held(wire, rank, share)


def list_held(wire: Wire, rank: int, share: Share | None = None) -> tuple[ListedArtifact, ...]:
    """As `holdings`, on a connection that is there already. Raises WireBroken."""
    wire.send(Ask("list", rank, share=share))
    return wire.receive(Say).listed


def have_reread(artifact: Artifact, dial: Dial, share: Share | None = None) -> Say:
    """Tells a holder that chunks of its copy do not match their digests. Returns what it finds when it reads
    it again: "ok" if all is well. Raises SourceFailed."""
    with failing_as_source(), contextlib.closing(dial.connect()) as wire:
        wire.send(Ask.about("corrupt", artifact, share=share))
        return wire.receive(Say)


class ChunkCollection:
    """Raises NoFreeSlot, OSError. After `run`, `reasons` and `bad` tell what went wrong, and `workers` who
    helped."""

    def __init__(self, vault: Vault, seal: Seal, openings: Sequence[Opening]) -> None:
        self.seal = seal
        self.reasons: list[str] = []
        self.bad: list[Quarantined] = []
        self._openings = openings
        self._changed = threading.Condition()
        self._gathering = Gathering(len(seal.digests.values), [each.dial.worker for each in openings])
        self._streams: Counter[int] = Counter()
        self._wires: set[Wire] = set()
        self._brought: set[int] = set()
        self._doubted: set[int] = set()
        """Whose bare chunks were not what was sealed."""
        self._writers: dict[int, Wire] = {}
        self._draft = vault.draft(seal)

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(sorted(self._brought))

    def run(self) -> bool:
        """Whether it is here, verified and sealed. Raises NotASlot, OSError; then no slot is taken."""
        each = max(1, stream_count(self.seal.digests) // len(self._openings))
        streams = [(one.dial, one if n == 0 else None) for one in self._openings for n in range(each)]
        self._streams.update(dial.worker for dial, _ in streams)
        try:
            with ThreadPoolExecutor(len(streams), thread_name_prefix="fetch") as pool:
                futures = [pool.submit(self._stream, dial, opening) for dial, opening in streams]
            for future in futures:
                future.result()
            self._examine()
            if not self._gathering.complete:
                return False
            self._draft.keep()
            return True
        finally:
            self._draft.release()

    def _stream(self, dial: Dial, opening: Opening | None) -> None:
        """Chunks from one holder, over a connection that is made anew as often as that brings anything; bare,
        until one of them is altered."""
        brought, reason, bare = 1, "", True
        try:
            while brought and not self._gathering.over:
                brought = 0
                try:
                    with self._connection(dial, opening, bare) as connected:
                        for _ in self._chunks(connected):
                            brought += 1
                    return
                except Altered as error:
                    brought, reason, bare = int(bare), str(error), False
                    self._doubted.add(dial.worker)
                except WireBroken as error:
                    reason = str(error)
                opening = None
        except (SourceFailed, OSError) as error:
            reason = str(error)
        finally:
            with self._changed:
                self._streams[dial.worker] -= 1
                if not self._streams[dial.worker]:
                    self._gathering.drop(dial.worker)
                self._settle()
        if not self._gathering.complete:
            self.reasons.append(f"worker {dial.worker}: {reason}")

    @contextlib.contextmanager
    def _connection(self, dial: Dial, opening: Opening | None, bare: bool) -> Iterator[Opening]:
        if opening is None:
            opening = open_copy(self.seal.artifact, dial, bare=bare)
            if opening.seal != self.seal:
                opening.wire.close()
                raise WireBroken("its copy changed while it was being read")
        with contextlib.closing(opening.wire) as wire:
            with self._changed:
                self._wires.add(wire)
                self._settle()
            try:
                yield opening
            finally:
                with self._changed:
                    self._wires.discard(wire)

    def _chunks(self, opening: Opening) -> Iterator[int]:
        """Ask, receive, verify; one item for each good chunk. Raises WireBroken, OSError."""
        worker, wire, chunks = opening.dial.worker, opening.wire, opening.chunks()
        owed: deque[int] = deque()
        try:
            for index in ask_ahead(partial(self._next, worker, owed), wire.send_index, owed):
                receive_header(wire, self.seal.digests, index)
                if self._take_in(index, worker, wire, chunks):
                    yield index
        finally:
            with self._changed:
                self._gathering.lost(owed, worker)
                self._settle()

    def _take_in(self, index: int, worker: int, wire: Wire, chunks: Chunks) -> bool:
        """Receive a chunk; whether it is good. Raises WireBroken."""
        place = chunk_view(self._draft.view, self.seal.digests, index)
        with self._changed:
            mine = index not in self._writers and not self._gathering.is_here(index)
            if mine:
                self._writers[index] = wire
        target = place if mine else memoryview(bytearray(len(place)))
        good = over = False
        try:
            good = chunks.receive(wire, index, target)
            over = True
        finally:
            with self._changed:
                if mine:
                    del self._writers[index]
                elif good:
                    self._clear(index)
                    if not self._gathering.is_here(index):
                        place[:] = target
                if good:
                    self._brought.add(worker)
                    self._gathering.arrived(index, worker)
                elif over:
                    self._gathering.damaged(index, worker)
                self._settle()
        return good

    def _clear(self, index: int) -> None:
        """Under the lock. Nobody writes to the chunk's place any more: who is late with it, on a slow line,
        is cut off."""
        if index in self._writers:
            self._writers[index].cut()
            self._changed.wait_for(lambda: index not in self._writers)

    def _next(self, worker: int, owed: deque[int]) -> int | None:
        """What to ask for. Waits for it while nothing is owed; None then: there is nothing more."""
        with self._changed:
            while True:
                index = self._gathering.take(worker, time.monotonic())
                over = self._gathering.over or not self._gathering.is_live(worker)
                if index is not None or owed or over:
                    return index
                self._changed.wait(OVERDUE / 4)

    def _settle(self) -> None:
        """Under the lock, after any change. When all is here, whoever still waits for a slow holder is told
        to stop."""
        if self._gathering.complete:
            for wire in self._wires:
                wire.cut()
        self._changed.notify_all()

    def _examine(self) -> None:
        """A holder whose chunks came damaged reads its copy again: is the copy bad, or the line? Of one whose
        bare chunks were altered nothing bad is believed but its own word.
        """
        for opening in self._openings:
            worker = opening.dial.worker
            damaged = self._gathering.brought_damaged(worker)
            if not damaged and worker not in self._doubted:
                continue
            word = ""
            with contextlib.suppress(SourceFailed):
                word = have_reread(self.seal.artifact, opening.dial).state
            if word == "ok" or not (word or damaged):
                self.reasons.append(f"worker {worker}: chunks came damaged, although its copy is good")
            else:
                reason = f"the copy at worker {worker} is bad: chunks do not match their digests"
                self.bad.append(_bad_copy(self.seal.artifact, worker, reason))
                self.reasons.append(reason)


_GRACE = 0.3
"""Seconds that the first source to answer waits for the others."""


@dataclass(frozen=True)
class Fetched:
    seal: Seal
    workers: tuple[int, ...]
    """Who brought chunks of it."""
    bad: tuple[Quarantined, ...] = ()
    """Whose copies proved bad on the way."""


def fetch(vault: Vault, artifact: Artifact, sources: Sequence[Dial]) -> Fetched:
    """Copy and seal `artifact`. Raises TriedInVain, NoFreeSlot, NotASlot, OSError; then no slot is taken."""
    reasons: list[str] = []
    bad: list[Quarantined] = []
    with contextlib.ExitStack() as stack:
        groups: dict[Seal, list[Opening]] = {}
        for opening in _open_all(artifact, sources, reasons, bad):
            stack.callback(opening.wire.close)
            groups.setdefault(opening.seal, []).append(opening)
        for seal in sorted(
            groups, key=lambda each: -len(groups[each])
        ):  # most holders first; they should all agree
            collection = ChunkCollection(vault, seal, groups[seal])
            done = collection.run()
            reasons.extend(collection.reasons)
            bad.extend(collection.bad)
            if done:
                return Fetched(seal, collection.workers, tuple(bad))
    raise TriedInVain(reasons, bad)


def _open_all(
    artifact: Artifact, sources: Sequence[Dial], reasons: list[str], bad: list[Quarantined]
) -> list[Opening]:
    """Those that have it; of the others, `reasons` and `bad` copies. One that does not answer is not waited
    for once another has."""
    pool = ThreadPoolExecutor(max(1, len(sources)), thread_name_prefix="fetch")
    futures = {pool.submit(open_copy, artifact, dial, bare=True): dial.worker for dial in sources}
    pool.shutdown(wait=False)
    found: list[Opening] = []
    waiting: set[Future[Opening]] = set(futures)
    deadline: float | None = None
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, waiting = wait(waiting, left, FIRST_COMPLETED)
        if not done:
            break
        for future in done:
            try:
                found.append(future.result())
            except SourceCorrupt as error:
                bad.append(_bad_copy(artifact, futures[future], str(error)))
                reasons.append(str(error))
            except SourceFailed as error:
                reasons.append(f"worker {futures[future]}: {error}")
        if found and deadline is None:
            deadline = time.monotonic() + _GRACE
    for future in waiting:
        reasons.append(f"worker {futures[future]}: it did not answer in time")
        future.add_done_callback(_hang_up)
    return found


def _bad_copy(artifact: Artifact, worker: int, reason: str) -> Quarantined:
    return Quarantined(artifact.rank, artifact.version, worker, reason, artifact.kind)


def _hang_up(future: Future[Opening]) -> None:
    if future.exception() is None:
        future.result().wire.close()
