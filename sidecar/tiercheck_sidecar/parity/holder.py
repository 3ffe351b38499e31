"""Keeps blocks of parity for other workers, and reports which are complete.

Complete blocks are sealed in the vault. Incomplete ones are known here only, so members send theirs again
when the holder restarts. Members' chunks are folded in as they arrive, each once: a second time would remove
it again. So the state is not what was sent but what is in: one set of missing chunks per member, which
outlives every connection. A rule, not a timeout, decides when an incomplete block is given up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator

from tiercheck.protocol.artifacts.sizing import roomy
from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.version import Artifact, Digests, History, Kind, Share, Version
from tiercheck_sidecar import coding
from tiercheck_sidecar.digest import CHUNK, chunk_view, digest_chunk, length_of
from tiercheck_sidecar.exchange.frames import PeerRequest, PeerResponse, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim
from tiercheck_sidecar.exchange.session import Chunks, Handlers, refuse_offer
from tiercheck_sidecar.exchange.streams import Scratch
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.tags import Tags
from tiercheck_sidecar.vault import NoFreeSlot, Seal, SlotDraft, Vault
from tiercheck_sidecar.versions.reclaim import hosted_lanes

_STRIPES = 64


class BlockGone(Exception):
    """The block was given up while its chunks arrived; the artifact must be offered again."""


class Block:
    """An incomplete block. Thread-safe: chunks at different places are folded at the same time."""

    def __init__(self, share: Share, version: Version, kind: Kind, world_size: int, draft: SlotDraft) -> None:
        self.share, self.version, self.kind, self.world_size = share, version, kind, world_size
        self._draft = draft
        self._coefficients = dict(zip(share.ranks, coding.row(len(share.ranks), share.index), strict=True))
        self._digests: dict[int, Digests] = {}
        self._tags: dict[int, Tags | None] = {}
        self._missing: dict[int, set[int]] = {}
        self._folded: Counter[int] = Counter()
        self._values: dict[int, str] = {}
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._idle = threading.Condition()
        self._folding = 0
        self._over = self._sealing = False

    def takes(self, rank: int, digests: Digests) -> bool:
        """Returns whether a member's artifact fits in, and no other of that member is in."""
        with self._idle:
            gone = self._over and not self._sealing
            fits = digests.size <= self._draft.seal.digests.size
            return not gone and fits and self._digests.get(rank, digests) == digests

    def enter(self, rank: int, digests: Digests, tags: Tags | None = None) -> tuple[int, ...]:
        """Registers a member's artifact. Returns the chunks still to be sent. Raises BlockGone.

        That is also raised if it came before with other digests: the block's content is then unknown."""
        with self._idle:
            if self._digests.setdefault(rank, digests) != digests or (self._over and not self._sealing):
                raise BlockGone
            self._tags[rank] = tags
            return tuple(sorted(self._missing.setdefault(rank, set(range(len(digests.values))))))

    def artifacts(self) -> tuple[Artifact, ...]:
        """Returns the artifacts that are completely folded in."""
        with self._idle:
            ranks = [rank for rank, missing in self._missing.items() if not missing]
        return tuple(Artifact(rank, self.version, self.kind) for rank in ranks)

    def offered(self, rank: int) -> tuple[Digests | None, Tags | None]:
        """Returns a member's digests and tags; None if it was not offered yet, or without tags."""
        return self._digests.get(rank), self._tags.get(rank)

    def fold(self, rank: int, index: int, chunk: memoryview) -> None:
        """Folds a verified chunk in, unless it is in. Raises BlockGone."""
        with self._idle:
            if self._over:
                raise BlockGone
            if index not in self._missing[rank]:
                return
            self._missing[rank].discard(index)
            self._folding += 1
        done = False
        try:
            begin = index * CHUNK
            with self._stripes[index % _STRIPES]:
                coding.fold(self._draft.view[begin : begin + len(chunk)], self._coefficients[rank], chunk)
            done = True
            if self._count(index):
                self._digest(index)  # while it is in the cache
        finally:
            with self._idle:
                self._folding -= 1
                self._over = self._over or not done  # the block's content is unknown
                self._idle.notify_all()

    def seal(self) -> bool:
        """Seals the block if complete; True only to the call that did. Raises OSError; then it is gone."""
        with self._idle:
            ready = set(self._missing) == set(self.share.ranks) and not any(self._missing.values())
            if self._over or self._folding or not ready:
                return False
            self._over = self._sealing = True
        members = tuple(self._digests[rank] for rank in self.share.ranks)
        size = max(each.size for each in members)
        for index in range(-(-size // CHUNK)):
            self._digest(index, size)
        digests = Digests(size, CHUNK, tuple(self._values[index] for index in sorted(self._values)))
        rank = self.share.ranks[0]
        seal = Seal(rank, self.version, self.world_size, Tier.PEER, digests, self.kind, self.share, members)
        try:
            self._draft.keep(seal)
        finally:
            self._draft.release()
        return True

    def release(self) -> None:
        """Gives the block up: nothing is folded into it after this."""
        with self._idle:
            self._over = True
            self._idle.wait_for(lambda: self._folding == 0)
        self._draft.release()

    def _count(self, index: int) -> bool:
        """Counts a folded chunk. Returns whether it is the last for its place, if all sizes are known."""
        with self._idle:
            self._folded[index] += 1
            if set(self._digests) != set(self.share.ranks):
                return False
            return self._folded[index] == sum(index < len(each.values) for each in self._digests.values())

    def _digest(self, index: int, size: int | None = None) -> None:
        if index not in self._values:
            whole = max(each.size for each in self._digests.values()) if size is None else size
            self._values[index] = digest_chunk(chunk_view(self._draft.view, Digests(whole, CHUNK, ()), index))


def is_expendable(version: Version, kind: Kind, history: History, verdict: TierVerdict | None) -> bool:
    """Returns whether an incomplete block of `version` can be given up in attempt `history.attempt`.

    One snapshot is copied at a time, so one older than the named one will get no more chunks. The named one
    is needed even when deltas have raised the floor past it: later versions will be rebuilt from it. Any
    other that is older than the floor will not be restored, or its block would be complete.
    """
    if not history.accepts(version):
        return True
    if verdict is None or verdict.attempt != history.attempt:
        return False
    if kind is Kind.SNAPSHOT:
        if version == verdict.copy:
            return False
        if version in verdict.abandoned or (verdict.copy is not None and version < verdict.copy):
            return True
    return verdict.floor is not None and version < verdict.floor


log = logging.getLogger(__name__)

Key = tuple[Share, Version, Kind]

_OPENING = 10.0
"""Seconds that a member waits while the block is being created for another one."""


class ParityHolder:
    """Folds members' artifacts into blocks, and gives up blocks that are not needed. Thread-safe."""

    def __init__(self, state: SidecarState, vault: Vault) -> None:
        self._state, self._vault = state, vault
        self.scratch = Scratch()
        self._lock = threading.Lock()
        self._opened = threading.Condition(self._lock)
        self._blocks: dict[Key, Block] = {}
        self._opening: set[Key] = set()
        self._largest: dict[tuple[Share, Kind], int] = {}

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            self.prune()

    def offer(self, claim: CallerClaim, ask: PeerRequest) -> PeerResponse:
        """Answers the offer of a member's artifact for parity."""
        directive, digests = self._state.directive, ask.digests
        unwanted = refuse_offer(self._state.fence, directive, claim, ask)
        if unwanted is not None:
            return unwanted
        assert directive is not None
        assert digests is not None
        if digests.chunk != CHUNK:
            return PeerResponse("refused", "the offer is malformed")
        artifact = ask.artifact
        share = _share(directive, artifact.rank)
        if share is None:
            return PeerResponse("refused", f"this worker keeps no parity for worker {claim.worker}")
        first = Artifact(share.ranks[0], artifact.version, artifact.kind)
        sealed = self._vault.find(first, share=share)
        if sealed is not None:
            if sealed.members[share.ranks.index(artifact.rank)] == digests:
                return PeerResponse("have")
            return PeerResponse("refused", f"{sealed} was made from other bytes")
        if is_expendable(artifact.version, artifact.kind, directive.history, self._state.verdict):
            return PeerResponse("late", f"{artifact.version} is overtaken")
        try:
            block = self._block(share, artifact, ask.world_size, digests)
            missing = block.enter(artifact.rank, digests, ask.tags)
        except coding.LibraryMissing as error:
            return PeerResponse("refused", str(error))
        except (NoFreeSlot, OSError) as error:
            return PeerResponse("busy", str(error))
        except BlockGone:
            return PeerResponse("busy", "the block is being replaced")
        if missing:
            return PeerResponse("send", missing=missing)
        self.settle(block)
        return PeerResponse("in")

    def block_for(self, claim: CallerClaim, artifact: Artifact) -> Block | None:
        """Returns the block that an offered artifact of the client is folded into."""
        directive = self._state.directive
        if directive is None or artifact.rank // directive.procs_per_worker != claim.worker:
            return None
        share = _share(directive, artifact.rank)
        with self._lock:
            return self._blocks.get((share, artifact.version, artifact.kind)) if share else None

    def settle(self, block: Block) -> None:
        """Seals the block if everything is in."""
        try:
            if not block.seal():
                return
        except OSError as error:
            log.warning("a parity block could not be sealed: %s", error)
        with self._lock:
            self._blocks = {key: each for key, each in self._blocks.items() if each is not block}
        self._state.bump()

    def status(self, claim: CallerClaim) -> PeerResponse:
        """Returns which artifacts of the client are in complete blocks, or folded into others."""
        directive = self._state.directive
        if directive is None or directive.attempt != claim.attempt:
            return PeerResponse("status")
        procs = directive.procs_per_worker
        own = range(claim.worker * procs, (claim.worker + 1) * procs)
        with self._lock:
            folded = {artifact for block in self._blocks.values() for artifact in block.artifacts()}
        complete = {
            Artifact(rank, seal.version, seal.kind)
            for seal in self._vault.held()
            if seal.share is not None
            for rank in seal.share.ranks
        }
        return PeerResponse(
            "status",
            complete=tuple(sorted((each for each in complete if each.rank in own), key=str)),
            folded=tuple(sorted((each for each in folded - complete if each.rank in own), key=str)),
        )

    def prune(self) -> None:
        """Gives up incomplete blocks that will not be needed."""
        with self._state.lock:
            directive, verdict = self._state.directive, self._state.verdict
        if directive is None:
            return
        lanes = hosted_lanes(directive)
        with self._lock:
            self._largest = {lane: size for lane, size in self._largest.items() if lane[0] in lanes}
            doomed = [
                key
                for key in self._blocks
                if key[0] not in lanes or is_expendable(key[1], key[2], directive.history, verdict)
            ]
        for key in doomed:
            self._give_up(key)

    # Inside

    def _block(self, share: Share, artifact: Artifact, world_size: int, digests: Digests) -> Block:
        """Returns a block for this artifact, new if needed. Raises NoFreeSlot, LibraryMissing, OSError."""
        key = (share, artifact.version, artifact.kind)
        with self._lock:
            size = max(self._largest.get((share, artifact.kind), 0), roomy(digests.size))
            if not self._opened.wait_for(lambda: key not in self._opening, _OPENING):
                raise NoFreeSlot("another member has just begun the block")
            block = self._blocks.get(key)
            if block is not None and block.takes(artifact.rank, digests):
                return block
            self._opening.add(key)
        try:  # not under the lock: a new slot is filled with zeros first
            self._give_up(key)
            self.prune()
            block = self._open(key, world_size, size)
            with self._lock:
                self._blocks[key] = block
                # Only once there is room for one: one member's claim must not prevent all later blocks.
                self._largest[share, artifact.kind] = max(self._largest.get((share, artifact.kind), 0), size)
            return block
        finally:
            with self._lock:
                self._opening.discard(key)
                self._opened.notify_all()

    def _open(self, key: Key, world_size: int, size: int) -> Block:
        share, version, kind = key
        digests = Digests(size, CHUNK, ())
        draft = self._vault.draft(Seal(share.ranks[0], version, world_size, Tier.PEER, digests, kind, share))
        try:
            return Block(share, version, kind, world_size, draft)
        except BaseException:
            draft.release()
            raise

    def _give_up(self, key: Key) -> None:
        with self._lock:
            block = self._blocks.pop(key, None)
        if block is not None:
            block.release()
            self._state.bump()


def _share(directive: Directive, rank: int) -> Share | None:
    """Returns the share of the block that artifacts of a member's rank are folded into here."""
    return next((share for share in hosted_lanes(directive) if rank in share.ranks), None)


_STATUS_EVERY = 5.0
"""Seconds after which an unchanged status is sent again, so that each end detects a dead peer."""


class ParitySession:
    """Serves parity requests of one connection. Its `handlers` raise WireBroken."""

    def __init__(self, state: SidecarState, holder: ParityHolder, wire: Wire, claim: CallerClaim) -> None:
        self._state, self._holder, self._wire, self._claim = state, holder, wire, claim
        self._said: PeerResponse | None = None
        self.handlers: Handlers = {
            "fold": lambda ask: holder.offer(claim, ask),
            "chunks": self._chunks,
            "status": self._status,
        }

    def _chunks(self, ask: PeerRequest) -> PeerResponse:
        self._must_be_current()
        artifact = ask.artifact
        block, rank = self._holder.block_for(self._claim, artifact), artifact.rank
        digests, tags = block.offered(rank) if block else (None, None)
        if block is None or digests is None:
            raise WireBroken("no such block is being made")
        chunks = Chunks.over(self._wire, artifact, digests, tags)

        def fold(index: int, chunk: memoryview) -> None:
            self._must_be_current()
            block.fold(rank, index, chunk)

        @contextlib.contextmanager
        def place(index: int) -> Iterator[memoryview]:
            with self._holder.scratch.buffer() as buffer:
                yield buffer[: length_of(digests, index)]

        try:
            return PeerResponse("ok", damaged=chunks.take_all(self._wire, place, fold))
        except BlockGone as error:
            raise WireBroken("the block was given up") from error
        finally:
            self._holder.settle(block)
            self._state.bump()  # the status may have changed

    def _must_be_current(self) -> None:
        """Raises WireBroken if the client is of another attempt."""
        other = self._state.fence.refuse_other(self._claim.attempt, self._state.directive)
        if other:
            raise WireBroken(other)

    def _status(self, ask: PeerRequest) -> PeerResponse:
        """Waits for a change or a timeout. Each answer has the whole state, so no change is missed."""
        until = time.monotonic() + _STATUS_EVERY
        seen = -1
        while True:
            seen = self._state.wait(seen, max(0.0, until - time.monotonic()))
            said = self._holder.status(self._claim)
            if said != self._said or time.monotonic() >= until or self._state.stopping:
                self._said = said
                return said
