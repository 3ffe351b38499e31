"""A block that is being made: members' chunks are folded in as they come, each once.

Folding a chunk twice would take it out again, so what counts is not what was sent but what is in: one set of
missing chunks per member, which outlives every connection.

A rule says when a block that is still being made is given up, so that memory is bounded without a clock.
"""

from __future__ import annotations

import threading
from collections import Counter

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Digests, History, Kind, Share, Version
from tiercheck_sidecar.digest import CHUNK, chunk_view, digest_chunk
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.parity import coding
from tiercheck_sidecar.tags import Tags
from tiercheck_sidecar.vault import Seal, SlotDraft

_STRIPES = 64


class BlockGone(Exception):
    """The block was given up while its chunks arrived. Offer again."""


class Block:
    """Thread-safe. Chunks of different members and of different places are folded at the same time."""

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
        """Whether this artifact of a member can be folded in: it fits, and nothing else of that member is
        in.
        """
        with self._idle:
            gone = self._over and not self._sealing
            fits = digests.size <= self._draft.seal.digests.size
            return not gone and fits and self._digests.get(rank, digests) == digests

    def enter(self, rank: int, digests: Digests, tags: Tags | None = None) -> tuple[int, ...]:
        """A member's artifact comes. Returns the chunks still to be sent. Raises BlockGone, also if it came
        before with other digests: then nobody can say what is in the block.
        """
        with self._idle:
            if self._digests.setdefault(rank, digests) != digests or (self._over and not self._sealing):
                raise BlockGone
            self._tags[rank] = tags
            return tuple(sorted(self._missing.setdefault(rank, set(range(len(digests.values))))))

    def artifacts(self) -> tuple[Artifact, ...]:
        """Those that are wholly folded in."""
        with self._idle:
            ranks = [rank for rank, missing in self._missing.items() if not missing]
        return tuple(Artifact(rank, self.version, self.kind) for rank in ranks)

    def offered(self, rank: int) -> tuple[Digests | None, Tags | None]:
        """How a member's artifact was described; None if it was not offered yet, or without tags."""
        return self._digests.get(rank), self._tags.get(rank)

    def fold(self, rank: int, index: int, chunk: memoryview) -> None:
        """Fold a verified chunk in, unless it is in. Raises BlockGone."""
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
                self._over = self._over or not done  # nobody can say what is in the block
                self._idle.notify_all()

    def missing(self, rank: int) -> tuple[int, ...]:
        """Raises BlockGone."""
        with self._idle:
            if self._over and not self._sealing:
                raise BlockGone
            return tuple(sorted(self._missing[rank]))

    def seal(self) -> bool:
        """Seal it if it is complete. True for the one caller who did. Raises OSError; then it is gone."""
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
        """Give it up: nothing is folded into it after this."""
        with self._idle:
            self._over = True
            self._idle.wait_for(lambda: self._folding == 0)
        self._draft.release()

    def _count(self, index: int) -> bool:
        """One more member's chunk is in. Whether it was the last for this place, of a block whose size is
        known."""
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
    """Whether an incomplete block of `version` can be given up in attempt `history.attempt`.

    One snapshot is copied at a time, so one older than the named one will get no more chunks. The named one
    is wanted even when deltas have carried the floor past it: later versions will be rebuilt from it. What
    else is older than the floor will not be restored, or its block would be complete.
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
