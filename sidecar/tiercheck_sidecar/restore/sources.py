"""Provides the sources of a restore: lists what each has, and fetches artifacts or chunks of them.

Peers list what they hold, members and holders of a parity group what could be rebuilt. The remote tier has
the snapshots of complete versions. Several peers supply a whole artifact together (`exchange.fetch`).

A rank on another mesh reads verified chunks of others' snapshots. They are in a sparse file in the memory
volume, as long as the artifact, in which the requested chunks are at their places. What this worker holds
itself is read in place.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from tiercheck.plain_files import create_plain, folder_beneath, open_plain
from tiercheck.protocol.artifacts.slot import NotASlot, beginning
from tiercheck.protocol.directive import Directive, Peer, Source, Tier
from tiercheck.protocol.version import Artifact, Digests, Version
from tiercheck.supervised import describe
from tiercheck_sidecar.artifact_source import (
    ArtifactSink,
    ArtifactSource,
    BoundedCall,
    BoundedCalls,
    FilledSlot,
    OpenArtifact,
    SourceCorrupt,
    SourceFailed,
    SourceGone,
    Stalled,
)
from tiercheck_sidecar.digest import chunk_view, chunks_of, digest_chunk, length_of
from tiercheck_sidecar.exchange.fetch import (
    Dial,
    Opening,
    failing_as_source,
    fetch,
    holdings,
    open_copy,
)
from tiercheck_sidecar.exchange.frames import END, Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.exchange.streams import ask_ahead, receive_header
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.parity.rebuild import ParitySource
from tiercheck_sidecar.restore.restore_plan import SourceOffer, name_of
from tiercheck_sidecar.vault import MemoryTooSmall, NotHeld, Vault
from tiercheck_sidecar.vault.seal import header_fault
from tiercheck_sidecar.vault.stock import sealed

log = logging.getLogger(__name__)


class OwnMemory(ArtifactSource):
    """The slots that a trainer would map."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    def list(self, rank: int, version: Version, call: BoundedCall) -> dict[Artifact, int]:
        return self._vault.own_artifacts(rank)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, call: BoundedCall) -> Iterator[OpenArtifact]:
        try:
            with self._vault.pin(artifact, Tier.LOCAL) as slot, sealed(slot) as (view, seal):

                def read(chunks: Sequence[int], sink: ArtifactSink) -> None:
                    for index in chunks:
                        with chunk_view(view, seal.digests, index) as chunk:
                            if digest_chunk(chunk) != seal.digests.values[index]:
                                raise SourceCorrupt(f"chunk {index} does not match its digest")
                            sink.put(seal.digests, index, chunk)

                yield OpenArtifact(seal, read)
        except NotHeld as error:
            raise SourceGone(str(error)) from error


class PeerSource(ArtifactSource):
    """Copies in other workers' memory, which all fill a slot together.

    `list` and `open` use the first worker's, over a lasting connection. It is pinned while it is open."""

    def __init__(self, peers: Sequence[Peer], connect: Callable[[Peer], Wire]) -> None:
        """`connect` raises WireBroken, PeerRefused."""
        self._peers, self._connect = peers, connect
        self._wire: Wire | None = None

    def list(self, rank: int, version: Version, call: BoundedCall) -> dict[Artifact, int]:
        return {each.artifact: each.bytes for each in holdings(self._dials(call)[0], rank)}

    def fill(self, vault: Vault, artifact: Artifact, call: BoundedCall) -> FilledSlot:
        return fetch(vault, artifact, self._dials(call))

    @contextlib.contextmanager
    def open(self, artifact: Artifact, call: BoundedCall) -> Iterator[OpenArtifact]:
        again = self._wire is not None  # a lasting connection may have been closed meanwhile
        try:
            while True:
                try:
                    dial = Dial(self._peers[0].worker, lambda: self._connection(call))
                    opening = open_copy(artifact, dial)
                    break
                except SourceFailed as error:
                    self.close()
                    if isinstance(error, (SourceGone, SourceCorrupt)) or not again:
                        raise
                    again = False
            yield OpenArtifact(opening.seal, partial(_receive_chunks, opening))
        except BaseException:
            self.close()
            raise
        try:
            opening.wire.send_index(END)
        except OSError:  # all is here; the next one connects again
            self.close()

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _dials(self, call: BoundedCall) -> Sequence[Dial]:
        return [Dial(peer.worker, partial(self._dial, call, peer)) for peer in self._peers]

    def _dial(self, call: BoundedCall, peer: Peer) -> Wire:
        return call.own(self._connect(peer))

    def _connection(self, call: BoundedCall) -> Wire:
        self._wire = self._wire or self._dial(call, self._peers[0])
        return self._wire


