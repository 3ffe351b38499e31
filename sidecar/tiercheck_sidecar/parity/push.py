"""Bring one artifact to a parity holder: only the chunks that are not in its block yet, over several streams."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable

from tiercheck.protocol.artifact import Artifact
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.manifest import Digests
from tiercheck_sidecar.exchange.frames import Ask, Wire, WireBroken
from tiercheck_sidecar.exchange.streams import STREAMS, TooDamaged, run_all
from tiercheck_sidecar.parity.messages import ParityAsk, ParitySay
from tiercheck_sidecar.vault import Seal, Vault

_TRIES = 3
_CHUNKS_PER_STREAM = 2


def converse(wire: Wire) -> Wire:
    """Turn a proven connection to parity. Raises WireBroken."""
    wire.send(Ask("parity"))
    return wire


def push(vault: Vault, seal: Seal, wire: Wire, connect: Callable[[], Wire]) -> ParitySay:
    """Offer an own artifact on `wire` and send what is missing. Returns the holder's last word: "in", "have", "late",
    "busy" or "refused". Raises NotHeld, WireBroken, PeerRefused, TooDamaged.
    """
    artifact = Artifact(seal.rank, seal.version, seal.kind)
    with vault.pin(seal.rank, seal.version, Tier.LOCAL, seal.kind) as slot:
        for _ in range(_TRIES + 1):
            wire.send(ParityAsk("offer", artifact, seal.world_size, seal.digests))
            said = wire.receive(ParitySay)
            if said.state != "send":
                return said
            with open(slot.path, "rb") as file:
                sending = _Sending(artifact, seal.digests, file.fileno())
                sending.run(said.missing, wire, connect)
        raise TooDamaged(f"{len(said.missing)} chunks arrived damaged {_TRIES} times")


class _Sending:
    """The chunks of one artifact, from an open file."""

    def __init__(self, artifact: Artifact, digests: Digests, file: int) -> None:
        self._artifact, self._digests, self._file = artifact, digests, file
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(self, missing: tuple[int, ...], wire: Wire, connect: Callable[[], Wire]) -> None:
        for index in missing:
            self._waiting.put(index)
        with contextlib.ExitStack() as stack:
            extra = [
                stack.enter_context(contextlib.closing(connect()))
                for _ in range(min(STREAMS, len(missing) // _CHUNKS_PER_STREAM) - 1)
            ]
            run_all([lambda each=each: self._stream(each) for each in (*extra, wire)])  # type: ignore[misc]

    def _stream(self, wire: Wire) -> None:
        size, chunk = self._digests.size, self._digests.chunk
        wire.send(ParityAsk("chunks", self._artifact))
        with contextlib.suppress(queue.Empty):
            while True:
                index = self._waiting.get_nowait()
                wire.send_chunk(self._file, index, index * chunk, min(chunk, size - index * chunk))
        wire.send_end()
        if wire.receive(ParitySay).state != "ok":
            raise WireBroken("the chunks were not taken")
