"""Serves one authenticated connection: what the client offers, reads and asks.

Received chunks are kept, so that a broken stream costs only the chunks in transit. A transfer outlives the
connections that fill it: a client that offers the same artifact again learns which chunks are verified. A
chunk is received into its place and checked there, against its tag if it was sent bare, or else its digest.
Only one stream at a time may write to a place, and none once it is verified.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tiercheck.failpoints import failpoint
from tiercheck.plain_files import open_plain
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.version import Artifact, Digests
from tiercheck_sidecar.digest import chunk_view, digest_chunk, length_of
from tiercheck_sidecar.exchange.frames import (
    END,
    IDLE_TIMEOUT,
    IO_TIMEOUT,
    Altered,
    ListedArtifact,
    PeerRequest,
    PeerResponse,
    Wire,
    WireBroken,
)
from tiercheck_sidecar.exchange.handshake import CallerClaim, answer_ucx
from tiercheck_sidecar.model.fence import Fence
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.tags import ChunkTag, Tagger, Tags, is_well_described
from tiercheck_sidecar.vault import NoFreeSlot, NotHeld, Seal, SlotDraft, Vault

LINGER = 30.0
"""Seconds that an unfinished transfer waits for its sender; less if another artifact needs its slot."""


def refuse_offer(
    fence: Fence, directive: Directive | None, claim: CallerClaim, ask: PeerRequest
) -> PeerResponse | None:
    """Returns the answer to an offer that is not accepted; None if there is no objection here.

    "busy": it may be offered again later; "refused": it may not."""
    early = fence.refuse_future(claim.attempt, directive)
    if early or directive is None:
        return PeerResponse("busy", early)
    late = fence.refuse_past(claim.attempt, directive)
    if late:
        return PeerResponse("refused", late)
    if ask.version is None or ask.rank < 0 or not is_well_described(ask.digests, ask.tags):
        return PeerResponse("refused", "the offer is malformed")
    if ask.rank // directive.procs_per_worker != claim.worker:
        return PeerResponse("refused", f"rank {ask.rank} is not of worker {claim.worker}")
    if not directive.history.accepts(ask.version):
        return PeerResponse("refused", f"{ask.version} is not of the accepted history")
    return None


class Transfer:
    """An artifact that is being received, over any number of streams. Thread-safe."""

    def __init__(
        self, draft: SlotDraft, claim: CallerClaim, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.draft, self.claim, self.name = draft, claim, uuid.uuid4().hex
        self.verified: set[int] = set()
        self._clock = clock
        self._quiet = threading.Condition()
        self._wires: set[Wire] = set()
        self._over = False
        self._touched = clock()
        self._arriving: set[int] = set()

    @property
    def seal(self) -> Seal:
        return self.draft.seal

    def missing(self) -> tuple[int, ...]:
        """Returns the chunks that are not verified yet."""
        return tuple(sorted(set(range(len(self.seal.digests.values))) - self.verified))

    def receive(self, wire: Wire) -> tuple[int, ...]:
        """Receives chunks from `wire` until END; returns the damaged ones. Raises WireBroken, OSError."""
        chunks = Chunks.over(wire, self.seal.artifact, self.seal.digests, self.seal.tags)
        with self._stream(wire):
            return chunks.take_all(wire, self._target, lambda index, _: self.verified.add(index))

    @contextlib.contextmanager
    def _target(self, index: int) -> Iterator[memoryview]:
        """Yields where to receive a chunk. Raises WireBroken if another stream is receiving it.

        Its place in the slot belongs to one stream until it is verified, and is never written after that."""
        with self._quiet:
            if index in self._arriving:
                raise WireBroken("the chunk is being sent on another stream")
            known = index in self.verified
            if not known:
                self._arriving.add(index)
        try:
            place = chunk_view(self.draft.view, self.seal.digests, index)
            yield memoryview(bytearray(len(place))) if known else place
        finally:
            if not known:
                with self._quiet:
                    self._arriving.discard(index)

    def idle(self) -> float:
        """Returns the seconds since the last stream ended; 0 while there is one."""
        with self._quiet:
            return 0.0 if self._wires else self._clock() - self._touched

    def restart(self, seal: Seal) -> None:
        """Ends all streams after their sender has offered the same bytes again, perhaps with tags.

        The new name prevents earlier streams from joining late and occupying a chunk."""
        with self._quiet:
            self.name = uuid.uuid4().hex
            self._cut()
            self._touched = self._clock()
            self.draft.seal = seal

    def keep(self) -> None:
        """Seals the slot once every chunk is verified. Raises NotASlot, OSError, WireBroken if over."""
        self._end()
        self.draft.keep()

    def release(self) -> None:
        """Gives the slot back. Harmless after `keep`, and twice."""
        with contextlib.suppress(WireBroken):
            self._end()
        self.draft.release()

    @contextlib.contextmanager
    def _stream(self, wire: Wire) -> Iterator[None]:
        with self._quiet:
            if self._over:
                raise WireBroken("the transfer is over")
            self._wires.add(wire)
        try:
            yield
        finally:
            with self._quiet:
                self._wires.discard(wire)
                self._touched = self._clock()
                self._quiet.notify_all()

    def _end(self) -> None:
        """Ends the transfer: no stream writes into the slot after this."""
        with self._quiet:
            if self._over:
                raise WireBroken("the transfer is over")
            self._over = True
            self._cut()

    def _cut(self) -> None:
        for wire in self._wires:
            wire.cut()
        self._quiet.wait_for(lambda: not self._wires)


class Inbox:
    """Holds the transfers to this worker by name. Thread-safe."""

    def __init__(self, vault: Vault, clock: Callable[[], float] = time.monotonic) -> None:
        self._vault, self._clock = vault, clock
        self._lock = threading.Lock()
        self._transfers: dict[str, Transfer] = {}

    def open(self, claim: CallerClaim, seal: Seal) -> Transfer:
        """Returns the artifact's interrupted transfer, or a new one. Raises NoFreeSlot, OSError."""
        for transfer in self.of(claim.worker, lambda each: each.seal.artifact == seal.artifact):
            if (transfer.seal, transfer.claim.attempt) == (seal, claim.attempt):
                self._forget(transfer)
                transfer.restart(seal)
                return self._enter(transfer)
            self.release(transfer)
        try:
            draft = self._vault.draft(seal)
        except NoFreeSlot:
            # One without a stream gives way: its sender may never come back.
            rivals = self.of(
                claim.worker,
                lambda each: (each.seal.rank, each.seal.kind) == (seal.rank, seal.kind) and each.idle() > 0,
            )
            if not rivals:
                raise
            for transfer in rivals:
                self.release(transfer)
            draft = self._vault.draft(seal)
        return self._enter(Transfer(draft, claim, self._clock))

    def find(self, name: str, worker: int) -> Transfer | None:
        with self._lock:
            transfer = self._transfers.get(name)
        return transfer if transfer is not None and transfer.claim.worker == worker else None

    def keep(self, transfer: Transfer) -> None:
        """Removes a transfer and seals it. Raises what `Transfer.keep` raises."""
        self._forget(transfer)
        transfer.keep()

    def release(self, transfer: Transfer) -> None:
        self._forget(transfer)
        transfer.release()

    def sweep(self) -> None:
        """Releases transfers that have been idle for too long."""
        for transfer in self.of(None, lambda each: each.idle() > LINGER):
            self.release(transfer)

    def of(self, worker: int | None, wanted: Callable[[Transfer], bool] = lambda _: True) -> list[Transfer]:
        """Returns the `wanted` transfers from that worker, or from all."""
        with self._lock:
            known = list(self._transfers.values())
        return [each for each in known if worker in (None, each.claim.worker) and wanted(each)]

    def _enter(self, transfer: Transfer) -> Transfer:
        with self._lock:
            self._transfers[transfer.name] = transfer
        return transfer

    def _forget(self, transfer: Transfer) -> None:
        with self._lock:
            self._transfers.pop(transfer.name, None)


