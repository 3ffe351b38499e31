"""Manages every slot of this worker: what is written, what is held, what may be written next.

Memory is bounded: a slot is allocated only within the limit, and if none is free the caller gets an error at
once. Nothing here decides what may be freed; the watermark does (`reclaim.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts import sizing
from tiercheck.protocol.artifacts.slot import NotASlot, SlotHeader, read_header
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.tags import Tagger, digest_and_tag
from tiercheck_sidecar.vault.demand import Demand, deltas_refused, saving_refused
from tiercheck_sidecar.vault.ready_memory import ReadyMemory
from tiercheck_sidecar.vault.seal import Seal, write_seal
from tiercheck_sidecar.vault.slots import (
    MemoryTooSmall,
    NoDeltas,
    NoFreeSlot,
    NotHeld,
    Pool,
    Slot,
    SlotDraft,
    SlotState,
    create,
    lower_priority,
    remove,
    tear,
    touch_on_node,
)
from tiercheck_sidecar.vault.stock import (
    NOTHING,
    SLOT_SUFFIX,
    HeldStock,
    MemoryStock,
    StockPlace,
    fault,
    take_inventory,
    where,
)

log = logging.getLogger(__name__)

_Shape = tuple[int, int, int, int, list[Slot]]
"""A fingerprint: while it is equal and no slot is gone, the same slots are useless or missing.

