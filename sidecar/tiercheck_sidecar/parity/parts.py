"""The parts that a lost artifact is put together from, and what could be rebuilt of a rank.

Parts are what other members still hold, and parity blocks. Everybody in the
group is asked what there is, so that a restore plans with that and not with what was meant to be.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tiercheck.protocol.directive import ParityGroup, Peer
from tiercheck.protocol.version import Artifact, Digests, Share
from tiercheck_sidecar.bounded_calls import SourceFailed
from tiercheck_sidecar.digest import CHUNK, is_well_formed
from tiercheck_sidecar.exchange.fetch import holdings
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.sources import Dial

DialPeer = Callable[[Peer], Wire]
"""A proven connection to a worker's sidecar. Raises WireBroken, PeerRefused."""


class PartMissing(Exception):
    """The worker has no such part, or one of other bytes; the message is a sentence."""


@dataclass(frozen=True)
class RebuildPart:
    """Where one part lies. `artifact` is a member's, or names the version and kind of the block `share`."""

    peer: Peer
    artifact: Artifact
    share: Share | None = None

    def __str__(self) -> str:
        what = str(self.artifact) if self.share is None else f"parity block {self.share.index}"
        return f"{what} at worker {self.peer.worker}"

    @property
    def _named(self) -> Artifact:
        """A block is named by its first rank."""
        return self.artifact if self.share is None else replace(self.artifact, rank=self.share.ranks[0])

    def ask(self, wire: Wire) -> DescribedPart:
        """Begin to read it on `wire`; then chunks can be asked for by index. Raises PartMissing,
        WireBroken.
        """
        wire.send(Ask.about("read", self._named, share=self.share))
        said = wire.receive(Say)
        digests = said.digests
        if said.state != "found" or digests is None:
            raise PartMissing(f"{self}: {said.message or 'it is not there'}")
        if not is_well_formed(digests) or digests.chunk != CHUNK:
            raise PartMissing(f"{self}: it has senseless digests")
        return DescribedPart(digests, said.world_size, said.members)

    def find(self, dial: DialPeer) -> DescribedPart:
        """Raises PartMissing, also if its worker cannot be reached."""
        try:
            with contextlib.closing(dial(self.peer)) as wire:
                return self.ask(wire)
        except (WireBroken, PeerRefused) as error:
            raise PartMissing(f"{self}: {error}") from error

    def accuse(self, dial: DialPeer) -> str:
        """Tell its worker that its chunks do not match their digests. What it finds when it reads again;
        empty if all is well."""
        try:
            with contextlib.closing(dial(self.peer)) as wire:
                wire.send(Ask.about("corrupt", self._named, share=self.share))
                said = wire.receive(Say)
        except (WireBroken, PeerRefused) as error:
            return f"its chunks do not match their digests, and then {error}"
        return "" if said.state == "ok" else said.message or "its chunks do not match their digests"


@dataclass(frozen=True)
class DescribedPart:
    """What a worker says about its part. `members`: of a block, the digests of each member's artifact."""

    digests: Digests
    world_size: int
    members: tuple[Digests, ...] = ()

    def length(self, index: int) -> int:
        """Bytes of chunk `index`; 0 past the end."""
        return max(0, min(CHUNK, self.digests.size - index * CHUNK))


@contextlib.contextmanager
def open_part(part: RebuildPart, dial: DialPeer, expected: Digests) -> Iterator[Wire]:
    """A connection on which chunks can be asked for. Raises PartMissing, WireBroken, PeerRefused."""
    with contextlib.closing(dial(part.peer)) as wire:
        if part.ask(wire).digests != expected:
            raise PartMissing(f"{part}: it changed while it was being read")
        yield wire


_PARALLEL = 16


def obtainable(
    group: ParityGroup, rank: int, procs_per_worker: int, connect: Callable[[Peer], Wire]
) -> dict[Artifact, int]:
    """Artifacts of `rank`, with bytes, of which there are as many blocks as the group lacks artifacts of its
    members.

    Raises SourceFailed if nobody who could know answers.
    """
    ranks = group.coded_with(rank, procs_per_worker)
    others = [(peer, other) for peer, other in zip(group.members, ranks, strict=True) if other != rank]
    questions = [
        partial(_blocks, peer, Share(index, ranks), rank, connect) for index, peer in enumerate(group.holders)
    ]
    questions += [partial(_held, peer, other, rank, connect) for peer, other in others]
    failures: list[str] = []
    parts: Counter[Artifact] = Counter()
    sizes: dict[Artifact, int] = {}
    with ThreadPoolExecutor(min(_PARALLEL, len(questions)), thread_name_prefix="obtainable") as pool:
        for number, answer in enumerate([pool.submit(question) for question in questions]):
            try:
                found = answer.result()
            except SourceFailed as error:
                failures.append(str(error))
                continue
            parts.update(found.keys())
            if number < len(group.holders):
                sizes |= found
    if not sizes and failures:
        raise SourceFailed("; ".join(failures))
    return {artifact: size for artifact, size in sizes.items() if parts[artifact] >= len(ranks)}


def _blocks(peer: Peer, share: Share, rank: int, connect: Callable[[Peer], Wire]) -> dict[Artifact, int]:
    try:
        with contextlib.closing(connect(peer)) as wire:
            wire.send(Ask("list", share=share))
            listed = wire.receive(Say).listed
    except (WireBroken, PeerRefused) as error:
        raise SourceFailed(f"worker {peer.worker}: {error}") from error
    return {each.artifact: each.bytes for each in listed if each.artifact.rank == rank}


def _held(peer: Peer, other: int, rank: int, connect: Callable[[Peer], Wire]) -> dict[Artifact, int]:
    """Named after `rank`, whose artifact each of them would help to rebuild."""
    try:
        listed = holdings(Dial(peer.worker, lambda: connect(peer)), other)
    except (WireBroken, PeerRefused) as error:
        raise SourceFailed(f"worker {peer.worker}: {error}") from error
    return {Artifact(rank, each.artifact.version, each.artifact.kind): each.bytes for each in listed}
