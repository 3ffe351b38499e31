"""Computes which slots this worker should have, and explains when memory is too small for them.

They follow from what its ranks reserve and what it keeps for other workers. Sizes of the latter are known
once something of it has arrived. Until then the size that the coordinator reports for the largest of all
ranks is used, so that room for copies is not given to deltas.

A refusal has every number, and what to do about it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator

from tiercheck.protocol.artifacts import sizing
from tiercheck.protocol.artifacts.sizing import LONGEST_CADENCE, SPARE_DELTAS, Room, Sizing, auto_cadence
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Kind, Share
from tiercheck_sidecar.vault.slots import NoFreeSlot, Pool


class Demand:
    """The slots that this worker should have. Not thread-safe: the vault guards it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.own: dict[int, Room] = {}
        self._hosted: dict[int | Share, Room] = {}
        self._cadence = 0
        self._guess: Room | None = None
        self._plan: Sizing | None = None
        self.changes = 0

    def reserve(self, rank: int, snapshot: int, delta: int | None) -> None:
        """Sets the exact sizes for an own rank; a delta of None is left unchanged."""
        before = self.own.get(rank, Room())
        self.own[rank] = Room(snapshot, before.delta if delta is None else delta)
        self._change()

    def only(self, ranks: Collection[int]) -> None:
        """Removes own ranks other than `ranks`."""
        self.own = {rank: room for rank, room in self.own.items() if rank in ranks}
        self._change()

    def expect(self, cadence: int, guess: Room) -> bool:
        """Sets the length of chains and the largest slots of any rank. Returns whether they changed."""
        if (cadence, guess) == (self._cadence, self._guess):
            return False
        self._cadence, self._guess = cadence, guess
        self._change()
        return True

    def host(self, ranks: Iterable[int], shares: Iterable[Share], known: Iterable[tuple[Pool, int]]) -> None:
        """Sets the ranks and parity blocks to keep. `known`: pools and sizes of slots that exist already."""
        wanted: dict[int | Share, Room] = dict.fromkeys(ranks, Room())
        wanted |= {share: Room(parts=1 + len(share.ranks)) for share in shares}
        self._hosted = {each: self._hosted.get(each, room) for each, room in wanted.items()}
        self._change()
        for pool, size in known:
            self.learn(pool, size)

    def found(self, pool: Pool, size: int) -> None:
        """Records a slot of `size` bytes that an earlier process left."""
        before = self.own.get(pool.rank, Room())
        if pool.tier is Tier.LOCAL and pool.kind is Kind.DELTA:
            self.own[pool.rank] = dataclasses.replace(before, delta=max(before.delta or 0, size))
            self._change()
        self.learn(pool, size)

    def learn(self, pool: Pool, size: int) -> None:
        """Records that an artifact of `size` bytes is in `pool`, or will be."""
        if pool.tier is Tier.LOCAL:
            # Restored, or left by an earlier process: the rank will reserve anew when it trains again.
            before = self.own.get(pool.rank, Room())
            if pool.kind is Kind.SNAPSHOT and not before.snapshot:
                self.own[pool.rank] = dataclasses.replace(before, snapshot=size)
                self._change()
        else:
            key = pool.share or pool.rank
            if key not in self._hosted:
                return
            before = self._hosted[key]
            if pool.kind is Kind.DELTA:
                after = dataclasses.replace(before, delta=max(before.delta or 0, sizing.roomy(size)))
            elif pool.share:
                after = dataclasses.replace(before, snapshot=max(before.snapshot, sizing.roomy(size)))
            else:
                after = dataclasses.replace(before, snapshot=size)
            if after != before:
                self._hosted[key] = after
                self._change()

    @contextlib.contextmanager
    def learning(self, pool: Pool, size: int) -> Iterator[None]:
        """Calls `learn` while a slot is searched for, and undoes that if there is none.

        Otherwise a client could claim any size, and stop all saving here."""
        before = self.own.copy(), self._hosted.copy()
        self.learn(pool, size)
        try:
            yield
        except NoFreeSlot:
            self.own, self._hosted = before
            self._change()
            raise

    def _change(self) -> None:
        self._plan, self.changes = None, self.changes + 1

    def plan(self) -> Sizing:
        if self._plan is None:
            own, hosted = tuple(self.own.values()), tuple(self._hosted.values())
            self._plan = sizing.plan(self.limit, own, hosted, self.cadence, self._guess)
        return self._plan

    @property
    def cadence(self) -> int:
        """Returns the coordinator's cadence; until it is known, an estimate from own ranks' sizes."""
        if self._cadence:
            return self._cadence
        own = self.own.values()
        snapshots, deltas = sum(room.snapshot for room in own), sum(room.delta or 0 for room in own)
        return auto_cadence(snapshots, deltas) or LONGEST_CADENCE

    @property
    def ranks(self) -> tuple[int, int, int]:
        lanes = sum(isinstance(each, Share) for each in self._hosted)
        return len(self.own), len(self._hosted) - lanes, lanes

    def cap(self, pool: Pool) -> int:
        """Returns how many slots `pool` may have."""
        plan = self.plan()
        if pool.kind is Kind.DELTA:
            return plan.delta_slots
        if pool.tier is Tier.PEER:
            return sizing.HOSTED_SLOTS
        return plan.own_slots or sizing.OWN_SLOTS_MIN

    def capacity(self, pool: Pool) -> int | None:
        """Returns the bytes that a free slot of `pool` must have to be kept; 0: any; None: none is kept."""
        if pool.tier is Tier.LOCAL:
            room = self.own.get(pool.rank)
            if room is None:
                return None
            return room.snapshot if pool.kind is Kind.SNAPSHOT else room.delta or None
        wanted = self._hosted.get(pool.share or pool.rank)
        if wanted is None:
            return None
        return wanted.snapshot if pool.kind is Kind.SNAPSHOT else wanted.delta or 0


_REMEDY = "Raise tiers.local.sizeLimit and the sidecar's memory limit"


def saving_refused(demand: Demand) -> str:
    """Returns why nothing can be saved; empty if memory is large enough."""
    fits = demand.plan()
    if fits.fits:
        return ""
    return (
        f"tiers.local.sizeLimit is {demand.limit}, needed {fits.minimum} bytes ({fits.needed} to never skip "
        f"anything): two slots for each of {_those(demand)}. {_REMEDY}"
    )


def deltas_refused(demand: Demand) -> str:
    """Returns why reserved deltas are not taken; empty if memory holds enough of them."""
    fits = demand.plan()
    if not fits.lacks_deltas:
        return ""
    fewest = demand.cadence + SPARE_DELTAS
    return (
        f"tiers.local.sizeLimit is {demand.limit}, deltas need {fits.delta_minimum} bytes ({fits.needed} to "
        f"never skip anything): {fewest} deltas of {fits.delta} bytes, beside snapshots of {fits.snapshot}, "
        f"for each of {_those(demand)}. Until then there are snapshots only. {_REMEDY}"
    )


def _those(demand: Demand) -> str:
    own, hosted, lanes = demand.ranks
    text = f"{own} ranks here and of {hosted} ranks hosted for other workers"
    return f"{text}, and of {lanes} parity blocks" if lanes else text
