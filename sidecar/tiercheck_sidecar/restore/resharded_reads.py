"""Brings a rank on another mesh the verified chunks that it reads of others' snapshots.

A loan is a sparse file in the memory volume, as long as the artifact, in which the chunks that were asked for
are at their places. What this worker holds itself is lent as it lies.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from tiercheck.plain_files import create_plain, folder_beneath, open_plain
from tiercheck.protocol.artifacts.slot import NotASlot, beginning
from tiercheck.protocol.directive import Directive, ParityGroup, Peer, Tier
from tiercheck.protocol.version import Artifact, Digests
from tiercheck_sidecar.bounded_calls import BoundedCall, SourceCorrupt, SourceFailed, Stalled
from tiercheck_sidecar.digest import chunk_view, digest_chunk, length_of
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.sources import Dial, Opening, Senseless, open_copy
from tiercheck_sidecar.offload.remote_source import RemoteSource
from tiercheck_sidecar.parity.rebuild import Rebuild
from tiercheck_sidecar.vault import MemoryTooSmall, NotHeld, Seal, Vault
from tiercheck_sidecar.vault.inventory import header_fault

log = logging.getLogger(__name__)

FOLDER = "lent"
_STATE_WORD = 8
"""Bytes that say how long the header is."""
_AHEAD = 2
"""Chunks asked for before the previous one has arrived."""


Bring = Callable[[Sequence[int], memoryview], None]
"""Chunk indices, and the whole artifact's bytes, of which these chunks are to be filled: there, or in the
file behind them. Raises SourceFailed, SourceCorrupt."""


Opened = Callable[[BoundedCall], contextlib.AbstractContextManager[tuple[Digests, Bring]]]
"""A place that was asked for an artifact, by a call."""


Bounded = Callable[[str, Callable[[BoundedCall], Path], int], Path]
"""Makes a call to a place for a rank, which is left behind when nothing comes. Raises as it does, Stalled."""


@dataclass
class _Loan:
    path: Path
    digests: Digests
    here: set[int] = field(default_factory=set)
    begun: bool = False
    """Its header is here, and is the right one."""

    @property
    def bytes(self) -> int:
        return sum(length_of(self.digests, index) for index in self.here)


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
        for name, opened in self._sources(directive, artifact):
            borrow = partial(self._borrow, artifact, opened, wanted)
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

    def _sources(self, directive: Directive, artifact: Artifact) -> Iterator[tuple[str, Opened]]:
        for source in directive.restore.table.of_rank(artifact.rank) if directive.restore else ():
            if source.peer is not None:
                yield f"worker {source.peer.worker}", partial(self._from_peer, artifact, source.peer)
            elif source.parity is not None:
                yield "parity", partial(self._from_parity, artifact, source.parity)
        yield "the remote tier", partial(self._from_remote, artifact)

    def _borrow(
        self, artifact: Artifact, opened: Opened, ranges: Iterable[tuple[int, int]], call: BoundedCall
    ) -> Path:
        with opened(call) as (digests, bring):
            call.arrived(0)
            return self._fill(artifact, digests, bring, ranges)

    def _forget(self, artifact: Artifact) -> None:
        """Somebody was left behind who may still write into the loan: the next one gets a file of its own."""
        loan = self._loans.pop(artifact, None)
        if loan is not None:
            loan.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _from_peer(
        self, artifact: Artifact, peer: Peer, call: BoundedCall
    ) -> Iterator[tuple[Digests, Bring]]:
        try:
            opening = open_copy(artifact, Dial(peer.worker, lambda: call.own(self._dial(peer))), Tier.LOCAL)
        except Senseless as error:
            raise SourceCorrupt(str(error)) from error
        except (PeerRefused, OSError) as error:
            raise SourceFailed(str(error)) from error
        with contextlib.closing(opening.wire):
            yield (
                opening.seal.digests,
                lambda indices, into: receive_chunks(
                    opening, indices, lambda index: chunk_view(into, opening.seal.digests, index)
                ),
            )

    @contextlib.contextmanager
    def _from_parity(
        self, artifact: Artifact, group: ParityGroup, call: BoundedCall
    ) -> Iterator[tuple[Digests, Bring]]:
        """Of a rank that nobody has: added up from what it was coded with, as far as it is wanted here."""
        found = Rebuild(artifact, group.ranks, group, lambda peer: call.own(self._dial(peer)))

        def bring(indices: Sequence[int], into: memoryview) -> None:
            with open(open_plain(self._path(artifact), self._root, write=True), "r+b") as file:
                found.unfold(file.fileno(), indices)

        yield found.digests, bring

    @contextlib.contextmanager
    def _from_remote(self, artifact: Artifact, call: BoundedCall) -> Iterator[tuple[Digests, Bring]]:
        digests = self._remote.digests(artifact)
        yield digests, lambda indices, into: self._remote.fetch_chunks(artifact, indices, into, call.arrived)

    def _fill(
        self, artifact: Artifact, digests: Digests, bring: Bring, ranges: Iterable[tuple[int, int]]
    ) -> Path:
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
            self._bring(loan, bring, view, _chunks(ranges, digests))
        return loan.path

    def _begin(self, loan: _Loan, artifact: Artifact, bring: Bring, view: memoryview) -> None:
        """Bring the header, however long it is, and see that it is that of the artifact."""
        digests, end, here = loan.digests, _STATE_WORD, 0
        while end > here:
            if end > digests.size:
                raise SourceFailed(f"its header reaches to byte {end} of {digests.size}")
            self._bring(loan, bring, view, _chunks([(0, end)], digests))
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
        lent = sum(each.bytes for each in self._loans.values())
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


def _chunks(ranges: Iterable[tuple[int, int]], digests: Digests) -> set[int]:
    """The chunks that hold these bytes."""
    last = len(digests.values) - 1
    return {
        index
        for begin, end in ranges
        if begin < end
        for index in range(max(begin, 0) // digests.chunk, min((end - 1) // digests.chunk, last) + 1)
    }
