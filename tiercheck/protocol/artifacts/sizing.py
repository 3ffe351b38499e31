"""Computes how many slots fit into the memory volume, so that every refusal states numbers.

Both sides use it: the operator refuses a job that cannot fit before it starts, and the sidecar lays out its
slots.

Three snapshot slots per own rank let a capture start while the committed version is kept and a pending one is
replicated; two are the minimum to replace a committed version without discarding it first. Hosted copies and
parity blocks need two. Deltas use the rest: two chains and two more for every rank, because the next snapshot
is still being sent to the holders while the chain after the last one grows, and acknowledgements take time.
With less than a chain and two there would be more gaps than chains, so there are none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

OWN_SLOTS = 3
OWN_SLOTS_MIN = 2
HOSTED_SLOTS = 2
SPARE_DELTAS = 2
"""The delta slots beyond whole chains: one being written, and one being acknowledged."""

SHORTEST_CADENCE = 2
LONGEST_CADENCE = 32
"""The most steps between snapshots: a longer replay costs more time than the memory saved is worth."""

PAGE = 4096
_DIGEST, _TAG = 40, 32
"""Bytes of a seal per chunk."""
_CHUNK = 4 * 1024 * 1024
_SMALLEST = 64 * 1024


def auto_cadence(snapshot_bytes: int, delta_bytes: int) -> int:
    """Returns the steps between snapshots at which the deltas are as large as a snapshot.

    0 if either size is not known or there are no deltas."""
    if snapshot_bytes <= 0 or delta_bytes <= 0:
        return 0
    return min(LONGEST_CADENCE, max(SHORTEST_CADENCE, round(snapshot_bytes / delta_bytes)))


def cost(size: int, parts: int = 1) -> int:
    """Returns the bytes of the memory volume that a slot of `size` bytes and its seal take.

    An artifact's seal has digests and tags, a parity block's the digests of `parts` artifacts: its own and
    its members'."""
    seal = PAGE + (size // _CHUNK) * (_DIGEST * parts + _TAG)
    return _pages(size) + _pages(seal)


def roomy(size: int) -> int:
    """Returns a slot capacity for varying sizes: up to an eighth over `size`, at least 64 KiB."""
    if size <= _SMALLEST:
        return _SMALLEST
    unit = 1 << (size.bit_length() - 4)
    return -(-size // unit) * unit


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class Room:
    """Bytes of one snapshot slot and of one delta slot of a rank.

    A snapshot of 0 or a delta of None is not known yet; a delta of 0 means that there are none."""

    snapshot: int = 0
    delta: int | None = None
    parts: int = 1
    """The number of artifacts with digests in the seal, as in `cost`."""


@dataclass(frozen=True)
class Sizing:
    """The number of slots of each kind per rank, and bytes for all slots of this worker of known size."""

    own_slots: int
    """The snapshot slots per own rank; 0 if not even the fewest fit."""
    delta_slots: int
    """The delta slots per own rank, hosted rank and parity block; 0: none are needed, or too few fit."""
    needed: int
    """Bytes for all slots of the full layout."""
    minimum: int
    """Bytes below which saving is refused."""
    delta_minimum: int
    """Bytes below which no deltas are taken."""
    local: int
    """The part of `needed` that is for own ranks."""
    peer: int
    """The part of `needed` that is for copies and parity of others."""
    snapshot: int
    """Bytes of the largest own snapshot."""
    delta: int
    """Bytes of the largest own delta slot."""

    @property
    def fits(self) -> bool:
        return self.own_slots > 0

    @property
    def lacks_deltas(self) -> bool:
        """Returns whether deltas are taken by the ranks but do not fit."""
        return self.fits and self.delta > 0 and self.delta_slots == 0


def plan(
    limit: int, own: Collection[Room], hosted: Collection[Room], cadence: int, guess: Room | None = None
) -> Sizing:
    """Returns the slots that fit in `limit` bytes. `cadence` is the length of a chain.

    `hosted` are the ranks and parity blocks kept for other workers; their unknown sizes are assumed to be
    `guess`, or the largest known one, because data-parallel shards are alike."""
    all_ = (*own, *hosted)
    snapshot = (guess.snapshot if guess else 0) or max((room.snapshot for room in all_), default=0)
    delta = (guess.delta if guess else 0) or max((room.delta or 0 for room in all_), default=0)
    one_own = sum(cost(room.snapshot) for room in own if room.snapshot)
    kept = (
        HOSTED_SLOTS * sum(cost(room.snapshot or snapshot, room.parts) for room in hosted) if snapshot else 0
    )
    own_delta = sum(cost(room.delta) for room in own if room.delta)
    sizes = [(delta if room.delta is None else room.delta, room.parts) for room in hosted]
    peer_delta = sum(cost(size, parts) for size, parts in sizes if size)

    full, least = kept + OWN_SLOTS * one_own, kept + OWN_SLOTS_MIN * one_own
    slots = OWN_SLOTS if full <= limit else OWN_SLOTS_MIN if least <= limit else 0
    row = own_delta + peer_delta
    wanted, fewest = (2 * cadence + SPARE_DELTAS, cadence + SPARE_DELTAS) if row else (0, 0)
    taken = full if slots == OWN_SLOTS else least
    room_for = (limit - taken) // row if slots and row else 0
    return Sizing(
        own_slots=slots,
        delta_slots=min(wanted, room_for) if room_for >= fewest else 0,
        needed=full + wanted * row,
        minimum=least,
        delta_minimum=least + fewest * row,
        local=OWN_SLOTS * one_own + wanted * own_delta,
        peer=kept + wanted * peer_delta,
        snapshot=max((room.snapshot for room in own), default=0),
        delta=max((room.delta or 0 for room in own), default=0),
    )
