"""Gives a restore the places that it reads from: lists what each has, and brings it, or chunks of it.

Peers are asked for what they hold, everybody in a parity group for what could be rebuilt of it. The remote
tier has the snapshots of complete versions.

A rank on another mesh reads verified chunks of others' snapshots. A loan is a sparse file in the memory
volume, as long as the artifact, in which the chunks that were asked for are at their places. What this worker
holds itself is lent as it lies.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from tiercheck.plain_files import create_plain, folder_beneath, open_plain
from tiercheck.protocol.artifacts.slot import NotASlot, beginning
from tiercheck.protocol.directive import RESTORE_STALL, Directive, Peer, Source, Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Digests, Version
from tiercheck.supervised import describe
from tiercheck_sidecar.bounded_calls import BoundedCall, BoundedCalls, SourceCorrupt, SourceFailed, Stalled
from tiercheck_sidecar.digest import chunk_view, chunks_of, digest_chunk, length_of
from tiercheck_sidecar.exchange.fetch import (
    BadCopy,
    Dial,
    FetchFailed,
    Opening,
    Senseless,
    fetch,
    holdings,
    open_copy,
)
from tiercheck_sidecar.exchange.frames import Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.offload import RemoteSource
from tiercheck_sidecar.parity.parts import obtainable
from tiercheck_sidecar.parity.rebuild import Rebuild, rebuild
from tiercheck_sidecar.restore.restore_plan import Brought, SourceOffer, name_of
from tiercheck_sidecar.vault import MemoryTooSmall, NotHeld, Seal, Vault
from tiercheck_sidecar.vault.seal import header_fault

log = logging.getLogger(__name__)

FOLDER = "lent"
_STATE_WORD = 8
"""Bytes that say how long the header is."""
_AHEAD = 2
"""Chunks asked for before the previous one has arrived."""


Bring = Callable[[Sequence[int], memoryview], None]
"""Chunk indices, and the whole artifact's bytes, of which these chunks are to be filled: there, or in the
file behind them. Raises SourceFailed, SourceCorrupt."""


Bounded = Callable[[str, Callable[[BoundedCall], Path], int], Path]
"""Makes a call to a place for a rank, which is left behind when nothing comes. Raises as it does, Stalled."""


@dataclass
class _Loan:
    path: Path
    digests: Digests
    here: set[int] = field(default_factory=set)
    begun: bool = False
    """Its header is here, and is the right one."""


class Lender:
    """For one rank's session. Not thread-safe; `close` ends all loans."""

    def __init__(
        self,
        vault: Vault,
        folder: Path,
        dial: Callable[[Peer], Wire],
        remote: RemoteSource,
        bounded: Bounded = lambda place, body, rank: body(BoundedCall(lambda _: None)),
    ) -> None:
        """`bounded` makes calls to the places."""
        self._vault, self._dial, self._remote, self._bounded = vault, dial, remote, bounded
        self._folder = folder / uuid.uuid4().hex[:8]
        self._root = folder.parent.parent
        self._loans: dict[Artifact, _Loan] = {}
        self._pinned = contextlib.ExitStack()
        self._lent: dict[Artifact, Path] = {}

    def lend(self, directive: Directive, artifact: Artifact, ranges: Iterable[tuple[int, int]]) -> Path:
        """A file with these bytes, and the artifact's beginning. Raises SourceFailed, MemoryTooSmall,
        OSError."""
        own = self._own(artifact)
        if own is not None:
            return own
        reasons, wanted = [], tuple(ranges)
        known = directive.restore.table.of_rank(artifact.rank) if directive.restore else ()
        for source in [*(each for each in known if each.peer or each.parity), Source(Tier.REMOTE)]:
            name, borrow = name_of(source), partial(self._borrow, artifact, source, wanted)
            try:
                return self._bounded(name, borrow, artifact.rank)
            except Stalled as error:
                self._forget(artifact)
                reasons.append(f"{name}: {error}")
            except (SourceFailed, SourceCorrupt) as error:
                reasons.append(f"{name}: {error}")
        raise SourceFailed("; ".join(reasons) or "no source is known")

    def close(self) -> None:
        self._pinned.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _own(self, artifact: Artifact) -> Path | None:
        """What lies here, read again once: it may have lain for long."""
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
        """Somebody was left behind who may still write into the loan: the next one gets a file of its own."""
        loan = self._loans.pop(artifact, None)
        if loan is not None:
            loan.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened(
        self, artifact: Artifact, source: Source, call: BoundedCall
    ) -> Iterator[tuple[Digests, Bring]]:
        """A place that is asked for the artifact by a call. Raises SourceFailed, SourceCorrupt."""

        def connect(peer: Peer) -> Wire:
            return call.own(self._dial(peer))

        if source.parity is not None:
            # Of a rank that nobody has: added up from what it was coded with, as far as it is wanted here.
            found = Rebuild(artifact, source.parity.ranks, source.parity, connect)

            def unfold(indices: Sequence[int], into: memoryview) -> None:
                with open(open_plain(self._path(artifact), self._root, write=True), "r+b") as file:
                    found.unfold(file.fileno(), indices)

            yield found.digests, unfold
        elif source.peer is not None:
            peer = source.peer
            try:
                opening = open_copy(artifact, Dial(peer.worker, lambda: connect(peer)), Tier.LOCAL)
            except Senseless as error:
                raise SourceCorrupt(str(error)) from error
            except (PeerRefused, OSError) as error:
                raise SourceFailed(str(error)) from error
            digests = opening.seal.digests
            with contextlib.closing(opening.wire):
                yield (
                    digests,
                    lambda indices, into: receive_chunks(
                        opening, indices, lambda index: chunk_view(into, digests, index)
                    ),
                )
        else:
            yield (
                self._remote.digests(artifact),
                lambda indices, into: self._remote.fetch_chunks(artifact, indices, into, call.arrived),
            )

    def _borrow(
        self, artifact: Artifact, source: Source, ranges: Iterable[tuple[int, int]], call: BoundedCall
    ) -> Path:
        with self._opened(artifact, source, call) as (digests, bring):
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
                if not loan.begun:
                    self._begin(loan, artifact, bring, view)
                    loan.begun = True
                self._bring(loan, bring, view, chunks_of(ranges, digests))
            return loan.path

    def _begin(self, loan: _Loan, artifact: Artifact, bring: Bring, view: memoryview) -> None:
        """Bring the header, however long it is, and see that it is that of the artifact."""
        digests, end, here = loan.digests, _STATE_WORD, 0
        while end > here:
            if end > digests.size:
                raise SourceFailed(f"its header reaches to byte {end} of {digests.size}")
            self._bring(loan, bring, view, chunks_of([(0, end)], digests))
            chunks = next(index for index in count() if index not in loan.here)
            here = min(chunks * digests.chunk, digests.size)
            if here < end:
                raise SourceFailed(f"it has digests of {here} of {digests.size} bytes")
            try:
                with view[:here] as known:
                    end = beginning(known)
            except NotASlot as error:
                raise SourceFailed(str(error)) from error
        with view[:here] as known:
            reason = header_fault(
                known, Seal(artifact.rank, artifact.version, 0, Tier.LOCAL, digests, artifact.kind), len(view)
            )
        if reason:
            raise SourceCorrupt(reason)

    def _open(self, artifact: Artifact, digests: Digests) -> _Loan:
        with folder_beneath(self._root, self._folder.relative_to(self._root).parts, make=True):
            self._folder.chmod(0o755)
        path = self._path(artifact)
        with open(create_plain(path, self._root), "wb") as file:
            file.truncate(digests.size)
        return _Loan(path, digests)

    def _path(self, artifact: Artifact) -> Path:
        version = artifact.version
        return self._folder / f"{artifact.rank}-{version.step}-{version.attempt}"

    def _bring(self, loan: _Loan, bring: Bring, view: memoryview, wanted: set[int]) -> None:
        missing = sorted(wanted - loan.here)
        if not missing:
            return
        needed = sum(length_of(loan.digests, index) for index in missing)
        lent = sum(length_of(each.digests, index) for each in self._loans.values() for index in each.here)
        if self._vault.used() + lent + needed > self._vault.limit:
            raise MemoryTooSmall(
                f"{lent + needed} bytes of other ranks' state do not fit beside the {self._vault.used()} "
                "that the memory volume of "
                f"{self._vault.limit} bytes holds; raise spec.tiers.local.sizeLimit"
            )
        bring(missing, view)
        loan.here |= set(missing)


