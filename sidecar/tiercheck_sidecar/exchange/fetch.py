"""Pulls an artifact from the memory of several holders at once into a slot, verifying each chunk.

All holders of an artifact have the same digests, so any of them can deliver any chunk. A holder that breaks
off or sends damaged chunks drops out, and the others go on; a verified chunk is never requested again.

A chunk is received into its place and checked there. Only one stream at a time may write to a place, and none
once it is verified. A chunk that a second holder sends because the first is late goes to a separate buffer.
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
from tiercheck_sidecar.artifact_source import (
    FetchFailed,
    FilledSlot,
    SourceCorrupt,
    SourceFailed,
    SourceGone,
)
from tiercheck_sidecar.digest import chunk_view
from tiercheck_sidecar.exchange.frames import (
    Altered,
    ListedArtifact,
    PeerRequest,
    PeerResponse,
    Wire,
    WireBroken,
)
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.session import Chunks
from tiercheck_sidecar.exchange.streams import (
    OVERDUE,
    ChunkScheduler,
    ask_ahead,
    receive_header,
    stream_count,
)
from tiercheck_sidecar.tags import is_well_described
from tiercheck_sidecar.vault import Seal, Vault


@dataclass(frozen=True)
class Dial:
    """A way to reach one holder."""

    worker: int
    connect: Callable[[], Wire]
    """Connects to the holder. Raises WireBroken, PeerRefused."""


@dataclass(frozen=True)
class Opening:
    """A connection on which chunks of a holder's copy can be asked for."""

    dial: Dial
    wire: Wire
    seal: Seal
    """The seal of the fetched artifact, if the holder's copy is as described."""


@contextlib.contextmanager
def failing_as_source() -> Iterator[None]:
    """Turns failures of a connection into SourceFailed."""
    try:
        yield
    except (PeerRefused, OSError) as error:
        raise SourceFailed(str(error)) from error


def open_copy(artifact: Artifact, dial: Dial, *, bare: bool = False, share: Share | None = None) -> Opening:
    """Returns a connection to request chunks of an artifact, or of the parity block `share`, by index.

    `bare`: chunks may be sent bare; they are then received with `Chunks`. Raises SourceFailed
    (SourceGone, SourceCorrupt if the description of the copy cannot be true)."""
    with failing_as_source():
        wire = dial.connect()
        try:
            wire.send(PeerRequest.about("read", artifact, bare=bare, share=share))
            said = wire.receive(PeerResponse)
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
    """Returns the whole artifacts of `rank`, or of block `share`, at a peer. Raises SourceFailed."""
    with failing_as_source(), contextlib.closing(dial.connect()) as wire:
        return list_held(wire, rank, share)


def list_held(wire: Wire, rank: int, share: Share | None = None) -> tuple[ListedArtifact, ...]:
    """Does the same as `holdings`, on an open connection. Raises WireBroken."""
    wire.send(PeerRequest("list", rank, share=share))
    return wire.receive(PeerResponse).listed


def have_reread(artifact: Artifact, dial: Dial, share: Share | None = None) -> PeerResponse:
    """Reports damaged chunks to a holder, and returns its answer once it has reread its copy.

    The answer's state is "ok" if the copy is good. Raises SourceFailed."""
    with failing_as_source(), contextlib.closing(dial.connect()) as wire:
        wire.send(PeerRequest.about("corrupt", artifact, share=share))
        return wire.receive(PeerResponse)


