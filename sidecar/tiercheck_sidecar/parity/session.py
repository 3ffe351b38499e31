"""The holder's end of a parity conversation: one proven connection, one thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from tiercheck.plain_files import open_plain
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact
from tiercheck_sidecar.digest import CHUNK
from tiercheck_sidecar.exchange.frames import END, IDLE_TIMEOUT, IO_TIMEOUT, ListedArtifact, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim
from tiercheck_sidecar.exchange.transfers import Chunks
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.parity.block import BlockGone
from tiercheck_sidecar.parity.holder import ParityHolder
from tiercheck_sidecar.parity.messages import ParityAsk, ParitySay
from tiercheck_sidecar.vault import NotHeld, Vault

_STATUS_EVERY = 5.0
"""Seconds after which an unchanged status is said again, so that both ends know that the other lives."""


def serving(state: SidecarState, vault: Vault, holder: ParityHolder) -> Callable[[Wire, CallerClaim], None]:
    """For the exchange server: what to do with a connection that was turned to parity."""
    return lambda wire, claim: ParitySession(state, vault, holder, wire, claim).serve()


class ParitySession:
    """`serve` ends when the caller hangs up, or this sidecar ends. Raises WireBroken."""

    def __init__(
        self, state: SidecarState, vault: Vault, holder: ParityHolder, wire: Wire, claim: CallerClaim
    ) -> None:
        self._state, self._vault, self._holder = state, vault, holder
        self._wire, self._claim = wire, claim
        self._said: ParitySay | None = None

    def serve(self) -> None:
        while not self._state.stopping:
            self._wire.patience(IDLE_TIMEOUT)
            ask = self._wire.receive(ParityAsk)
            self._wire.patience(IO_TIMEOUT)
            if ask.op == "offer":
                self._wire.send(self._holder.offer(self._claim, ask))
            elif ask.op == "chunks":
                self._wire.send(self._chunks(ask))
            elif ask.op == "status":
                self._wire.send(self._status())
            elif ask.op == "read":
                self._read(ask)
            elif ask.op == "list":
                self._wire.send(self._list(ask))
            elif ask.op == "corrupt":
                self._wire.send(self._corrupt(ask))
            else:
                raise WireBroken(f"unknown message {ask.op!r}")

    def _chunks(self, ask: ParityAsk) -> ParitySay:
        self._must_be_current()
        block = self._holder.block_for(self._claim, ask.artifact) if ask.artifact else None
        digests = block.digests_of(ask.artifact.rank) if block and ask.artifact else None
        if block is None or digests is None or ask.artifact is None:
            raise WireBroken("no such block is being made")
        rank = ask.artifact.rank
        chunks = Chunks.over(self._wire, ask.artifact, digests, block.tags_of(rank))
        try:
            while True:
                index, length = self._wire.receive_chunk_header()
                if index == END:
                    return ParitySay("ok", missing=block.missing(rank))
                if index >= len(digests.values) or length != min(CHUNK, digests.size - index * CHUNK):
                    raise WireBroken("a chunk does not fit into the artifact")
                with self._holder.scratch.buffer() as buffer:
                    chunk = buffer[:length]
                    good = chunks.take(self._wire, index, chunk)
                    self._must_be_current()
                    if good:
                        block.fold(rank, index, chunk)
        except BlockGone as error:
            raise WireBroken("the block was given up") from error
        finally:
            self._holder.settle(block)
            self._state.bump()  # what is folded now is news for the status

    def _must_be_current(self) -> None:
        """Raises WireBroken."""
        other = self._state.fence.refuse_other(self._claim.attempt, self._state.directive)
        if other:
            raise WireBroken(other)

    def _status(self) -> ParitySay:
        """Level-based: whatever was missed is in the next answer."""
        until = time.monotonic() + _STATUS_EVERY
        seen = -1
        while True:
            seen = self._state.wait(seen, max(0.0, until - time.monotonic()))
            said = self._holder.status(self._claim)
            if said != self._said or time.monotonic() >= until or self._state.stopping:
                self._said = said
                return said

    def _read(self, ask: ParityAsk) -> None:
        if ask.share is None or ask.artifact is None:
            raise WireBroken("which block?")
        try:
            with self._vault.pin_share(ask.share, ask.artifact.version, ask.artifact.kind) as slot:
                seal = slot.seal
                assert seal is not None
                self._wire.send(
                    ParitySay("found", world_size=seal.world_size, digests=seal.digests, members=seal.members)
                )
                with open(open_plain(slot.path), "rb") as file:
                    while (index := self._wire.receive_index()) != END:
                        if index >= len(seal.digests.values):
                            raise WireBroken("no such chunk")
                        begin = index * CHUNK
                        self._wire.send_chunk(
                            file.fileno(), index, begin, min(CHUNK, seal.digests.size - begin)
                        )
        except NotHeld as error:
            self._wire.send(ParitySay("missing", str(error)))

    def _list(self, ask: ParityAsk) -> ParitySay:
        blocks = [seal for seal in self._vault.held() if seal.share is not None and seal.share == ask.share]
        return ParitySay(
            "listed",
            listed=tuple(
                ListedArtifact(Artifact(rank, seal.version, seal.kind), digests.size)
                for seal in blocks
                for rank, digests in zip(seal.share.ranks if seal.share else (), seal.members, strict=True)
            ),
        )

    def _corrupt(self, ask: ParityAsk) -> ParitySay:
        """Someone says that a block here is bad: believe our own eyes."""
        if ask.share is None or ask.artifact is None:
            raise WireBroken("which block?")
        share, version, kind = ask.share, ask.artifact.version, ask.artifact.kind
        try:
            reason = self._vault.fault_share(share, version, kind)
        except (NotHeld, OSError) as error:
            reason = str(error)
        if not reason:
            return ParitySay("ok", "the block here is good")
        self._vault.free(lambda seal: (seal.share, seal.version, seal.kind) == (share, version, kind))
        self._state.quarantine(Quarantined(share.ranks[0], version, self._state.config.worker, reason, kind))
        return ParitySay("bad", reason)
