"""Reads what a restore would, chunk by chunk: each is verified, and none is kept.

A holder's slot is pinned only while it sends, so each chunk is asked for anew, on one lasting connection.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tiercheck.protocol.directive import Directive, ParityGroup, Peer, Source, Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Digests, History, Version
from tiercheck_sidecar.bounded_calls import SourceCorrupt, SourceFailed
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.fetch import Dial, NotOffered, Opening, Senseless, open_copy
from tiercheck_sidecar.exchange.frames import END, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.parity.rebuild import Rebuild
from tiercheck_sidecar.restore.restore_plan import OutOfReach, RestorePlan, name_of, plan
from tiercheck_sidecar.restore.sources import RestoreSources, receive_chunks
from tiercheck_sidecar.vault import NotHeld, Seal, Vault
from tiercheck_sidecar.vault.seal import header_fault
from tiercheck_sidecar.vault.verification import fault_of_chunk

T = TypeVar("T")


class Gone(SourceFailed):
    """It is not there, or not any more; the message is a sentence."""


class Route(ABC):
    """Used by one thread. Every method raises Gone, SourceCorrupt (what differs was read twice),
    SourceFailed, OSError."""

    tier: Tier
    name: str
    """As sentences call the place."""

    @abstractmethod
    def chain(self, rank: int, version: Version, history: History) -> tuple[Artifact, ...]:
        """What a restore of `rank` would read, the snapshot first."""

    @abstractmethod
    def digests(self, artifact: Artifact) -> Digests: ...

    @abstractmethod
    def read(self, artifact: Artifact, index: int) -> int:
        """Read and verify a chunk. Returns the bytes that came from elsewhere for it."""

    def close(self) -> None:  # noqa: B027  (most hold nothing between two chunks)
        """Let go of what is held."""


class OwnMemory(Route):
    """The slots that a trainer would map."""

    tier, name = Tier.LOCAL, "own memory"

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    def chain(self, rank: int, version: Version, history: History) -> tuple[Artifact, ...]:
        return _artifacts(plan(rank, version, history, self._vault.own_artifacts(rank), ()), rank)

    def digests(self, artifact: Artifact) -> Digests:
        seal = self._vault.find(artifact, Tier.LOCAL)
        if seal is None:
            raise Gone("it is not there")
        return seal.digests

    def read(self, artifact: Artifact, index: int) -> int:
        try:
            reason = fault_of_chunk(self._vault, artifact, index)
        except NotHeld as error:
            raise Gone(str(error)) from error
        if reason:
            raise SourceCorrupt(reason)
        return 0


class _Elsewhere(Route):
    """What every place beyond own memory has in common: it is asked what it offers, as by a restore."""

    def __init__(self, reach: RestoreSources, source: Source) -> None:
        self._reach, self._source = reach, source
        self.tier, self.name = source.tier, name_of(source)
        self._scratch = memoryview(bytearray(0))

    def chain(self, rank: int, version: Version, history: History) -> tuple[Artifact, ...]:
        places, failures = self._reach.ask(rank, version, [self._source])
        if failures:
            raise SourceFailed(failures[0].removeprefix(f"{self.name}: "))
        return _artifacts(plan(rank, version, history, {}, places), rank)

    def _room(self, digests: Digests, index: int) -> memoryview:
        length = length_of(digests, index)
        if len(self._scratch) < length:
            self._scratch = memoryview(bytearray(length))
        return self._scratch[:length]

    def _check_header(self, artifact: Artifact, digests: Digests) -> None:
        """The first chunk is here: as when a restored slot is sealed. A header that reaches beyond it is left
        to its digests."""
        chunk = self._scratch[: length_of(digests, 0)]
        if 8 + int.from_bytes(chunk[:8], "little") > len(chunk) and digests.size > len(chunk):
            return
        seal = Seal(artifact.rank, artifact.version, 0, Tier.LOCAL, digests, artifact.kind)
        reason = header_fault(chunk, seal, digests.size)
        if reason:
            raise SourceCorrupt(reason)


class Holder(_Elsewhere):
    """A copy in another worker's memory, by the request that a restore makes."""

    def __init__(self, reach: RestoreSources, peer: Peer) -> None:
        super().__init__(reach, Source(Tier.PEER, peer))
        self._peer = peer
        self._wire: Wire | None = None

    def digests(self, artifact: Artifact) -> Digests:
        return self._ask(artifact, lambda opening: None)

    def read(self, artifact: Artifact, index: int) -> int:
        digests = _twice(lambda: self._ask(artifact, lambda opening: self._receive(opening, artifact, index)))
        return length_of(digests, index)

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _receive(self, opening: Opening, artifact: Artifact, index: int) -> None:
        digests = opening.seal.digests
        if index >= len(digests.values):
            raise Gone("it was made anew meanwhile, and is shorter now")
        receive_chunks(opening, [index], lambda index: self._room(digests, index))
        if index == 0:
            self._check_header(artifact, digests)

    def _ask(self, artifact: Artifact, then: Callable[[Opening], None]) -> Digests:
        """One conversation; between two the holder keeps nothing for us."""
        again = self._wire is not None  # a lasting connection may have been closed meanwhile
        while True:
            try:
                opening = open_copy(artifact, Dial(self._peer.worker, self._connection), Tier.LOCAL)
                then(opening)
                opening.wire.send_index(END)
                return opening.seal.digests
            except NotOffered as error:
                self.close()
                raise Gone(str(error)) from error
            except Senseless as error:
                self.close()
                raise SourceCorrupt(str(error)) from error
            except (WireBroken, PeerRefused) as error:
                self.close()
                if not again:
                    raise SourceFailed(str(error)) from error
                again = False
            except BaseException:
                self.close()
                raise

    def _connection(self) -> Wire:
        if self._wire is None:
            self._wire = self._reach.connect(self._peer)
        return self._wire


