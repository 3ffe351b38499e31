"""Push: bring one sealed artifact to a holder, and believe only its acknowledgement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import Enum

from tiercheck.protocol.directive import Tier
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire
from tiercheck_sidecar.exchange.streams import Deal, run_all, stream_count
from tiercheck_sidecar.vault import Seal, Vault


class Pushed(Enum):
    KEPT = "kept"
    """The holder has verified every chunk and holds the artifact."""
    BUSY = "busy"
    """It has no free slot now, or has not heard of this attempt yet: try again."""


class PushRefused(Exception):
    """The holder will not take it; the message is its sentence."""


def push(vault: Vault, seal: Seal, connect: Callable[[], Wire]) -> Pushed:
    """Send `seal`'s artifact. Raises NotHeld, WireBroken, PeerRefused, PushRefused, TooDamaged."""
    with contextlib.ExitStack() as stack:
        slot = stack.enter_context(vault.pin(seal.rank, seal.version, Tier.LOCAL))
        wire = connect()
        stack.callback(wire.close)
        wire.send(Ask("offer", seal.rank, seal.version, seal.world_size, seal.digests))
        said = wire.receive(Say)
        if said.state == "have":
            return Pushed.KEPT
        if said.state == "busy":
            return Pushed.BUSY
        if said.state != "send":
            raise PushRefused(said.message)
        file = stack.enter_context(open(slot.path, "rb"))
        deal = Deal(len(seal.digests.values))
        extra = [stack.enter_context(contextlib.closing(connect())) for _ in range(stream_count(seal.digests) - 1)]
        run_all([_stream(each, said.transfer, seal, file.fileno(), deal) for each in (*extra, wire)])
        while True:  # chunks that came back damaged after their stream had ended
            wire.send(Ask("commit", transfer=said.transfer))
            last = wire.receive(Say)
            if last.state == "ok":
                return Pushed.KEPT
            if last.state != "again":
                raise PushRefused(last.message)
            _stream(wire, said.transfer, seal, file.fileno(), deal)()


def _stream(wire: Wire, transfer: str, seal: Seal, file: int, deal: Deal) -> Callable[[], None]:
    size, chunk = seal.digests.size, seal.digests.chunk

    def run() -> None:
        index = deal.take()
        while index is not None:
            wire.send(Ask("join", transfer=transfer))
            while index is not None:
                wire.send_chunk(file, index, index * chunk, min(chunk, size - index * chunk))
                index = deal.take()
            wire.send_end()
            said = wire.receive(Say)
            if said.state != "ok":
                raise PushRefused(said.message)
            for damaged in said.damaged:
                deal.again(damaged)
            index = deal.take()

    return run