def _receive_chunks(opening: Opening, indices: Sequence[int], sink: ArtifactSink) -> None:
    """Receives chunks and verifies each. Raises SourceFailed, SourceCorrupt."""
    wire, digests = opening.wire, opening.seal.digests
    with failing_as_source():
        for index in ask_ahead(partial(next, iter(indices), None), wire.send_index, deque()):
            receive_header(wire, digests, index)
            with sink.room(digests, index) as chunk:
                wire.receive_into(chunk)
                if digest_chunk(chunk) != digests.values[index]:
                    raise SourceCorrupt(f"chunk {index} does not match its digest")


FOLDER = "lent"
_STATE_WORD = 8
"""Bytes that contain the length of the header."""

T = TypeVar("T")


@dataclass
class _PartialSlot:
    path: Path
    digests: Digests
    here: set[int] = field(default_factory=set)
    begun: bool = False
    """True once its header is here and verified."""


class ShardReader:
    """Opens other ranks' artifacts for the session of one rank. Not thread-safe. `close` releases all."""

    def __init__(self, vault: Vault, folder: Path, reach: RestoreSources) -> None:
        self._vault, self._reach = vault, reach
        self._folder = folder / uuid.uuid4().hex[:8]
        self._root = folder.parent.parent
        self._loans: dict[Artifact, _PartialSlot] = {}
        self._pinned = contextlib.ExitStack()
        self._lent: dict[Artifact, Path] = {}

    def lend(self, directive: Directive, artifact: Artifact, ranges: Iterable[tuple[int, int]]) -> Path:
        """Returns a file with these bytes and the artifact's header.
        Raises SourceFailed, MemoryTooSmall, OSError."""
        own = self._own(artifact)
        if own is not None:
            return own
        reasons, wanted = [], tuple(ranges)
        known = directive.restore.table.of_rank(artifact.rank) if directive.restore else ()
        for source in [*(each for each in known if each.peer or each.parity), Source(Tier.REMOTE)]:
            try:
                return self._reach.call(partial(self._borrow, artifact, wanted), artifact.rank, source)
            except SourceFailed as error:
                if isinstance(error, Stalled):
                    self._forget(artifact)
                reasons.append(f"{name_of(source)}: {error}")
        raise SourceFailed("; ".join(reasons) or "no source is known")

    def close(self) -> None:
        self._pinned.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _own(self, artifact: Artifact) -> Path | None:
        """Returns the artifact's file if it is here, verified once, because it may have lain for long."""
        if artifact in self._lent:
            return self._lent[artifact]
        try:
            if self._vault.fault(artifact):
                return None
            slot = self._pinned.enter_context(self._vault.pin(artifact))
        except NotHeld:
            return None
        self._lent[artifact] = slot.path
        return slot.path

    def _forget(self, artifact: Artifact) -> None:
        """Drops a file that an abandoned call may still write into, so that the next one gets its own."""
        loan = self._loans.pop(artifact, None)
        if loan is not None:
            loan.path.unlink(missing_ok=True)

    def _borrow(
        self, artifact: Artifact, ranges: Iterable[tuple[int, int]], place: ArtifactSource, call: BoundedCall
    ) -> Path:
        with place.open(artifact, call) as found:
            digests = found.seal.digests
            call.arrived(0)
            if digests.size < _STATE_WORD:
                raise SourceFailed(f"it has {digests.size} bytes")
            loan = self._loans.get(artifact)
            if loan is None or loan.digests != digests:
                loan = self._loans[artifact] = self._open(artifact, digests)
            with (
                open(open_plain(loan.path, self._root, write=True), "r+b") as file,
                mmap.mmap(file.fileno(), digests.size) as pages,
                memoryview(pages) as view,
            ):
                sink = ArtifactSink(view, file.fileno())
                if not loan.begun:
                    self._begin(loan, found, sink)
                    loan.begun = True
                self._bring(loan, found, sink, chunks_of(ranges, digests))
            return loan.path

    def _begin(self, loan: _PartialSlot, found: OpenArtifact, sink: ArtifactSink) -> None:
        """Fetches the header, however long it is, and verifies that it is that of the artifact."""
        digests, end, here = loan.digests, _STATE_WORD, 0
        while end > here:
            if end > digests.size:
                raise SourceFailed(f"its header reaches to byte {end} of {digests.size}")
            self._bring(loan, found, sink, chunks_of([(0, end)], digests))
            chunks = next(index for index in count() if index not in loan.here)
            here = min(chunks * digests.chunk, digests.size)
            if here < end:
                raise SourceFailed(f"it has digests of {here} of {digests.size} bytes")
            try:
                with sink.view[:here] as known:
                    end = beginning(known)
            except NotASlot as error:
                raise SourceFailed(str(error)) from error
        with sink.view[:here] as known:
            reason = header_fault(known, found.seal, digests.size)
        if reason:
            raise SourceCorrupt(reason)

    def _open(self, artifact: Artifact, digests: Digests) -> _PartialSlot:
        with folder_beneath(self._root, self._folder.relative_to(self._root).parts, make=True):
            self._folder.chmod(0o755)
        version = artifact.version
        path = self._folder / f"{artifact.rank}-{version.step}-{version.attempt}"
        with open(create_plain(path, self._root), "wb") as file:
            file.truncate(digests.size)
        return _PartialSlot(path, digests)

    def _bring(self, loan: _PartialSlot, found: OpenArtifact, sink: ArtifactSink, wanted: set[int]) -> None:
        missing = sorted(wanted - loan.here)
        if not missing:
            return
        needed = sum(length_of(loan.digests, index) for index in missing)
        lent = sum(length_of(each.digests, index) for each in self._loans.values() for index in each.here)
        if self._vault.used() + lent + needed > self._vault.limit:
            raise MemoryTooSmall(
                f"{lent + needed} bytes of other ranks' state do not fit beside the {self._vault.used()} "
                f"that the memory volume of {self._vault.limit} bytes holds; raise spec.tiers.local.sizeLimit"
            )
        found.read(missing, sink)
        loan.here |= set(missing)


