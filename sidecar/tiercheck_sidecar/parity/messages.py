"""Defines what a parity group says on a connection, once `Ask("parity")` has turned it to that."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.manifest import Digests
from tiercheck.protocol.version import Artifact, Share
from tiercheck_sidecar.exchange.frames import ListedArtifact
from tiercheck_sidecar.vault.tags import Tags


@dataclass(frozen=True)
class ParityAsk:
    """From the side that connected. `op`:

    - "offer": fold this artifact of mine? - "chunks": chunks of it follow, until END; answered by what is
      still missing.
    - "status": answered when it differs from the last answer on this connection, or after a few seconds.
    - "read": have you the block `share` of `artifact`'s version and kind? Then its chunks are asked for by
      index, until END.
    - "list": of which artifacts have you the block `share`? - "corrupt": the chunks of that block do not
      match their digests.
    """

    op: str
    artifact: Artifact | None = None
    world_size: int = 0
    digests: Digests | None = None
    share: Share | None = None
    tags: Tags | None = None
    """With "offer": chunks may come bare."""


@dataclass(frozen=True)
class ParitySay:
    """The answer. `state`: "send" (`missing` chunks), "in" (folded; other members' are awaited), "have" (the
    block is complete), "late" (nobody will need it), "busy", "refused"; "status"; "found", "missing",
    "listed"; "ok", "bad".
    """

    state: str
    message: str = ""
    missing: tuple[int, ...] = ()
    complete: tuple[Artifact, ...] = ()
    """Artifacts of the asking worker whose blocks are sealed here."""
    folded: tuple[Artifact, ...] = ()
    """Artifacts of the asking worker that are wholly in blocks which still wait for other members."""
    world_size: int = 0
    digests: Digests | None = None
    members: tuple[Digests, ...] = ()
    """Of each member's artifact, in coding order."""
    listed: tuple[ListedArtifact, ...] = ()
    """With "listed": each member's artifacts that the blocks are made of."""
