"""How many slots fit into the memory volume: arithmetic only, so that every refusal can name its numbers.

Three slots per own rank let a capture start while the committed version is kept and a pending one is replicated;
two are the least that can replace a committed version without giving it up first. Hosted copies need two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OWN_SLOTS = 3
OWN_SLOTS_MIN = 2
HOSTED_SLOTS = 2

PAGE = 4096
_SEAL_PER_CHUNK = 40
_CHUNK = 4 * 1024 * 1024


def cost(size: int) -> int:
    """Bytes of the memory volume that a slot of `size` bytes and its seal take."""
    seal = PAGE + (size // _CHUNK) * _SEAL_PER_CHUNK
    return _pages(size) + _pages(seal)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class Sizing:
    """`own_slots` is 0 if not even the minimum fits. `needed` and `minimum` are bytes for all slots."""

    own_slots: int
    needed: int
    minimum: int

    @property
    def fits(self) -> bool:
        return self.own_slots > 0


def plan(limit: int, own: Mapping[int, int], hosted: Mapping[int, int | None]) -> Sizing:
    """Slots per own rank under `limit` bytes, given bytes per rank. A hosted rank of unknown size (None) is taken to
    be as large as the largest known rank: data-parallel shards are alike.
    """
    known = [size for size in (*own.values(), *hosted.values()) if size]
    guess = max(known, default=0)
    kept = sum(HOSTED_SLOTS * cost(size or guess) for size in hosted.values()) if guess else 0
    once = sum(cost(size) for size in own.values())
    full, least = kept + OWN_SLOTS * once, kept + OWN_SLOTS_MIN * once
    if full <= limit:
        return Sizing(OWN_SLOTS, full, least)
    return Sizing(OWN_SLOTS_MIN if least <= limit else 0, full, least)
