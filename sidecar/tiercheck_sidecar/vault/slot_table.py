"""The table of slots: which there are, what is in each, which there should be.

`Guarded` makes the lock the only way to the table, so that nobody can forget to take it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts import sizing
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_sidecar.vault.demand import Demand, deltas_refused, saving_refused
from tiercheck_sidecar.vault.inventory import SLOT_SUFFIX
from tiercheck_sidecar.vault.seal import Seal
from tiercheck_sidecar.vault.slots import (
    MemoryTooSmall,
    NoDeltas,
    NoFreeSlot,
    NotHeld,
    Pool,
    Slot,
    SlotState,
    remove,
    tear,
)
from tiercheck_sidecar.vault.stock import HeldStock

T = TypeVar("T")
_Shape = tuple[int, int, int, int, list[Slot]]
"""Which slots are useless, and which are missing, is the same as long as this is, and nothing is gone: how
often the demand changed, how many slots were ever made, there are and are gone, and those free or gone."""


class Guarded(Generic[T]):
    """`with guarded as content`: whoever has the content holds the lock, until the block ends. The same
    thread may enter again."""

    def __init__(self, content: T) -> None:
        self.__content = content
        self._lock = threading.Condition(threading.RLock())

    def __enter__(self) -> T:
        self._lock.acquire()
        return self.__content

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait_until(self, holds: Callable[[T], bool]) -> None:
        """Asked again with every `tell`."""
        with self._lock:
            self._lock.wait_for(lambda: holds(self.__content))

    def tell(self) -> None:
        """What somebody waits for may hold now."""
        with self._lock:
            self._lock.notify_all()


log = logging.getLogger(__name__)


class SlotTable:
    """Not thread-safe: the vault gives it out under its lock only (`Guarded`). Allocates nothing and digests
    nothing."""

    def __init__(self, directory: Path, limit: int, instance: str) -> None:
        """`instance`: tells the files of this process from those of earlier ones."""
        self.limit = limit
        self.slots: dict[Path, Slot] = {}
        self.stock = HeldStock()
        self.demand = Demand(limit)
        self.numa: dict[int, int] = {}
        """NUMA nodes of own ranks' devices."""
        self._directory, self._instance, self._serial = directory, instance, 0
        self._pools: dict[Pool, dict[Path, Slot]] = {}
        self._used = 0
        self._tidy: _Shape | None = None
        """In which nothing was to be retired."""
        self._lacking: dict[tuple[Kind, ...], tuple[_Shape, list[tuple[int, Pool, int, int]]]] = {}

    def enter(self, found: Iterable[Slot]) -> None:
        """What an earlier process left."""
        for slot in found:
            self._add(slot)
            self.demand.found(slot.pool, slot.size)
            if slot.seal is not None:
                self.stock.add(slot.seal)

    # What is here

    def find(
        self, rank: int, version: Version, tier: Tier | None, kind: Kind, share: Share | None = None
    ) -> Slot | None:
        for each in (Tier.LOCAL, Tier.PEER) if tier is None else (tier,):
            for slot in self._pools.get(Pool(each, rank, kind, share), {}).values():
                if slot.seal is not None and slot.seal.version == version and _readable(slot):
                    return slot
        return None

    def artifacts(self, *states: SlotState, of: int | None = None) -> set[Artifact]:
        """In own slots of these states; `of`: of that rank only."""
        return {
            Artifact(
                slot.rank, slot.seal.version if slot.seal else Version(slot.step, slot.attempt), slot.kind
            )
            for slot in self.slots.values()
            if slot.state in states
            and of in (None, slot.pool.rank)
            and slot.tier is Tier.LOCAL
            and not slot.doomed
        }

    def used(self) -> int:
        """Bytes of the volume taken by slots and seals."""
        return self._used

    def pin(self, rank: int, version: Version, tier: Tier | None, kind: Kind, share: Share | None) -> Slot:
        """Raises NotHeld."""
        slot = self.find(rank, version, tier, kind, share)
        if slot is None:
            raise NotHeld(f"the {kind.value} of rank {rank}, {version}, is not here")
        slot.pins += 1
        return slot

    def unpin(self, slot: Slot) -> None:
        slot.pins -= 1
        self._settle(slot)

    # What is being written

    def begin(self, rank: int, version: Version, kind: Kind, size: int) -> Slot:
        """A slot for the trainer to write. Raises NoFreeSlot, MemoryTooSmall."""
        pool = Pool(Tier.LOCAL, rank, kind)
        capacity = self.demand.capacity(pool) or 0
        if size > capacity > 0:
            raise NoFreeSlot(f"the {kind.value} has {size} bytes, {capacity} were reserved")
        slot = self._free_slot(pool, capacity)
        if slot is None:
            self._refuse(kind)
            raise NoFreeSlot(f"no slot is free: older {kind.value}s are still needed or being copied")
        slot.state, slot.step, slot.attempt = SlotState.WRITING, version.step, version.attempt
        return slot

    def writing(self, path: Path) -> Slot:
        """What the trainer writes. Raises NotASlot."""
        slot = self.slots.get(path)
        if slot is None or slot.state is not SlotState.WRITING or slot.tier is not Tier.LOCAL:
            raise NotASlot(f"{path.name} was not begun here")
        return slot

    def draft(self, seal: Seal) -> Slot:
        """A slot for this sidecar to write; if it is new, it is still to be allocated. Raises NoFreeSlot."""
        pool, version = Pool(seal.tier, seal.rank, seal.kind, seal.share), seal.version
        if seal.tier is Tier.PEER and any(
            slot.state is SlotState.WRITING and Version(slot.step, slot.attempt) == version
            for slot in self._pools.get(pool, {}).values()
        ):
            raise NoFreeSlot("this artifact is being received already")
        with self.demand.learning(pool, seal.digests.size):
            slot = self._obtain(pool, seal.digests.size)
        if slot.state is SlotState.FREE:
            slot.state = SlotState.WRITING
        slot.step, slot.attempt = version.step, version.attempt
        return slot

    def give_up(self, unwanted: Callable[[Slot], bool]) -> bool:
        """Never use these slots again, of those that are being written: their writer may be alive. Whether
        there was one."""
        lost = [slot for slot in self.slots.values() if slot.state is SlotState.WRITING and unwanted(slot)]
        for slot in lost:
            slot.state = SlotState.GONE
        return bool(lost)

    def keep(self, slot: Slot, seal: Seal) -> None:
        """The slot is sealed."""
        slot.seal, slot.state = seal, SlotState.SEALED
        if self.slots.get(slot.path) is slot:  # it may have been given up a moment ago
            self.stock.add(seal)
        self._settle(slot)

    def drop(self, slot: Slot) -> None:
        """What is in a slot that was being written is worth nothing."""
        if slot.state in (SlotState.WRITING, SlotState.SEALING):
            slot.state = _emptied(slot)

    # What goes

    def doom(self, unwanted: Callable[[Seal], bool]) -> tuple[Seal, ...]:
        """Free what is held and unwanted, as soon as nobody uses it."""
        doomed = [
            slot for slot in self.slots.values() if _readable(slot) and slot.seal and unwanted(slot.seal)
        ]
        seals = tuple(slot.seal for slot in doomed if slot.seal)
        for slot in doomed:
            slot.doomed = True
            if slot.seal is not None:
                self.stock.remove(slot.seal)
            self._settle(slot)
            failpoint("mid-reclaim")
        return seals

    def retire(self) -> list[Slot]:
        """Free slots that the plan has no use for, and lost ones: `remove_files`, then `forget` them."""
        shape = self._shape()
        if shape == self._tidy:
            return []  # nothing was, and nothing is gone
        for pool, slots in self._pools.items():
            free = [slot for slot in slots.values() if slot.state is SlotState.FREE]
            if not free:
                continue
            capacity, surplus = self.demand.capacity(pool), _present(slots) - self.demand.cap(pool)
            for slot in free:
                if capacity is None or capacity not in (0, slot.size) or surplus > 0:
                    slot.state = SlotState.GONE
                    surplus -= 1
        gone = [slot for slot in self.slots.values() if slot.state is SlotState.GONE]
        self._tidy = None if gone else shape
        return gone

    def forget(self, slots: Sequence[Slot]) -> None:
        """There are no such slots any more."""
        for slot in slots:
            if self.slots.pop(slot.path, None) is not None:
                del self._pools[slot.pool][slot.path]
                self._used -= sizing.cost(slot.size, slot.pool.parts)

    # What there should be

    def next_missing(self, kinds: tuple[Kind, ...]) -> Slot | None:
        """An own slot that the plan wants and memory allows, entered but not yet allocated; of the first kind
        that lacks any. Ranks take turns: a version needs all of them."""
        for _, pool, size, _ in self._missing(kinds):
            if self.used() + sizing.cost(size) <= self.limit:
                return self._place(pool, size)
        return None

    def missing(self, kinds: tuple[Kind, ...]) -> int:
        """How many such slots there are."""
        found, left = 0, self.limit - self.used()
        for _, _, size, lack in self._missing(kinds):
            fit = min(lack, max(0, left) // sizing.cost(size))
            found, left = found + fit, left - fit * sizing.cost(size)
        return found

    def is_making(self, pool: Pool) -> bool:
        """Whether a slot of it is being allocated."""
        return any(slot.state is SlotState.ALLOCATING for slot in self._pools.get(pool, {}).values())

    def _missing(self, kinds: tuple[Kind, ...]) -> list[tuple[int, Pool, int, int]]:
        """Of own ranks with fewer slots than the plan wants, kind by kind those with the fewest first: slots,
        pool, bytes of each, and how many are missing."""
        shape, known = self._shape(), self._lacking.get(kinds)
        if known is None or known[0] != shape or shape[3]:
            found = [each for kind in kinds for each in sorted(self._lack(kind), key=lambda each: each[0])]
            known = self._lacking[kinds] = shape, found
        return known[1]

    def _lack(self, kind: Kind) -> Iterator[tuple[int, Pool, int, int]]:
        if not self.demand.plan().fits:
            return  # saving is refused, so a slot would only raise hopes
        for rank in self.demand.own:
            pool = Pool(Tier.LOCAL, rank, kind)
            size, count, cap = self.demand.capacity(pool), self._count(pool), self.demand.cap(pool)
            if size and count < cap:
                yield count, pool, size, cap - count

    def numa_of(self, slot: Slot) -> int:
        """Where its memory should lie; -1: anywhere."""
        return self.numa.get(slot.rank, -1) if slot.tier is Tier.LOCAL else -1

    def _refuse(self, kind: Kind) -> None:
        reason = saving_refused(self.demand)
        if reason:
            raise MemoryTooSmall(reason)
        if kind is Kind.DELTA and self.demand.plan().delta_slots == 0:
            raise NoDeltas(deltas_refused(self.demand) or "no delta slots were reserved")

    def _free_slot(self, pool: Pool, size: int) -> Slot | None:
        exact = pool.tier is Tier.LOCAL or (pool.kind is Kind.SNAPSHOT and pool.share is None)
        for slot in self._pools.get(pool, {}).values():
            fits = slot.size == size or (slot.size > size and not exact)
            if slot.state is SlotState.FREE and fits:
                return slot
        return None

    def _obtain(self, pool: Pool, size: int) -> Slot:
        slot = self._free_slot(pool, size)
        if slot is not None:
            return slot
        gone = self.retire()
        remove_files(gone)
        self.forget(gone)
        # A restore needs the whole chain at once, however few slots training gets afterwards: only memory
        # bounds it.
        bounded = pool.tier is Tier.PEER or pool.kind is Kind.SNAPSHOT
        cap = self.demand.cap(pool)
        if bounded and self._count(pool) >= cap:
            raise NoFreeSlot(
                f"all {cap} {pool.kind.value} slots for rank {pool.rank} hold what is still needed"
            )
        capacity = size
        if pool.tier is Tier.PEER:
            capacity = max(size, self.demand.capacity(pool) or 0)
        cost = sizing.cost(capacity, pool.parts)
        if self.used() + cost > self.limit:
            raise NoFreeSlot(f"{self.used()} of {self.limit} bytes are in use, {cost} more do not fit")
        return self._place(pool, capacity)

    def _place(self, pool: Pool, size: int) -> Slot:
        self._serial += 1
        word = "own" if pool.tier is Tier.LOCAL else "parity" if pool.share else "copy"
        what = "delta-" if pool.kind is Kind.DELTA else ""
        path = self._directory / f"{word}-{what}{pool.rank}-{self._instance}-{self._serial}{SLOT_SUFFIX}"
        slot = Slot(path=path, size=size, pool=pool)
        self._add(slot)
        return slot

    def _add(self, slot: Slot) -> None:
        self.slots[slot.path] = slot
        self._pools.setdefault(slot.pool, {})[slot.path] = slot
        self._used += sizing.cost(slot.size, slot.pool.parts)

    def _shape(self) -> _Shape:
        slots = self.slots.values()
        idle = [slot for slot in slots if slot.state is SlotState.FREE or slot.state is SlotState.GONE]
        gone = sum(slot.state is SlotState.GONE for slot in idle)
        return self.demand.changes, self._serial, len(slots), gone, idle

    def _count(self, pool: Pool) -> int:
        return _present(self._pools.get(pool, {}))

    def _settle(self, slot: Slot) -> None:
        """Free a doomed slot that nobody uses."""
        if slot.doomed and slot.pins == 0 and slot.state is SlotState.SEALED:
            slot.seal, slot.doomed, slot.state = None, False, _emptied(slot)


def remove_files(gone: Sequence[Slot]) -> None:
    """Of retired slots; needs no lock."""
    for slot in gone:
        try:
            remove(slot.path)
        except OSError as error:  # a trainer put something else in its place; it holds up no other slot
            log.warning("%s cannot be removed: %s", slot.path.name, error)
        slot.unmap()


def _present(slots: Mapping[Path, Slot]) -> int:
    return sum(slot.state is not SlotState.GONE for slot in slots.values())


def _readable(slot: Slot) -> bool:
    return slot.state is SlotState.SEALED and not slot.doomed


def _emptied(slot: Slot) -> SlotState:
    """Make a slot that is given back unreadable. What becomes of it: one whose file was cut off, or taken
    away, is never used again."""
    try:
        tear(slot)
        return SlotState.FREE if slot.is_whole() else SlotState.GONE
    except OSError as error:
        log.warning("%s is given up: %s", slot.path.name, error)
        return SlotState.GONE
