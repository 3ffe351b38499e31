"""Keeps blocks of parity for others, and knows which are complete and which can be given up.

What is complete lies sealed in the vault. What is being made is known here only, so a holder that restarts
asks for it again.
"""

from __future__ import annotations

import logging
import threading

from tiercheck.protocol.artifacts.sizing import roomy
from tiercheck.protocol.directive import Directive, ParityGroup, Tier
from tiercheck.protocol.version import Artifact, Digests, Kind, Share, Version
from tiercheck_sidecar import isal
from tiercheck_sidecar.digest import CHUNK
from tiercheck_sidecar.exchange.frames import Ask, Say
from tiercheck_sidecar.exchange.handshake import CallerClaim
from tiercheck_sidecar.exchange.transfers import refuse_offer
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.parity.block import Block, BlockGone, is_expendable
from tiercheck_sidecar.parity.unfold import Scratch
from tiercheck_sidecar.vault import NoFreeSlot, Seal, Vault

log = logging.getLogger(__name__)

Key = tuple[Share, Version, Kind]

_OPENING = 10.0
"""Seconds that a member is kept waiting while the block is being begun for another one."""


class ParityHolder:
    """Thread-safe. `run` gives up what can no longer become complete, or need not."""

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

    def offer(self, claim: CallerClaim, ask: Ask) -> Say:
        """A member wants its artifact to be protected."""
        directive, digests = self._state.directive, ask.digests
        unwanted = refuse_offer(self._state.fence, directive, claim, ask)
        if unwanted is not None:
            return unwanted
        assert directive is not None
        assert digests is not None
        if digests.chunk != CHUNK:
            return Say("refused", "the offer is malformed")
        artifact = ask.artifact
        share = self._share(directive, claim.worker, artifact.rank)
        if share is None:
            return Say("refused", f"this worker keeps no parity for worker {claim.worker}")
        first = Artifact(share.ranks[0], artifact.version, artifact.kind)
        sealed = self._vault.find(first, share=share)
        if sealed is not None:
            if sealed.members[share.ranks.index(artifact.rank)] == digests:
                return Say("have")
            return Say("refused", f"{sealed} was made from other bytes")
        if is_expendable(artifact.version, artifact.kind, directive.history, self._state.verdict):
            return Say("late", f"{artifact.version} is overtaken")
        try:
            block = self._block(share, artifact, ask.world_size, digests)
            missing = block.enter(artifact.rank, digests, ask.tags)
        except isal.LibraryMissing as error:
            return Say("refused", str(error))
        except (NoFreeSlot, OSError) as error:
            return Say("busy", str(error))
        except BlockGone:
            return Say("busy", "the block is being replaced")
        if missing:
            return Say("send", missing=missing)
        self.settle(block)
        return Say("in")

    def block_for(self, claim: CallerClaim, artifact: Artifact) -> Block | None:
        """The block that an offered artifact of the caller's is folded into."""
        directive = self._state.directive
        if directive is None or artifact.rank // directive.procs_per_worker != claim.worker:
            return None
        share = self._share(directive, claim.worker, artifact.rank)
        with self._lock:
            return self._blocks.get((share, artifact.version, artifact.kind)) if share else None

    def settle(self, block: Block) -> None:
        """Seal the block if everything is in."""
        try:
            if not block.seal():
                return
        except OSError as error:
            log.warning("a parity block could not be sealed: %s", error)
        with self._lock:
            self._blocks = {key: each for key, each in self._blocks.items() if each is not block}
        self._state.bump()

    def status(self, claim: CallerClaim) -> Say:
        """What of the caller's artifacts is here."""
        directive = self._state.directive
        if directive is None or directive.attempt != claim.attempt:
            return Say("status")
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
        return Say(
            "status",
            complete=tuple(sorted((each for each in complete if each.rank in own), key=str)),
            folded=tuple(sorted((each for each in folded - complete if each.rank in own), key=str)),
        )

    def prune(self) -> None:
        """Give up blocks that nobody will need."""
        with self._state.lock:
            directive, verdict = self._state.directive, self._state.verdict
        if directive is None:
            return
        lanes = {share for group in directive.folded for share in self._shares(directive, group)}
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
        """The block to fold into, made anew if it cannot take this artifact. Raises NoFreeSlot,
        LibraryMissing, OSError."""
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
                # Not before there is room for one: what one member claims must not make all later blocks
                # impossible.
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

    def _share(self, directive: Directive, worker: int, rank: int) -> Share | None:
        """Which block the artifacts of a member's rank are folded into here."""
        for group in directive.folded:
            if worker in {member.worker for member in group.members}:
                shares = self._shares(directive, group)
                return next((share for share in shares if rank in share.ranks), None)
        return None

    def _shares(self, directive: Directive, group: ParityGroup) -> list[Share]:
        index = [holder.worker for holder in group.holders].index(directive.worker)
        return group.shares(index, directive.procs_per_worker)