SOURCE_STALLED = "SourceStalled"
"""Reason of the problem that a source of restores hangs."""


class RestoreSources:
    """Opens the sources of restores, and calls them with a time limit. Thread-safe."""

    def __init__(
        self, state: SidecarState, vault: Vault, identity: Identity, port: int, remote: ArtifactSource
    ) -> None:
        self._state, self._vault, self._identity, self._port = state, vault, identity, port
        self._remote = remote
        self._calls = BoundedCalls(lambda: state.policy.restore_stall, self._left_behind)

    def ask(
        self, rank: int, version: Version, sources: Sequence[Source]
    ) -> tuple[list[SourceOffer], list[str]]:
        """Returns what each source has of `rank`, in their order, and a sentence for each failure."""
        places, failures = [], []
        with ThreadPoolExecutor(max(1, len(sources)), thread_name_prefix="list") as pool:
            answers = [
                pool.submit(self.call, lambda place, call: place.list(rank, version, call), rank, source)
                for source in sources
            ]
            for source, answer in zip(sources, answers, strict=True):
                try:
                    places.append(SourceOffer(source, answer.result()))
                except SourceFailed as error:
                    failures.append(f"{name_of(source)}: {error}")
                except Exception as error:  # of this source: the others are asked all the same
                    log.exception("%s cannot be asked", name_of(source))
                    failures.append(f"{name_of(source)}: {describe(error)}")
        return places, failures

    def bring(self, artifact: Artifact, sources: Sequence[Source]) -> FilledSlot:
        """Fetches from `sources`: either peers, all at once, or one of another kind.
        Raises SourceFailed, NoFreeSlot, NotASlot, OSError."""
        try:
            return self.call(
                lambda place, call: place.fill(self._vault, artifact, call), artifact.rank, *sources
            )
        except Stalled:
            self._vault.discard(artifact)
            raise

    def call(self, body: Callable[[ArtifactSource, BoundedCall], T], rank: int, *sources: Source) -> T:
        """Returns what `body` reads for `rank` from what `open` returns, while data arrives.
        Raises what it raises, Stalled."""
        meter, name = self._state.meter, ", ".join(map(name_of, sources))

        def reach(call: BoundedCall) -> T:
            with contextlib.closing(self.open(*sources)) as place:
                return body(place, call)

        with meter.waiting(name):
            try:
                return self._calls.make(name, reach, lambda count: meter.arrived(rank, count))
            except Stalled as error:
                log.warning("%s: %s", name, error)
                meter.given_up(name)
                raise

    def open(self, *sources: Source, report_bad: bool = True) -> ArtifactSource:
        """Opens peers, or one source of another kind; the caller closes it.
        Raises SourceFailed if a source names nothing.
        The flag decides whether other workers are informed of parts that prove bad."""
        source = sources[0]
        if source.parity is not None:
            return ParitySource(source.parity, len(self._vault.ranks), self.connect, report_bad=report_bad)
        if source.peer is not None:
            return PeerSource([each.peer for each in sources if each.peer is not None], self.connect)
        if source.tier is Tier.PEER:
            raise SourceFailed("the source names no worker")
        return self._remote if source.tier is Tier.REMOTE else OwnMemory(self._vault)

    def lender(self) -> ShardReader:
        """Returns a lender for a rank that is restored on another mesh. The caller closes it."""
        return ShardReader(self._vault, self._state.config.vault_dir / FOLDER, self)

    def _left_behind(self, left: Mapping[str, int]) -> None:
        """States a problem for as long as a call hangs, because a restore would have to do without it."""
        named = ", ".join(sorted(left))
        advice = (
            "Restores go on without it. Look at the mount, the store and the network of this worker's node."
        )
        self._state.problem(
            SOURCE_STALLED, f"{named} hangs: what was asked of it has not come back. {advice}" if left else ""
        )

    def connect(self, peer: Peer) -> Wire:
        """Returns an authenticated connection to a worker's sidecar. Raises WireBroken, PeerRefused."""
        return dial(self._identity, self._state.attempt, peer, self._port)
