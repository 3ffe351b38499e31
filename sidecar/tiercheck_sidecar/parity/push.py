"""Bring one artifact to a parity holder: only the chunks that are not in its block yet, over several streams."""

from __future__ import annotations

import functools

from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.frames import Ask, BytePace, Wire, WireBroken
from tiercheck_sidecar.exchange.line import Line
from tiercheck_sidecar.exchange.persistence import push_on
from tiercheck_sidecar.exchange.streams import Deal, TooDamaged, run_all, stream_count
from tiercheck_sidecar.parity.messages import ParityAsk, ParitySay
from tiercheck_sidecar.vault import Seal, Vault

_DAMAGES = 3
"""How often chunks may arrive damaged."""


def converse(wire: Wire) -> Wire:
    """Turn a proven connection to parity. Raises WireBroken."""
    wire.send(Ask("parity"))
    return wire


def push(vault: Vault, seal: Seal, line: Line, pace: BytePace | None = None) -> ParitySay:
    """Offer an own artifact on `line` (whose connections talk parity) and send what is missing. Returns the holder's last
    word: "in", "have", "late", "busy" or "refused". Raises NotHeld, OSError, WireBroken, PeerRefused, TooDamaged; then `line`
    is hung up.
    """
    return push_on(vault, seal, line, lambda file: _push(seal, line, file, pace))


def _push(seal: Seal, line: Line, file: int, pace: BytePace | None) -> ParitySay:
    artifact, digests = seal.artifact, seal.digests

    def stream(wire: Wire, deal: Deal, left: list[int], bare: bool) -> None:
        wire.send(ParityAsk("chunks", artifact))
        while (index := deal.take()) is not None:
            wire.send_chunk(file, index, index * digests.chunk, length_of(digests, index), pace, bare=bare)
        wire.send_end()
        said = wire.receive(ParitySay)
        if said.state != "ok":
            raise WireBroken("the chunks were not taken")
        left.append(len(said.missing))

    (wire,) = line.wires(1)
    for damages in range(_DAMAGES + 1):
        wire.send(ParityAsk("offer", artifact, seal.world_size, digests, tags=seal.tags))
        said = wire.receive(ParitySay)
        if said.state != "send":
            return said
        chunks = len(digests.values)
        deal = Deal(chunks, set(range(chunks)) - set(said.missing))
        wires = line.wires(stream_count(digests, len(deal)))
        left: list[int] = []
        run_all(
            [
                functools.partial(stream, each, deal, left, seal.tags is not None and not damages)
                for each in reversed(wires)
            ]
        )
        if 0 in left:  # the stream that ended last has seen all of them arrive
            return ParitySay("in")
    raise TooDamaged(f"{min(left)} chunks arrived damaged {_DAMAGES} times")