@dataclass(frozen=True)
class Chunks:
    """Receives an artifact's chunks over one or more wires to the same peer. Thread-safe."""

    digests: Digests
    tags: Tags | None
    tagger: Tagger | None

    @classmethod
    def over(cls, wire: Wire, artifact: Artifact, digests: Digests, tags: Tags | None) -> Chunks:
        """Returns the receiver for `artifact`, as the other end of `wire` described it."""
        return cls(digests, tags, wire.tagger(artifact, tags.salt) if tags else None)

    def receive(self, wire: Wire, index: int, view: memoryview) -> bool:
        """Fills `view` with chunk `index` after its header, and returns whether it is the artifact's.

        A bare chunk is checked by its tag, others by their digest. Raises WireBroken, Altered.
        """
        tags, tagger = self.tags, self.tagger
        sealed = tagger.running(index, tags.of(index)) if tags and tagger else ChunkTag()
        return wire.receive_into(view, sealed) or digest_chunk(view) == self.digests.values[index]

    def take_all(
        self,
        wire: Wire,
        place: Callable[[int], AbstractContextManager[memoryview]],
        took: Callable[[int, memoryview], None],
    ) -> tuple[int, ...]:
        """Receives chunks until END, each into its `place`, and calls `took` with each good one.

        Returns the damaged ones, which the sender then sends again, not bare. Raises WireBroken, OSError.
        """
        damaged: list[int] = []
        while True:
            index, length = wire.receive_chunk_header()
            if index == END:
                return tuple(damaged)
            if index >= len(self.digests.values) or length != length_of(self.digests, index):
                raise WireBroken("a chunk does not fit into the artifact")
            with place(index) as view:
                try:
                    good = self.receive(wire, index, view)
                except Altered:
                    good = False
                if good:
                    took(index, view)
                else:
                    damaged.append(index)


