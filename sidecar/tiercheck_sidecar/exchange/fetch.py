"""Pull: copy an artifact from a holder's memory into a slot of our own, verifying each chunk as it lands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Version
from tiercheck_sidecar.digest import digest_chunk, is_well_formed, piece
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.streams import Deal, TooDamaged, run_all, stream_count
from tiercheck_sidecar.restore import SourceCorrupt, SourceFailed
from tiercheck_sidecar.vault import Draft, Seal, Vault

_AHEAD = 2
"""Chunks asked for before the previous one has arrived, so that the line is never idle."""


def fetch(vault: Vault, rank: int, version: Version, connect: Callable[[], Wire], name: str) -> Seal:
    """Copy and seal. `name` is how sentences call the holder. Raises SourceFailed, SourceCorrupt, NoFreeSlot, NotASlot."""
    try:
        return _fetch(vault, rank, version, connect, name)
    except (WireBroken, PeerRefused) as error:
        raise SourceFailed(str(error)) from error


def _fetch(vault: Vault, rank: int, version: Version, connect: Callable[[], Wire], name: str) -> Seal:
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(contextlib.closing(connect()))
        seal = _find(wire, rank, version, name)
        draft = vault.draft(seal)
        stack.callback(draft.discard)
        deal = Deal(len(seal.digests.values), tries=2)
        extra = [stack.enter_context(contextlib.closing(connect())) for _ in range(stream_count(seal.digests) - 1)]
        for each in extra:
            if _find(each, rank, version, name) != seal:
                raise SourceFailed("its copy changed while it was being read")
        try:
            run_all([_stream(each, draft, deal) for each in (*extra, wire)])
        except TooDamaged as error:
            raise _verdict(connect, rank, version, name, str(error)) from error
        draft.keep()
        return seal


def _find(wire: Wire, rank: int, version: Version, name: str) -> Seal:
    wire.send(Ask("read", rank, version))
    said = wire.receive(Say)
    if said.state != "found" or said.digests is None:
        raise SourceFailed(said.message or "it has no such artifact")
    if not is_well_formed(said.digests):
        raise SourceCorrupt(f"the copy of worker {name} has senseless digests")
    return Seal(rank, version, said.world_size, Tier.LOCAL, said.digests)


def _stream(wire: Wire, draft: Draft, deal: Deal) -> Callable[[], None]:
    digests = draft.seal.digests

    def run() -> None:
        asked = 0
        index: int | None = None
        while True:
            while asked < _AHEAD and (index := deal.take()) is not None:
                wire.send_index(index)
                asked += 1
            if asked == 0:
                return
            got, length = wire.receive_chunk_header()
            asked -= 1
            if got >= len(digests.values) or length != len(piece(draft.view, digests, got)):
                raise WireBroken("it sent a chunk that was not asked for")
            target = piece(draft.view, digests, got)
            wire.receive_into(target)
            if digest_chunk(target) != digests.values[got]:
                deal.again(got)

    return run


def _verdict(connect: Callable[[], Wire], rank: int, version: Version, name: str, reason: str) -> SourceFailed:
    """Tell the holder, which reads its copy again: is the copy bad, or the line?"""
    with contextlib.suppress(WireBroken, PeerRefused), contextlib.closing(connect()) as wire:
        wire.send(Ask("corrupt", rank, version))
        if wire.receive(Say).state == "ok":
            return SourceFailed(f"{reason}, although its copy is good")
    return SourceCorrupt(f"the copy at worker {name} is bad: {reason}")