class Parity(_Elsewhere):
    """Put together from what the others of the group hold, and added up to nowhere."""

    def __init__(self, reach: RestoreSources, group: ParityGroup, procs_per_worker: int) -> None:
        super().__init__(reach, Source(Tier.PEER, parity=group))
        self._group, self._procs = group, procs_per_worker
        self._bad: list[Quarantined] = []
        self._current: tuple[Artifact, Rebuild] | None = None

    def digests(self, artifact: Artifact) -> Digests:
        return self._rebuild(artifact).digests

    def read(self, artifact: Artifact, index: int) -> int:
        found = self._rebuild(artifact)
        try:
            with open(os.devnull, "wb") as nowhere:
                found.unfold(nowhere.fileno(), [index])
        except SourceFailed as error:
            self._current = None
            if not self._bad:
                raise Gone(str(error)) from error
        if self._bad:
            self._current, bad = None, self._bad[0]
            self._bad.clear()
            raise SourceCorrupt(f"what worker {bad.worker} gives for it is bad: {bad.reason}")
        return length_of(found.digests, index) * len(self._group.members)

    def _rebuild(self, artifact: Artifact) -> Rebuild:
        if self._current is None or self._current[0] != artifact:
            ranks = self._group.coded_with(artifact.rank, self._procs)
            try:
                found = Rebuild(
                    artifact, ranks, self._group, self._reach.connect, self._bad.append, tell=False
                )
            except SourceFailed as error:
                raise Gone(str(error)) from error
            self._current = artifact, found
        return self._current[1]


class RemoteObject(_Elsewhere):
    """A snapshot in the remote tier."""

    def __init__(self, reach: RestoreSources) -> None:
        super().__init__(reach, Source(Tier.REMOTE))
        self._known: tuple[Artifact, Digests] | None = None

    def digests(self, artifact: Artifact) -> Digests:
        if self._known is None or self._known[0] != artifact:
            self._known = artifact, self._present(artifact, lambda: self._reach.remote.digests(artifact))
        return self._known[1]

    def read(self, artifact: Artifact, index: int) -> int:
        digests = self.digests(artifact)
        into = self._room(digests, index)
        fetch = partial(self._reach.remote.fetch_chunk, artifact, digests, index, into)
        self._present(artifact, lambda: _twice(fetch))
        if index == 0:
            self._check_header(artifact, digests)
        return len(into)

    def _present(self, artifact: Artifact, read: Callable[[], T]) -> T:
        """What was deleted meanwhile, because the job keeps only so many versions, is gone and not bad."""
        try:
            return read()
        except SourceFailed as error:
            places, failures = self._reach.ask(artifact.rank, artifact.version, [self._source])
            if failures or artifact in places[0].offers:
                raise
            raise Gone(str(error)) from error


def routes(tier: Tier, directive: Directive, vault: Vault, reach: RestoreSources) -> list[Route]:
    """Every place of `tier` that a recovery of this worker's ranks might read from."""
    if tier is Tier.LOCAL:
        return [OwnMemory(vault)]
    if tier is Tier.REMOTE:
        return [RemoteObject(reach)]
    found: list[Route] = [Holder(reach, peer) for peer in directive.holders]
    if directive.parity is not None:
        found.append(Parity(reach, directive.parity, directive.procs_per_worker))
    return found


def _artifacts(found: RestorePlan | OutOfReach, rank: int) -> tuple[Artifact, ...]:
    if isinstance(found, OutOfReach):
        raise Gone(str(found))
    return found.artifacts(rank)


def _twice(read: Callable[[], T]) -> T:
    """What differs once may have been bent on the way."""
    try:
        return read()
    except SourceCorrupt:
        return read()