Handlers = Mapping[str, Callable[[PeerRequest], PeerResponse | None]]
"""Handlers by `op`, which return the answer, or None if it was sent. They raise WireBroken, OSError."""
HandlerFactory = Callable[[Wire, CallerClaim], Handlers]
"""A function that returns handlers of further messages for an authenticated connection."""


class Session:
    """Serves one connection. Used by one thread."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        inbox: Inbox,
        wire: Wire,
        claim: CallerClaim,
        *,
        more: HandlerFactory = lambda wire, claim: {},
    ) -> None:
        self._state, self._vault, self._inbox = state, vault, inbox
        self._wire, self._claim = wire, claim
        self._handlers: Handlers = {
            "read": self._read,
            "join": self._join,
            "offer": self._offer,
            "commit": self._commit,
            "corrupt": self._corrupt,
            "pulse": lambda ask: PeerResponse("ok", **state.newest_attempt._asdict()),
            "list": self._list,
            "ucx": lambda ask: answer_ucx(wire, ask.address),
            **more(wire, claim),
        }

    def serve(self) -> None:
        """Answers requests until the client disconnects or this sidecar ends. Raises WireBroken, OSError."""
        while not self._state.stopping:
            self._wire.patience(IDLE_TIMEOUT)
            ask = self._wire.receive(PeerRequest)
            self._wire.patience(IO_TIMEOUT)
            handle = self._handlers.get(ask.op)
            if handle is None:
                raise WireBroken(f"unknown message {ask.op!r}")
            said = handle(ask)
            if said is not None:
                self._wire.send(said)
            if ask.op == "commit":
                failpoint("after-ack")

    # Receiving a copy

    def _offer(self, ask: PeerRequest) -> PeerResponse:
        directive, worker = self._state.directive, self._claim.worker
        unwanted = refuse_offer(self._state.fence, directive, self._claim, ask)
        if unwanted is not None:
            return unwanted
        assert directive is not None
        assert ask.version is not None
        assert ask.digests is not None
        if worker not in {peer.worker for peer in directive.hosted}:
            return PeerResponse("refused", f"this worker does not keep copies for worker {worker}")
        seal = Seal(ask.rank, ask.version, ask.world_size, Tier.PEER, ask.digests, ask.kind, tags=ask.tags)
        if self._vault.find(ask.artifact, Tier.PEER) == seal:
            return PeerResponse("have")
        try:
            transfer = self._inbox.open(self._claim, seal)
        except (NoFreeSlot, OSError) as error:
            return PeerResponse("busy", str(error))
        return PeerResponse("send", transfer=transfer.name, missing=transfer.missing())

    def _join(self, ask: PeerRequest) -> PeerResponse:
        transfer = self._inbox.find(ask.transfer, self._claim.worker)
        if transfer is None:
            raise WireBroken("no such transfer")
        return PeerResponse("ok", damaged=transfer.receive(self._wire))

    def _commit(self, ask: PeerRequest) -> PeerResponse:
        transfer = self._inbox.find(ask.transfer, self._claim.worker)
        if transfer is None:
            return PeerResponse("refused", "nothing was offered, or it was waited for in vain")
        missing = transfer.missing()
        if missing:
            return PeerResponse("again", f"{len(missing)} chunks are missing")
        other = self._state.fence.refuse_other(self._claim.attempt, self._state.directive)
        if other:
            return PeerResponse("refused", other)
        try:
            self._inbox.keep(transfer)
        except (NotASlot, OSError) as error:
            return PeerResponse("refused", str(error))
        failpoint("before-ack")
        return PeerResponse("ok")

    # Reading what is held

    def _list(self, ask: PeerRequest) -> PeerResponse:
        listed = set()
        for seal in self._vault.held():
            if ask.share is None and seal.share is None and seal.rank == ask.rank:
                listed.add(ListedArtifact(seal.artifact, seal.digests.size))
            elif seal.share is not None and seal.share == ask.share:
                listed |= {
                    ListedArtifact(Artifact(rank, seal.version, seal.kind), digests.size)
                    for rank, digests in zip(seal.share.ranks, seal.members, strict=True)
                }
        return PeerResponse("listed", listed=tuple(sorted(listed, key=lambda each: each.artifact)))

    def _read(self, ask: PeerRequest) -> PeerResponse | None:
        artifact, wire = ask.artifact, self._wire
        try:
            with self._vault.pin(artifact, share=ask.share) as slot:
                seal = slot.seal
                assert seal is not None
                digests, bare = seal.digests, ask.bare and seal.tags is not None
                wire.send(
                    PeerResponse(
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
            return PeerResponse("missing", str(error))
        return None

    def _corrupt(self, ask: PeerRequest) -> PeerResponse:
        """Rereads what a client reports as bad; only the result counts."""
        reason = self._vault.evict_if_bad(self._state, ask.artifact, share=ask.share)
        return PeerResponse("bad", reason) if reason else PeerResponse("ok", "what is here is good")
