"""What a holder of parity understands on a proven connection, beside the exchange's own messages."""

from __future__ import annotations

import time
from collections.abc import Callable

from tiercheck_sidecar.digest import CHUNK
from tiercheck_sidecar.exchange.frames import END, Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim
from tiercheck_sidecar.exchange.session import Handlers
from tiercheck_sidecar.exchange.transfers import Chunks
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.parity.block import BlockGone
from tiercheck_sidecar.parity.holder import ParityHolder

_STATUS_EVERY = 5.0
"""Seconds after which an unchanged status is said again, so that both ends know that the other lives."""


def serving(state: SidecarState, holder: ParityHolder) -> Callable[[Wire, CallerClaim], Handlers]:
    """For the exchange server: what else a proven connection understands."""
    return lambda wire, claim: ParitySession(state, holder, wire, claim).handlers


class ParitySession:
    """`handlers` are for one connection, and raise WireBroken."""

    def __init__(self, state: SidecarState, holder: ParityHolder, wire: Wire, claim: CallerClaim) -> None:
        self._state, self._holder, self._wire, self._claim = state, holder, wire, claim
        self._said: Say | None = None
        self.handlers: Handlers = {
            "fold": lambda ask: holder.offer(claim, ask),
            "chunks": self._chunks,
            "status": self._status,
        }

    def _chunks(self, ask: Ask) -> Say:
        self._must_be_current()
        artifact = ask.artifact
        block, rank = self._holder.block_for(self._claim, artifact), artifact.rank
        digests, tags = block.offered(rank) if block else (None, None)
        if block is None or digests is None:
            raise WireBroken("no such block is being made")
        chunks = Chunks.over(self._wire, artifact, digests, tags)
        try:
            while True:
                index, length = self._wire.receive_chunk_header()
                if index == END:
                    return Say("ok", missing=block.missing(rank))
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

    def _status(self, ask: Ask) -> Say:
        """Level-based: whatever was missed is in the next answer."""
        until = time.monotonic() + _STATUS_EVERY
        seen = -1
        while True:
            seen = self._state.wait(seen, max(0.0, until - time.monotonic()))
            said = self._holder.status(self._claim)
            if said != self._said or time.monotonic() >= until or self._state.stopping:
                self._said = said
                return said