def receive_chunks(opening: Opening, indices: Sequence[int], room: Callable[[int], memoryview]) -> None:
    """Ask for these chunks of a holder's copy and verify each. `room`: where a chunk goes. Raises
    SourceFailed, SourceCorrupt."""
    wire, digests = opening.wire, opening.seal.digests
    try:
        for index in indices[:_AHEAD]:
            wire.send_index(index)
        for place, index in enumerate(indices):
            found, _ = wire.receive_chunk_header()
            if found != index:
                raise SourceFailed("it sent a chunk that was not asked for")
            with room(index) as chunk:
                wire.receive_into(chunk)
                if digest_chunk(chunk) != digests.values[index]:
                    raise SourceCorrupt(f"chunk {index} does not match its digest")
            if place + _AHEAD < len(indices):
                wire.send_index(indices[place + _AHEAD])
    except OSError as error:
        raise SourceFailed(str(error)) from error


T = TypeVar("T")

SOURCE_STALLED = "SourceStalled"
"""Reason of the problem that a source of restores hangs."""


class TriedInVain(SourceFailed):
    """With what was learned about bad copies."""

    def __init__(self, reasons: Sequence[str], bad: tuple[Quarantined, ...]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons, self.bad = tuple(reasons), bad


class RestoreSources:
    """Thread-safe."""

    def __init__(
        self, state: SidecarState, vault: Vault, identity: Identity, port: int, remote: RemoteSource
    ) -> None:
        self._state, self._vault, self._identity, self._port = state, vault, identity, port
        self.remote = remote
        self._calls = BoundedCalls(self._patience, self._left_behind)

    def ask(
        self, rank: int, version: Version, sources: Sequence[Source]
    ) -> tuple[list[SourceOffer], list[str]]:
        """What each source has of `rank`, in their order; and a sentence for each that did not answer."""
        places, failures = [], []
        with ThreadPoolExecutor(max(1, len(sources)), thread_name_prefix="list") as pool:
            answers = [
                pool.submit(self._bounded, name_of(source), partial(self._list, rank, version, source), rank)
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

    def bring(self, artifact: Artifact, sources: Sequence[Source]) -> Brought:
        """Fetch from `sources`: either peers, all at once, or one of another kind.

        Raises SourceFailed (TriedInVain, if there may be bad copies to report), NoFreeSlot, NotASlot,
        OSError.
        """
        place = ", ".join(map(name_of, sources))
        try:
            return self._bounded(place, lambda call: self._bring(artifact, sources, call), artifact.rank)
        except Stalled:
            self._vault.discard(artifact)
            raise

    def _bring(self, artifact: Artifact, sources: Sequence[Source], call: BoundedCall) -> Brought:
        source = sources[0]
        if source.tier is Tier.REMOTE:
            self.remote.fetch(artifact.rank, artifact.version, call.arrived)
            return Brought(source)
        bad: list[Quarantined] = []
        try:
            if source.parity is not None:
                rebuild(self._vault, artifact, source.parity, self._reaching(call), bad.append)
                return Brought(source, tuple(bad))
            peers = [each.peer for each in sources if each.peer is not None]
            done = fetch(self._vault, artifact, [self._dial(peer, call) for peer in peers])
        except FetchFailed as error:
            raise TriedInVain(error.reasons, _quarantined(artifact, error.bad)) from error
        except SourceFailed as error:
            raise TriedInVain((str(error),), tuple(bad)) from error
        givers = set(done.workers) - {each.worker for each in done.bad}
        first = next((each for each in sources if each.peer and each.peer.worker in givers), source)
        return Brought(first, _quarantined(artifact, done.bad))

    def lender(self) -> Lender:
        """For a rank that comes back on another mesh. To be closed."""
        return Lender(
            self._vault, self._state.config.vault_dir / FOLDER, self.connect, self.remote, self._bounded
        )

    def _list(self, rank: int, version: Version, source: Source, call: BoundedCall) -> dict[Artifact, int]:
        if source.tier is Tier.REMOTE:
            return self.remote.listed(rank, version)
        if source.parity is not None:
            return obtainable(source.parity, rank, len(self._vault.ranks), self._reaching(call))
        if source.peer is None:
            raise SourceFailed("the source names no worker")
        try:
            return {each.artifact: each.bytes for each in holdings(self._dial(source.peer, call), rank)}
        except (WireBroken, PeerRefused, OSError) as error:
            raise SourceFailed(str(error)) from error

    def _dial(self, peer: Peer, call: BoundedCall) -> Dial:
        return Dial(peer.worker, partial(self._reaching(call), peer))

    def _reaching(self, call: BoundedCall) -> Callable[[Peer], Wire]:
        """What connects to a peer for this call alone."""
        return lambda peer: call.own(self.connect(peer))

    def _bounded(self, place: str, body: Callable[[BoundedCall], T], rank: int) -> T:
        """What `body` brings for `rank` from `place`, as long as something comes. Raises what it raises,
        Stalled."""
        meter = self._state.meter
        with meter.waiting(place):
            try:
                return self._calls.make(place, body, lambda count: meter.arrived(rank, count))
            except Stalled as error:
                log.warning("%s: %s", place, error)
                meter.given_up(place)
                raise

    def _patience(self) -> float:
        directive = self._state.directive
        return directive.policy.restore_stall if directive is not None else RESTORE_STALL

    def _left_behind(self, left: Mapping[str, int]) -> None:
        """It is told for as long as it hangs: a restore in need would have to do without."""
        named = ", ".join(sorted(left))
        advice = (
            "Restores go on without it. Look at the mount, the store and the network of this worker's node."
        )
        self._state.problem(
            SOURCE_STALLED, f"{named} hangs: what was asked of it has not come back. {advice}" if left else ""
        )

    def connect(self, peer: Peer) -> Wire:
        """A proven connection to a worker's sidecar. Raises WireBroken, PeerRefused."""
        return dial(self._identity, self._state.attempt, peer, self._port)


def _quarantined(artifact: Artifact, bad: Iterable[BadCopy]) -> tuple[Quarantined, ...]:
    rank, version, kind = artifact.rank, artifact.version, artifact.kind
    return tuple(Quarantined(rank, version, each.worker, each.reason, kind) for each in bad)