class MultiSourceFetch:
    """Collects the chunks of an artifact from several holders. Raises NoFreeSlot, OSError."""

    def __init__(
        self,
        vault: Vault,
        seal: Seal,
        openings: Sequence[Opening],
        reasons: list[str],
        bad: list[Quarantined],
    ) -> None:
        """Adds what goes wrong to `reasons` and `bad`."""
        self.seal, self._openings, self._reasons, self._bad = seal, openings, reasons, bad
        self.workers: set[int] = set()
        """The workers that delivered chunks."""
        self._changed = threading.Condition()
        self._gathering = ChunkScheduler(len(seal.digests.values), [each.dial.worker for each in openings])
        self._streams: Counter[int] = Counter()
        self._wires: set[Wire] = set()
        self._altered_sources: set[int] = set()
        """Workers that sent bare chunks which were not what was sealed."""
        self._writers: dict[int, Wire] = {}
        self._draft = vault.draft(seal)

    def run(self) -> bool:
        """Returns whether the artifact is sealed. Raises NotASlot, OSError; then no slot is taken."""
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
        """Receives chunks from one holder, and reconnects as long as each connection delivers some.

        Chunks may be bare until one of them is altered."""
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
                    self._altered_sources.add(dial.worker)
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
            self._reasons.append(f"worker {dial.worker}: {reason}")

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
        """Requests, receives and verifies chunks; yields each good one. Raises WireBroken, OSError."""
        worker, wire, seal = opening.dial.worker, opening.wire, opening.seal
        chunks = Chunks.over(wire, seal.artifact, seal.digests, seal.tags)
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
        """Receives a chunk and returns whether it is good. Raises WireBroken."""
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
                    self.workers.add(worker)
                    self._gathering.arrived(index, worker)
                elif over:
                    self._gathering.damaged(index, worker)
                self._settle()
        return good

    def _clear(self, index: int) -> None:
        """Cuts off a slow stream that is still writing to the chunk's place. Called under the lock."""
        if index in self._writers:
            self._writers[index].cut()
            self._changed.wait_for(lambda: index not in self._writers)

    def _next(self, worker: int, owed: deque[int]) -> int | None:
        """Returns the chunk to request or None; waits for one while none is pending and some are missing."""
        with self._changed:
            while True:
                index = self._gathering.take(worker, time.monotonic())
                over = self._gathering.over or not self._gathering.is_live(worker)
                if index is not None or owed or over:
                    return index
                self._changed.wait(OVERDUE / 4)

    def _settle(self) -> None:
        """Wakes waiting streams after a change, and ends all once complete. Called under the lock."""
        if self._gathering.complete:
            for wire in self._wires:
                wire.cut()
        self._changed.notify_all()

    def _examine(self) -> None:
        """Asks holders that sent damaged chunks to reread: is the copy bad, or the connection?

        If only bare chunks were altered, the copy counts as bad only if the holder itself reports it."""
        for opening in self._openings:
            worker = opening.dial.worker
            damaged = self._gathering.brought_damaged(worker)
            if not damaged and worker not in self._altered_sources:
                continue
            word = ""
            with contextlib.suppress(SourceFailed):
                word = have_reread(self.seal.artifact, opening.dial).state
            if word == "ok":
                self._reasons.append(f"worker {worker}: chunks came damaged, although its copy is good")
            elif not (word or damaged):
                self._reasons.append(f"worker {worker}: chunks came damaged, and it did not reread its copy")
            else:
                reason = f"the copy at worker {worker} is bad: chunks do not match their digests"
                self._bad.append(_bad_copy(self.seal.artifact, worker, reason))
                self._reasons.append(reason)


_GRACE = 0.3
"""Seconds to wait for the other sources once the first has answered."""


def fetch(vault: Vault, artifact: Artifact, sources: Sequence[Dial]) -> FilledSlot:
    """Copies and seals `artifact`. Raises FetchFailed, NoFreeSlot, NotASlot, OSError, keeping no slot."""
    reasons: list[str] = []
    bad: list[Quarantined] = []
    with contextlib.ExitStack() as stack:
        groups: dict[Seal, list[Opening]] = {}
        for opening in _open_all(artifact, sources, reasons, bad):
            stack.callback(opening.wire.close)
            groups.setdefault(opening.seal, []).append(opening)
        # Most holders first; they should all agree.
        for seal in sorted(groups, key=lambda each: -len(groups[each])):
            collection = MultiSourceFetch(vault, seal, groups[seal], reasons, bad)
            if collection.run():
                return FilledSlot(seal, tuple(bad), tuple(sorted(collection.workers)))
    raise FetchFailed(reasons, bad)


def _open_all(
    artifact: Artifact, sources: Sequence[Dial], reasons: list[str], bad: list[Quarantined]
) -> list[Opening]:
    """Returns the sources that have it; adds the failures of others to `reasons` and `bad`.

    Once a source has answered, the others get only a short time."""
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
