"""The chunks of one artifact as they arrive, and what each is checked against: its tag, if it travels bare, or else its digest."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.artifact import Artifact
from tiercheck.protocol.manifest import Digests
from tiercheck_sidecar.digest import digest_chunk
from tiercheck_sidecar.exchange.frames import Altered, Wire
from tiercheck_sidecar.tags import Tagger, Tags


@dataclass(frozen=True)
class Chunks:
    """Thread-safe. Over one wire, or over several with the same other end."""

    digests: Digests
    tags: Tags | None
    tagger: Tagger | None

    @classmethod
    def over(cls, wire: Wire, artifact: Artifact, digests: Digests, tags: Tags | None) -> Chunks:
        """Those of `artifact`, as the other end of `wire` described it."""
        return cls(digests, tags, wire.tagger(artifact, tags.salt) if tags else None)

    def receive(self, wire: Wire, index: int, view: memoryview) -> bool:
        """Fill `view` with chunk `index`, whose header came. Returns whether it is the artifact's: what came bare is, by its tag.

        Raises WireBroken, Altered.
        """

        def fits(chunk: memoryview) -> bool:
            return self.tags is not None and self.tagger is not None and self.tagger.fits(self.tags, index, chunk)

        return wire.receive_into(view, fits) or digest_chunk(view) == self.digests.values[index]

    def take(self, wire: Wire, index: int, view: memoryview) -> bool:
        """The same where the sender is told what came damaged, and sends it again, not bare. Raises WireBroken."""
        try:
            return self.receive(wire, index, view)
        except Altered:
            return False
