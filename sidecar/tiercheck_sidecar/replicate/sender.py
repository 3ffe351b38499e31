"""Push: bring one sealed artifact to a holder, and believe only its acknowledgement.

A push that is broken off goes on where it stopped, as long as each connection brought something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from tiercheck.failpoints import failpoint
from tiercheck.plain_files import open_plain
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.version import Kind
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.streams import Deal, Line, StreamCrew, Take, stream_count
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.pacing import Portion
from tiercheck_sidecar.replicate.agenda import due
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.vault.stock import MemoryStock


def lacking(
    state: SidecarState, vault: Vault, kind: Kind, attempt: int, has: Mapping[int, MemoryStock]
) -> list[Seal]:
    """What a holder of that attempt, which `has` so much of each own rank, should get now."""
    with state.lock:
        verdict, directive = state.verdict, state.directive
        ready = state.restore.state is RestoreState.READY
    if verdict is None or not ready or directive is None or directive.attempt != attempt:
        return []
    owed = due(kind, vault.stocks(), has, verdict.copy, directive.history)
    found = (vault.find(each, Tier.LOCAL) for each in owed)
    return [seal for seal in found if seal is not None]


class Pushed(Enum):
    KEPT = "kept"
    """The holder has verified every chunk and holds the artifact."""
    BUSY = "busy"
    """It has no free slot now, or has not heard of this attempt yet: try again."""


class PushRefused(Exception):
    """The holder will not take it; the message is its sentence."""


def push(vault: Vault, seal: Seal, line: Line, pace: Portion | None = None) -> Pushed:
    """Send `seal`'s artifact. A stream that breaks is taken up again where it stopped. Whatever is raised,
    `line` is hung up.

    Raises NotHeld, OSError, WireBroken, PeerRefused, PushRefused, TooDamaged.
    """
    return push_on(vault, seal, line, lambda file: _push(seal, line, file, pace))


def _push(seal: Seal, line: Line, file: int, pace: Portion | None) -> Pushed:
    (wire,) = line.wires(1)
    failpoint("before-push")
    wire.send(
        Ask("offer", seal.rank, seal.version, seal.world_size, seal.digests, kind=seal.kind, tags=seal.tags)
    )
    said = wire.receive(Say)
    if said.state == "have":
        return Pushed.KEPT
    if said.state == "busy":
        return Pushed.BUSY
    if said.state != "send":
        raise PushRefused(said.message)
    chunks = len(seal.digests.values)
    deal = Deal(chunks, set(range(chunks)) - set(said.missing))
    sending = _Sending(said.transfer, seal, file, deal, pace)
    StreamCrew(line, deal, stream_count(seal.digests, len(deal)), sending.stream).run()
    while True:  # chunks that came back damaged after their stream had ended
        wire.send(Ask("commit", transfer=said.transfer))
        last = wire.receive(Say)
        if last.state == "ok":
            return Pushed.KEPT
        if last.state != "again":
            raise PushRefused(last.message)
        if not deal:  # it lost what it had acknowledged: offering again tells what it has
            raise WireBroken(last.message)
        sending.stream(wire, deal.take)


@dataclass(frozen=True)
class _Sending:
    transfer: str
    seal: Seal
    file: int
    deal: Deal
    pace: Portion | None

    def stream(self, wire: Wire, take: Take) -> None:
        """As many chunks as `wire` gets to carry. Raises WireBroken, PushRefused, TooDamaged."""
        digests, deal = self.seal.digests, self.deal
        index = take()
        while index is not None:
            wire.send(Ask("join", transfer=self.transfer))
            while index is not None:
                begin, length = index * digests.chunk, length_of(digests, index)
                bare = self.seal.tags is not None and not deal.is_again(index)
                wire.send_chunk(self.file, index, begin, length, self.pace, bare=bare)
                index = take()
            wire.send_end()
            said = wire.receive(Say)
            if said.state != "ok":
                raise PushRefused(said.message)
            for damaged in said.damaged:
                deal.ask_again(damaged)
            index = take()


T = TypeVar("T")

_MOST_BREAKS = 20


def push_on(vault: Vault, seal: Seal, line: Line, once: Callable[[int], T]) -> T:
    """What `once` says, which is given the open file of an own artifact and sends on `line` what is still
    missing.

    Raises NotHeld, OSError, WireBroken, and what `once` raises; then `line` is hung up.
    """
    try:
        with vault.pin(seal.artifact, Tier.LOCAL) as slot, open(open_plain(slot.path), "rb") as file:
            for _ in range(_MOST_BREAKS):
                hopeful, before = line.is_open, line.sent
                try:
                    return once(file.fileno())
                except WireBroken:
                    # A connection that lay idle may have been closed by the other end long ago: that proves
                    # nothing.
                    if not hopeful and line.sent == before:
                        raise
                    line.drop()
            raise WireBroken(f"the connection broke {_MOST_BREAKS} times")
    except BaseException:
        line.drop()
        raise
