"""One proven connection, as the side that was called sees it: what the caller may offer, read and ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiercheck.failpoints import failpoint
from tiercheck.plain_files import open_plain
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Quarantined
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
    bitmap,
)
from tiercheck_sidecar.exchange.handshake import CallerClaim
from tiercheck_sidecar.exchange.network.ucx import answer_ucx
from tiercheck_sidecar.exchange.offers import refuse_offer
from tiercheck_sidecar.exchange.transfers import Inbox
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import NoFreeSlot, NotHeld, Seal, Vault

Language = Callable[[Wire, CallerClaim], None]
"""Serves a proven connection until the caller hangs up. Raises WireBroken, OSError."""


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
        languages: Mapping[str, Language] | None = None,
    ) -> None:
        self._state, self._vault, self._inbox = state, vault, inbox
        self._languages = languages or {}
        self._wire, self._claim = wire, claim

    def serve(self) -> None:
        """Until the caller hangs up, or this sidecar ends. Raises WireBroken, OSError."""
        while not self._state.stopping:
            self._wire.patience(IDLE_TIMEOUT)
            ask = self._wire.receive(Ask)
            self._wire.patience(IO_TIMEOUT)
            if ask.op == "read":
                self._read(ask)
            elif ask.op == "join":
                self._join(ask)
            elif ask.op == "offer":
                self._wire.send(self._offer(ask))
            elif ask.op == "commit":
                self._wire.send(self._commit(ask))
                failpoint("after-ack")
            elif ask.op == "corrupt":
                self._wire.send(self._corrupt(ask.artifact))
            elif ask.op == "pulse":
                self._wire.send(Say("ok", **self._state.newest_attempt._asdict()))
            elif ask.op == "list":
                self._wire.send(self._list(ask.rank))
            elif ask.op == "ucx":
                answer_ucx(self._wire, ask.address)
            elif ask.op in self._languages:
                return self._languages[ask.op](self._wire, self._claim)
            else:
                raise WireBroken(f"unknown message {ask.op!r}")

    # A copy is brought

    def _offer(self, ask: Ask) -> Say:
        directive, worker = self._state.directive, self._claim.worker
        named = None if ask.version is None or ask.rank < 0 else ask.artifact
        unwanted = refuse_offer(
            self._state.fence, directive, self._claim, named, digests=ask.digests, tags=ask.tags
        )
        if unwanted:
            return Say(*unwanted)
        assert directive is not None
        assert ask.version is not None
        assert ask.digests is not None
        if worker not in {peer.worker for peer in directive.hosted}:
            return Say("refused", f"this worker does not keep copies for worker {worker}")
        seal = Seal(ask.rank, ask.version, ask.world_size, Tier.PEER, ask.digests, ask.kind, tags=ask.tags)
        if self._vault.find(ask.rank, ask.version, Tier.PEER, ask.kind) == seal:
            return Say("have")
        try:
            transfer = self._inbox.open(self._claim, seal)
        except (NoFreeSlot, OSError) as error:
            return Say("busy", str(error))
        return Say("send", transfer=transfer.name, verified=bitmap(transfer.verified))

    def _join(self, ask: Ask) -> None:
        transfer = self._inbox.find(ask.transfer, self._claim.worker)
        if transfer is None:
            raise WireBroken("no such transfer")
        self._wire.send(Say("ok", damaged=transfer.receive(self._wire)))

    def _commit(self, ask: Ask) -> Say:
        transfer = self._inbox.find(ask.transfer, self._claim.worker)
        if transfer is None:
            return Say("refused", "nothing was offered, or it was waited for in vain")
        if not transfer.complete:
            missing = len(transfer.seal.digests.values) - len(transfer.verified)
            return Say("again", f"{missing} chunks are missing", verified=bitmap(transfer.verified))
        other = self._state.fence.refuse_other(self._claim.attempt, self._state.directive)
        if other:
            return Say("refused", other)
        try:
            self._inbox.keep(transfer)
        except (NotASlot, OSError) as error:
            return Say("refused", str(error))
        failpoint("before-ack")
        return Say("ok")

    # A copy is read

    def _list(self, rank: int) -> Say:
        seals = [seal for seal in self._vault.held() if seal.rank == rank and seal.share is None]
        listed = {
            ListedArtifact(Artifact(rank, seal.version, seal.kind), seal.digests.size) for seal in seals
        }
        return Say("listed", listed=tuple(sorted(listed, key=lambda each: each.artifact)))

    def _read(self, ask: Ask) -> None:
        artifact = ask.artifact
        try:
            with self._vault.pin(artifact.rank, artifact.version, kind=artifact.kind) as slot:
                seal = slot.seal
                assert seal is not None
                self._wire.send(
                    Say("found", world_size=seal.world_size, digests=seal.digests, tags=seal.tags)
                )
                with open(open_plain(slot.path), "rb") as file:
                    self._send_chunks(file.fileno(), seal, ask.bare and seal.tags is not None)
        except NotHeld as error:
            self._wire.send(Say("missing", str(error)))

    def _send_chunks(self, file: int, seal: Seal, bare: bool) -> None:
        digests = seal.digests
        while (index := self._wire.receive_index()) != END:
            if index >= len(digests.values):
                raise WireBroken("no such chunk")
            self._wire.send_chunk(file, index, index * digests.chunk, length_of(digests, index), bare=bare)

    def _corrupt(self, artifact: Artifact) -> Say:
        """Someone says that a copy here is bad: believe our own eyes."""
        rank, version, kind = artifact.rank, artifact.version, artifact.kind
        try:
            reason = self._vault.fault(rank, version, kind=kind)
        except (NotHeld, OSError) as error:
            reason = str(error)
        if not reason:
            return Say("ok", "the copy here is good")
        self._vault.free(
            lambda seal: seal.share is None and (seal.rank, seal.version, seal.kind) == (rank, version, kind)
        )
        self._state.quarantine(Quarantined(rank, version, self._state.config.worker, reason, kind))
        return Say("bad", reason)
