"""One proven connection, as the side that was called sees it: what the caller may offer, read and ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiercheck.failpoints import failpoint
from tiercheck.plain_files import open_plain
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.frames import (
    END,
    IDLE_TIMEOUT,
    IO_TIMEOUT,
    Ask,
    ListedArtifact,
    Say,
    Wire,
    WireBroken,
)
from tiercheck_sidecar.exchange.handshake import CallerClaim
from tiercheck_sidecar.exchange.transfers import Inbox, refuse_offer
from tiercheck_sidecar.exchange.ucx import answer_ucx
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import NoFreeSlot, NotHeld, Seal, Vault
from tiercheck_sidecar.vault.verification import evict_if_bad

Handlers = Mapping[str, Callable[[Ask], Say | None]]
"""What is done with each message, by its `op`: returns what is answered, if that is not said yet. Raises
WireBroken, OSError."""
Language = Callable[[Wire, CallerClaim], Handlers]
"""More messages that a proven connection understands."""


class Session:
    """Used by one thread."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        inbox: Inbox,
        wire: Wire,
        claim: CallerClaim,
        *,
        more: Language = lambda wire, claim: {},
    ) -> None:
        self._state, self._vault, self._inbox = state, vault, inbox
        self._wire, self._claim = wire, claim
        self._handlers: Handlers = {
            "read": self._read,
            "join": self._join,
            "offer": self._offer,
            "commit": self._commit,
            "corrupt": self._corrupt,
            "pulse": lambda ask: Say("ok", **state.newest_attempt._asdict()),
            "list": self._list,
            "ucx": lambda ask: answer_ucx(wire, ask.address),
            **more(wire, claim),
        }

    def serve(self) -> None:
        """Until the caller hangs up, or this sidecar ends. Raises WireBroken, OSError."""
        while not self._state.stopping:
            self._wire.patience(IDLE_TIMEOUT)
            ask = self._wire.receive(Ask)
            self._wire.patience(IO_TIMEOUT)
            handle = self._handlers.get(ask.op)
            if handle is None:
                raise WireBroken(f"unknown message {ask.op!r}")
            said = handle(ask)
            if said is not None:
                self._wire.send(said)
            if ask.op == "commit":
                failpoint("after-ack")

    # A copy is brought

    def _offer(self, ask: Ask) -> Say:
        directive, worker = self._state.directive, self._claim.worker
        unwanted = refuse_offer(self._state.fence, directive, self._claim, ask)
        if unwanted is not None:
            return unwanted
        assert directive is not None
        assert ask.version is not None
        assert ask.digests is not None
        if worker not in {peer.worker for peer in directive.hosted}:
            return Say("refused", f"this worker does not keep copies for worker {worker}")
        seal = Seal(ask.rank, ask.version, ask.world_size, Tier.PEER, ask.digests, ask.kind, tags=ask.tags)
        if self._vault.find(ask.artifact, Tier.PEER) == seal:
            return Say("have")
        try:
            transfer = self._inbox.open(self._claim, seal)
        except (NoFreeSlot, OSError) as error:
            return Say("busy", str(error))
        return Say("send", transfer=transfer.name, missing=transfer.missing())

    def _join(self, ask: Ask) -> Say:
        transfer = self._inbox.find(ask.transfer, self._claim.worker)
        if transfer is None:
            raise WireBroken("no such transfer")
        return Say("ok", damaged=transfer.receive(self._wire))

    def _commit(self, ask: Ask) -> Say:
        transfer = self._inbox.find(ask.transfer, self._claim.worker)
        if transfer is None:
            return Say("refused", "nothing was offered, or it was waited for in vain")
        missing = transfer.missing()
        if missing:
            return Say("again", f"{len(missing)} chunks are missing")
        other = self._state.fence.refuse_other(self._claim.attempt, self._state.directive)
        if other:
            return Say("refused", other)
        try:
            self._inbox.keep(transfer)
        except (NotASlot, OSError) as error:
            return Say("refused", str(error))
        failpoint("before-ack")
        return Say("ok")

    # What is here is read

    def _list(self, ask: Ask) -> Say:
        listed = set()
        for seal in self._vault.held():
            if ask.share is None and seal.share is None and seal.rank == ask.rank:
                listed.add(ListedArtifact(seal.artifact, seal.digests.size))
            elif seal.share is not None and seal.share == ask.share:
                listed |= {
                    ListedArtifact(Artifact(rank, seal.version, seal.kind), digests.size)
                    for rank, digests in zip(seal.share.ranks, seal.members, strict=True)
                }
        return Say("listed", listed=tuple(sorted(listed, key=lambda each: each.artifact)))

    def _read(self, ask: Ask) -> Say | None:
        artifact, wire = ask.artifact, self._wire
        try:
            with self._vault.pin(artifact, share=ask.share) as slot:
                seal = slot.seal
                assert seal is not None
                digests, bare = seal.digests, ask.bare and seal.tags is not None
                wire.send(
                    Say(
                        "found",
                        world_size=seal.world_size,
                        digests=digests,
                        tags=seal.tags,
                        members=seal.members,
                    )
                )
                with open(open_plain(slot.path), "rb") as file:
                    while (index := wire.receive_index()) != END:
                        if index >= len(digests.values):
                            raise WireBroken("no such chunk")
                        begin, length = index * digests.chunk, length_of(digests, index)
                        wire.send_chunk(file.fileno(), index, begin, length, bare=bare)
        except NotHeld as error:
            return Say("missing", str(error))
        return None

    def _corrupt(self, ask: Ask) -> Say:
        """Someone says that what is here is bad: believe our own eyes."""
        reason = evict_if_bad(self._state, self._vault, ask.artifact, share=ask.share)
        return Say("bad", reason) if reason else Say("ok", "what is here is good")
