"""The holders that an artifact can be fetched from, and what each says about its copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.transfers import Chunks
from tiercheck_sidecar.tags import is_well_described
from tiercheck_sidecar.vault import Seal


@dataclass(frozen=True)
class Dial:
    """A way to reach one holder."""

    worker: int
    connect: Callable[[], Wire]
    """Raises WireBroken, PeerRefused."""


@dataclass(frozen=True)
class BadCopy:
    """A holder whose copy does not match its own digests. It must not be asked again."""

    worker: int
    reason: str


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


class NotOffered(WireBroken):
    """It has no such artifact, or not any more."""


class Senseless(Exception):
    """What it says about its copy cannot be true."""


def open_copy(artifact: Artifact, dial: Dial, tier: Tier, bare: bool = False) -> Opening:
    """`bare`: whether its chunks may come so; they are received with `Opening.chunks` then.

    Raises WireBroken (NotOffered, if it has no such artifact), PeerRefused, Senseless.
    """
    wire = dial.connect()
    try:
        wire.send(Ask("read", artifact.rank, artifact.version, kind=artifact.kind, bare=bare))
        said = wire.receive(Say)
        if said.state != "found" or said.digests is None:
            raise NotOffered(said.message or "it has no such artifact")
        if not is_well_described(said.digests, said.tags):
            raise Senseless(f"the copy of worker {dial.worker} has senseless digests")
    except BaseException:
        wire.close()
        raise
    seal = Seal(
        artifact.rank, artifact.version, said.world_size, tier, said.digests, artifact.kind, tags=said.tags
    )
    return Opening(dial, wire, seal)