The number of changes of the demand, of slots ever made, present and gone, and the slots free or gone."""


class Vault:
    """Manages the slots of this worker. Thread-safe.

    No method waits for the network; only allocation and sealing touch many bytes, outside the lock. A slot's
    use ends in one of three ways: `release`, when its writer has abandoned it; `discard`, when the writer may
    still be writing; `evict`, when what is held is not needed.
    """

    def __init__(
        self,
        directory: Path,
        limit: int,
        ranks: Sequence[int],
        on_change: Callable[[], None] = lambda: None,
        tagger: Callable[[Artifact], Tagger | None] = lambda _: None,
        *,
        instance: str = "",
        hands: int = 1,
    ) -> None:
        """`tagger` makes the tags of an own artifact that is being sealed; None: it gets none.

        `instance` distinguishes this vault's files from those of an earlier one in this directory. `hands` is
        the number of threads that allocate slots."""
        self.limit = limit
        self.ranks = tuple(ranks)
        """The worker's own ranks; none while this is a spare. See `identify`."""
        self._directory, self._instance = directory, instance or uuid.uuid4().hex[:6]
        self._on_change, self._tagger, self._hands = on_change, tagger, hands
        self._lock = threading.Condition()
        """Guards all that follows. It is reentrant."""
        self._slots: dict[Path, Slot] = {}
        self._pools: dict[Pool, dict[Path, Slot]] = {}
        self._stock = HeldStock()
        self._demand = Demand(limit)
        self._numa: dict[int, int] = {}
        """The NUMA nodes of own ranks' devices."""
        self._serial = self._used = 0
        self._ready = ReadyMemory()
        self._tidy: _Shape | None = None
        """The last fingerprint for which nothing was to be removed."""
        self._lacking: dict[tuple[Kind, ...], tuple[_Shape, list[tuple[int, Pool, int, int]]]] = {}

    def open(self) -> None:
        """Takes inventory of what an earlier process left. Raises OSError if the volume cannot be used."""
        failpoint("before-inventory")
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # the volume's root may belong to the kubelet
            self._directory.chmod(0o777)
        found = take_inventory(self._directory)
        with self._lock:
            for slot in found:
                self._add(slot)
                self._demand.found(slot.pool, slot.size)
                if slot.seal is not None:
                    self._stock.add(slot.seal)

    # What is held

    def held(self) -> tuple[Seal, ...]:
        """Returns every verified artifact and parity block, oldest first."""
        with self._lock:
            return self._stock.seals()

    def stocks(self) -> Mapping[StockPlace, MemoryStock]:
        """Returns the versions of all that is held, by place."""
        with self._lock:
            return self._stock.places()

    def own_stock(self, rank: int) -> MemoryStock:
        return self.stocks().get(StockPlace(Tier.LOCAL, rank), NOTHING)

    def own_artifacts(self, rank: int) -> dict[Artifact, int]:
        """Returns the artifacts in own slots of a rank, with their sizes in bytes."""
        place = StockPlace(Tier.LOCAL, rank)
        return {seal.artifact: seal.digests.size for seal in self.held() if where(seal) == place}

    def find(self, artifact: Artifact, tier: Tier | None = None, share: Share | None = None) -> Seal | None:
        """Returns the seal of a whole artifact, or of the complete block `share` that it is the first of."""
        with self._lock:
            slot = self._find(artifact, tier, share)
            return slot.seal if slot else None

    def own(self, rank: int) -> set[Artifact]:
        """Returns what an own rank is writing, has written or has sealed."""
        return self._artifacts(SlotState.WRITING, SlotState.SEALING, SlotState.SEALED, of=rank)

    def unfinished(self) -> set[Artifact]:
        """Returns what own ranks are writing, or have written and is not sealed yet."""
        return self._artifacts(SlotState.WRITING, SlotState.SEALING)

    @contextlib.contextmanager
    def pin(self, artifact: Artifact, tier: Tier | None = None, share: Share | None = None) -> Iterator[Slot]:
        """Keeps what `find` finds from being freed while it is read. Raises NotHeld."""
        with self._lock:
            slot = self._find(artifact, tier, share)
            if slot is None:
                raise NotHeld(f"the {artifact}, is not here")
            slot.pins += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.pins -= 1
                self._settle(slot)

    def fault(
        self,
        artifact: Artifact,
        tier: Tier | None = None,
        share: Share | None = None,
        threads: Executor | None = None,
        read: Callable[[int], None] = lambda _: None,
    ) -> str:
        """Rereads what `find` finds and returns what is wrong with it; empty if nothing is.

        `threads` and `read` are those of `stock.fault`. Raises NotHeld, OSError."""
        with self.pin(artifact, tier, share) as slot:
            return fault(slot, threads, read)

    # Room

    def size_plan(self) -> sizing.Sizing:
        with self._lock:
            return self._demand.plan()

    def used(self) -> int:
        """Returns the bytes of the volume taken by slots and seals, and by memory made ready for them."""
        return self._used + self._ready.size

    def reserved(self, rank: int) -> sizing.Room | None:
        """Returns what an own rank reserved, as far as it is known."""
        with self._lock:
            return self._demand.own.get(rank)

    def identify(self, ranks: Sequence[int]) -> None:
        """Sets the worker's ranks. What earlier own ranks left stays, but no slots are kept ready for it."""
        with self._lock:
            self.ranks = tuple(ranks)
            self._demand.only(self.ranks)

    def host(self, ranks: Iterable[int], shares: Iterable[Share] = ()) -> None:
        """Sets the ranks to keep copies of, and the parity blocks to keep."""
        with self._lock:
            known = [(slot.pool, slot.size) for slot in self._slots.values() if slot.tier is Tier.PEER]
            self._demand.host(ranks, shares, known)
        self.tidy()

    def expect(self, cadence: int, guess: sizing.Room) -> None:
        """Sets the coordinator's figures: steps between snapshots, and the largest slots of any rank."""
        with self._lock:
            news = self._demand.expect(cadence, guess)
        if news:
            self.tidy()
            self._on_change()

    def reserve(self, rank: int, size: int, delta_size: int | None = 0, numa: int = -1) -> None:
        """Provides pre-faulted snapshot slots of exactly `size` bytes for an own rank. Raises MemoryTooSmall.

        Delta slots of `delta_size` bytes (0: none; None: not known yet) are left to `prepare`. All lie on the
        NUMA node `numa` (-1: anywhere)."""
        if rank not in self.ranks or size <= 0 or (delta_size or 0) < 0:
            raise ValueError(f"cannot reserve {size} and {delta_size} bytes for rank {rank}")
        with self._lock:
            self._numa[rank] = numa
            self._demand.reserve(rank, size, delta_size)
        reason = self.too_small()
        if reason:
            raise MemoryTooSmall(reason)
        self._ready.discard()  # what is needed is known now, and may have to lie on another NUMA node
        self.tidy()
        # Waits for `prepare`, which may be making one of them: the trainer must find them ready.
        snapshots = Pool(Tier.LOCAL, rank, Kind.SNAPSHOT)
        with self._lock:
            self._lock.wait_for(
                lambda: all(
                    slot.state is not SlotState.ALLOCATING for slot in self._pools.get(snapshots, {}).values()
                )
            )

    def too_small(self) -> str:
        """Returns why saving is refused, with the numbers; empty if memory is large enough."""
        with self._lock:
            return saving_refused(self._demand)

    def no_deltas(self) -> str:
        """Returns why reserved deltas cannot be taken, with the numbers; empty if they can."""
        with self._lock:
            return deltas_refused(self._demand)

    def tidy(self) -> None:
        """Brings the snapshot slots to the planned number and size, as far as memory is free.

        Slow: pre-faults. Calls `on_change` only after a change, because that leads to another call of this.
        """
        self.trim()
        self._grow(Kind.SNAPSHOT)

    def trim(self) -> None:
        """Removes free slots that the plan has no use for, and lost ones. Never slow."""
        with self._lock:
            gone = self._useless()
        for slot in gone:
            try:
                remove(slot.path)
            except OSError as error:  # a trainer put something else in its place; it holds up no other slot
                log.warning("%s cannot be removed: %s", slot.path.name, error)
            slot.unmap()
        with self._lock:
            for slot in gone:
                self._forget(slot)

    def make_ready(self, count: int, size: int) -> None:
        """Makes memory for `count` snapshots of about `size` bytes, as long as nothing is known of own ranks:
        restored snapshots are put into it. Slow: pre-faults."""
        size = sizing.roomy(size)
        with self._lock:
            if self._demand.own or self._used + count * sizing.cost(size) > self.limit:
                return
        names = [f"ready-{self._instance}-{index}{SLOT_SUFFIX}" for index in range(count)]
        if self._ready.make([self._directory / name for name in names], size, self._hands):
            self._on_change()

    def prepare(self, *, deltas: bool = True) -> None:
        """Allocates what own ranks lack, on several cores at low priority. No trainer waits for it."""
        kinds = (Kind.SNAPSHOT, Kind.DELTA) if deltas else (Kind.SNAPSHOT,)
        missing = 0
        with self._lock:
            left = self.limit - self._used
            for _, _, size, lack in self._missing(kinds):
                fit = min(lack, max(0, left) // sizing.cost(size))
                missing, left = missing + fit, left - fit * sizing.cost(size)
        hands = min(self._hands, missing)
        if hands == 1:
            self._grow(*kinds)
        elif hands:
            with ThreadPoolExecutor(hands, "prepare", initializer=lower_priority) as pool:
                for done in [pool.submit(self._grow, *kinds) for _ in range(hands)]:
                    done.result()

    # Own ranks: the trainer writes

    def begin(self, rank: int, version: Version, kind: Kind = Kind.SNAPSHOT, size: int = 0) -> Path:
        """Returns a slot for at most `size` bytes (0: as reserved). Raises NoFreeSlot, MemoryTooSmall."""
        pool = Pool(Tier.LOCAL, rank, kind)
        with self._lock:
            capacity = self._demand.capacity(pool) or 0
            if size > capacity > 0:
                raise NoFreeSlot(f"the {kind.value} has {size} bytes, {capacity} were reserved")
            slot = self._free_slot(pool, capacity)
            if slot is None:
                reason = saving_refused(self._demand)
                if reason:
                    raise MemoryTooSmall(reason)
                if kind is Kind.DELTA and self._demand.plan().delta_slots == 0:
                    raise NoDeltas(deltas_refused(self._demand) or "no delta slots were reserved")
                raise NoFreeSlot(f"no slot is free: older {kind.value}s are still needed or being copied")
            slot.state, slot.version = SlotState.WRITING, version
        return slot.path

    def complete(self, path: Path, world_size: int) -> Kind:
        """Checks a slot that the trainer wrote; `seal` must follow. Raises NotASlot; then it is free."""
        slot = self._writing(path)
        with self._released_by_failure(slot):
            try:
                with slot.mapped() as view:
                    header = read_header(view)
            except OSError as error:
                raise NotASlot(str(error)) from error
            _check_header(slot, header, world_size)
        with self._lock:
            slot.state = SlotState.SEALING
        return slot.kind

    def seal(self, path: Path) -> Seal | None:
        """Digests and seals a completed slot; None: that failed, and it is free. Slow: reads every byte."""
        with self._lock:
            slot = self._slots[path]
        try:
            with self._released_by_failure(slot):
                with slot.mapped() as view:
                    header = read_header(view)
                    tagger = self._tagger(Artifact(slot.rank, header.version, slot.kind))
                    digests, tags = digest_and_tag(view[: header.size], tagger)
                seal = Seal(
                    slot.rank, header.version, header.world_size, Tier.LOCAL, digests, slot.kind, tags=tags
                )
                self._seal(slot, seal)
        except (OSError, NotASlot) as error:
            log.warning("%s could not be sealed: %s", path.name, error)
            return None
        return seal

    # Copies, parity blocks and restored artifacts: this sidecar writes

    def draft(self, seal: Seal) -> SlotDraft:
        """Returns a slot to receive an artifact into, or to fold a parity block in.

        Own ranks' slots are made on several cores: nothing trains then. Raises NoFreeSlot, OSError."""
        pool, size = Pool(seal.tier, seal.rank, seal.kind, seal.share), seal.digests.size
        with self._lock:
            if seal.tier is Tier.PEER and any(
                slot.state is SlotState.WRITING and slot.version == seal.version
                for slot in self._pools.get(pool, {}).values()
            ):
                raise NoFreeSlot("this artifact is being received already")
            with self._demand.learning(pool, size):
                slot = self._free_slot(pool, size) or self._new_slot(pool, size)
            slot.version, is_new = seal.version, slot.state is SlotState.ALLOCATING
            if not is_new:
                slot.state = SlotState.WRITING
        hands = self._hands if seal.tier is Tier.LOCAL else 1
        if is_new and not self._allocate(slot, SlotState.WRITING, hands):
            raise NoFreeSlot("the memory volume is full")
        with self._released_by_failure(slot):
            return SlotDraft(slot, seal, self._seal, self._release)

    # How the use of a slot ends

    def release(self, path: Path) -> None:
        """Frees a slot that the trainer will not complete. Raises NotASlot."""
        self._release(self._writing(path))

    def discard(self, which: Path | Artifact) -> None:
        """Abandons a slot by its path or own artifact; as it may still be written, it is never reused.

        Its trainer is gone or silent, or another process that fills it may never finish."""
        with self._lock:
            for slot in self._slots.values():
                ours = slot.tier is Tier.LOCAL and which in (slot.path, slot.artifact)
                if ours and slot.state is SlotState.WRITING:
                    slot.state = SlotState.GONE
        self.trim()

    def evict_if_bad(
        self, state: SidecarState, artifact: Artifact, tier: Tier | None = None, share: Share | None = None
    ) -> str:
        """Rereads an artifact or a block that arrives damaged elsewhere, and returns what is wrong with it.

        Own memory is the first suspect then. If it is corrupt, it is freed and reported; only this check
        counts, not the report of a client. What an own rank wrote may be the only copy, so it stays if it
        merely could not be read, for example without descriptors."""
        try:
            reason = self.fault(artifact, tier, share=share)
        except (NotHeld, OSError) as error:
            if tier is Tier.LOCAL:
                return str(error)
            reason = str(error)
        if reason and self.evict(
            lambda seal: (seal.artifact, seal.share) == (artifact, share) and tier in (None, seal.tier)
        ):
            bad = Quarantined(artifact.rank, artifact.version, state.config.worker, reason, artifact.kind)
            state.quarantine(bad)
        return reason

    def evict(self, unwanted: Callable[[Seal], bool]) -> tuple[Seal, ...]:
        """Frees every held artifact that is `unwanted`, those in use once they are not. Returns them."""
        seals = []
        with self._lock:
            for slot in self._slots.values():
                if _readable(slot) and slot.seal is not None and unwanted(slot.seal):
                    seals.append(slot.seal)
                    slot.doomed = True
                    self._stock.remove(slot.seal)
                    self._settle(slot)
                    failpoint("mid-reclaim")
        if seals:
            self.trim()
            self._on_change()
        return tuple(seals)

    # Inside, what is held

    def _find(self, artifact: Artifact, tier: Tier | None, share: Share | None) -> Slot | None:
        for each in (Tier.LOCAL, Tier.PEER) if tier is None else (tier,):
            for slot in self._pools.get(Pool(each, artifact.rank, artifact.kind, share), {}).values():
                if slot.seal is not None and slot.seal.version == artifact.version and _readable(slot):
                    return slot
        return None

    def _artifacts(self, *states: SlotState, of: int | None = None) -> set[Artifact]:
        """Returns the artifacts in own slots of these states; `of`: of that rank only."""
        with self._lock:
            return {
                slot.artifact
                for slot in self._slots.values()
                if slot.state in states
                and of in (None, slot.rank)
                and slot.tier is Tier.LOCAL
                and not slot.doomed
            }

    def _writing(self, path: Path) -> Slot:
        """Returns the slot that the trainer writes. Raises NotASlot."""
        with self._lock:
            slot = self._slots.get(path)
            if slot is None or slot.state is not SlotState.WRITING or slot.tier is not Tier.LOCAL:
                raise NotASlot(f"{path.name} was not begun here")
            return slot

    # Inside, ends

    def _seal(self, slot: Slot, seal: Seal) -> None:
        if slot.state is SlotState.GONE:
            raise OSError(errno.ESTALE, f"{slot.path.name} was given up")
        write_seal(slot.path, seal)
        failpoint("after-seal")
        with self._lock:
            slot.seal, slot.state = seal, SlotState.SEALED
            if self._slots.get(slot.path) is slot:  # it may have been given up a moment ago
                self._stock.add(seal)
            self._settle(slot)
        self._on_change()

    def _release(self, slot: Slot) -> None:
        """Empties a slot that was being written."""
        with self._lock:
            if slot.state in (SlotState.WRITING, SlotState.SEALING):
                _empty(slot)
        self._on_change()

    @contextlib.contextmanager
    def _released_by_failure(self, slot: Slot) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._release(slot)
            raise

    def _settle(self, slot: Slot) -> None:
        """Frees a doomed slot that is not in use."""
        if slot.doomed and slot.pins == 0 and slot.state is SlotState.SEALED:
            _empty(slot)

    def _useless(self) -> list[Slot]:
        """Returns lost slots, and free ones that the plan has no use for, which are marked as lost."""
        shape = self._shape()
        if shape == self._tidy:
            return []  # nothing was useless then, and nothing is gone
        for pool, slots in self._pools.items():
            free = [slot for slot in slots.values() if slot.state is SlotState.FREE]
            if not free:
                continue
            capacity, surplus = self._demand.capacity(pool), self._count(pool) - self._demand.cap(pool)
            for slot in free:
                if capacity is None or capacity not in (0, slot.size) or surplus > 0:
                    slot.state = SlotState.GONE
                    surplus -= 1
        gone = [slot for slot in self._slots.values() if slot.state is SlotState.GONE]
        self._tidy = None if gone else shape
        return gone

    def _forget(self, slot: Slot) -> None:
        if self._slots.pop(slot.path, None) is not None:
            del self._pools[slot.pool][slot.path]
            self._used -= sizing.cost(slot.size, slot.pool.parts)

    # Inside, what there should be

    def _grow(self, *kinds: Kind) -> None:
        added = False
        while (slot := self._next_missing(kinds)) is not None and self._allocate(slot):
            added = True
        if added:
            self._on_change()

    def _next_missing(self, kinds: tuple[Kind, ...]) -> Slot | None:
        """Returns a new own slot, not yet allocated, that the plan lacks and memory allows.

        It is of the first kind that lacks any. Ranks take turns: a version needs all of them."""
        with self._lock:
            for _, pool, size, _ in self._missing(kinds):
                if self._used + sizing.cost(size) <= self.limit:
                    return self._place(pool, size)
        return None

    def _allocate(self, slot: Slot, state: SlotState = SlotState.FREE, hands: int = 1) -> bool:
        numa = self._numa.get(slot.rank, -1) if slot.tier is Tier.LOCAL else -1
        done = False
        try:
            with touch_on_node(numa):
                slot.adopt(self._ready_for(slot) or create(slot.path, slot.size, hands))
            done = True
        except OSError as error:
            log.warning("cannot allocate %d bytes for %s: %s", slot.size, slot.path.name, error)
        finally:
            with self._lock:
                if done:
                    slot.state = state
                else:
                    self._forget(slot)
                self._lock.notify_all()
        return done

    def _ready_for(self, slot: Slot) -> memoryview | None:
        """Returns the mapping of memory that was made ready and is the slot's now; None if there is none."""
        if (slot.tier, slot.kind) == (Tier.LOCAL, Kind.SNAPSHOT):
            area = self._ready.take(slot.path, slot.size)
            if area is not None:
                return area
            self._ready.discard()  # too small, so of no use to this worker
        elif self._used + self._ready.size > self.limit:
            self._ready.discard()
        return None

    def _missing(self, kinds: tuple[Kind, ...]) -> list[tuple[int, Pool, int, int]]:
        """Returns own pools that lack slots, by kind, those with the fewest first.

        Each with the number of slots, the pool, the bytes per slot, and how many are missing."""
        shape, known = self._shape(), self._lacking.get(kinds)
        if known is None or known[0] != shape or shape[3]:
            found = [each for kind in kinds for each in sorted(self._lack(kind), key=lambda each: each[0])]
            known = self._lacking[kinds] = shape, found
        return known[1]

    def _lack(self, kind: Kind) -> Iterator[tuple[int, Pool, int, int]]:
        if not self._demand.plan().fits:
            return  # saving is refused, so a slot would be of no use
        for rank in self._demand.own:
            pool = Pool(Tier.LOCAL, rank, kind)
            size, count, cap = self._demand.capacity(pool), self._count(pool), self._demand.cap(pool)
            if size and count < cap:
                yield count, pool, size, cap - count

    def _free_slot(self, pool: Pool, size: int) -> Slot | None:
        exact = pool.tier is Tier.LOCAL or (pool.kind is Kind.SNAPSHOT and pool.share is None)
        for slot in self._pools.get(pool, {}).values():
            fits = slot.size == size or (slot.size > size and not exact)
            if slot.state is SlotState.FREE and fits:
                return slot
        return None

    def _new_slot(self, pool: Pool, size: int) -> Slot:
        """Returns a new slot, which is to be allocated. Raises NoFreeSlot."""
        self.trim()
        # A restore needs the whole chain at once, however few slots training gets afterwards: only memory
        # bounds it.
        bounded = pool.tier is Tier.PEER or pool.kind is Kind.SNAPSHOT
        cap = self._demand.cap(pool)
        if bounded and self._count(pool) >= cap:
            raise NoFreeSlot(
                f"all {cap} {pool.kind.value} slots for rank {pool.rank} hold what is still needed"
            )
        capacity = size
        if pool.tier is Tier.PEER:
            capacity = max(size, self._demand.capacity(pool) or 0)
        cost = sizing.cost(capacity, pool.parts)
        if self._used + cost > self.limit:
            raise NoFreeSlot(f"{self._used} of {self.limit} bytes are in use, {cost} more do not fit")
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
        self._slots[slot.path] = slot
        self._pools.setdefault(slot.pool, {})[slot.path] = slot
        self._used += sizing.cost(slot.size, slot.pool.parts)

    def _shape(self) -> _Shape:
        slots = self._slots.values()
        idle = [slot for slot in slots if slot.state is SlotState.FREE or slot.state is SlotState.GONE]
        gone = sum(slot.state is SlotState.GONE for slot in idle)
        return self._demand.changes, self._serial, len(slots), gone, idle

    def _count(self, pool: Pool) -> int:
        return sum(slot.state is not SlotState.GONE for slot in self._pools.get(pool, {}).values())


def _readable(slot: Slot) -> bool:
    return slot.state is SlotState.SEALED and not slot.doomed


def _empty(slot: Slot) -> None:
    """Makes a slot unreadable and free. If its file is truncated or missing, it is never used again."""
    slot.seal, slot.doomed, slot.state = None, False, SlotState.GONE
    try:
        tear(slot)
        if slot.is_whole():
            slot.state = SlotState.FREE
    except OSError as error:
        log.warning("%s is given up: %s", slot.path.name, error)


def _check_header(slot: Slot, header: SlotHeader, world_size: int) -> None:
    """Raises NotASlot if the slot does not hold what was begun."""
    written = Artifact(header.rank, header.version, header.kind)
    if written != slot.artifact:
        raise NotASlot(f"it holds the {written}, not what was begun")
    if slot.kind is Kind.SNAPSHOT and header.size != slot.size:
        raise NotASlot(f"it holds {header.size} bytes, {slot.size} were reserved")
    if world_size and header.world_size != world_size:
        raise NotASlot(f"it says world size {header.world_size}, the job has {world_size}")
