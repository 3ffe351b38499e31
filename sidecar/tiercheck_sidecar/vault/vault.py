"""The vault owns every slot of this worker: what is being written, what is held, what may be written next.

Memory is bounded: a slot is allocated only inside the limit, and when none is free the caller is told so at once.
Nothing here decides what may be freed; the watermark does (`reclaim.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tiercheck.failpoints import failpoint
from tiercheck.protocol import sizing
from tiercheck.protocol.artifact import Artifact, Kind, Share
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.slot import NotASlot, SlotHeader, read_header
from tiercheck.protocol.version import Version
from tiercheck_sidecar.tags import Tagger, digest_and_tag
from tiercheck_sidecar.vault.demand import Demand
from tiercheck_sidecar.vault.draft import Draft
from tiercheck_sidecar.vault.errors import MemoryTooSmall, NoDeltas, NoFreeSlot, NotHeld
from tiercheck_sidecar.vault.inventory import SLOT_SUFFIX, fault, take_inventory
from tiercheck_sidecar.vault.numa import near
from tiercheck_sidecar.vault.refusals import deltas_refused, saving_refused
from tiercheck_sidecar.vault.seal import Seal, write_seal
from tiercheck_sidecar.vault.slots import Pool, Slot, SlotState, create, remove, tear

log = logging.getLogger(__name__)


class Vault:
    """Thread-safe. No method waits for the network; only allocation and sealing touch many bytes, outside the lock."""

    def __init__(
        self,
        directory: Path,
        limit: int,
        ranks: Sequence[int],
        on_change: Callable[[], None] = lambda: None,
        tagger: Callable[[Artifact], Tagger | None] = lambda _: None,
    ) -> None:
        """`tagger`: makes the tags of an own artifact that is sealed now; None if they are not worth it."""
        self.limit = limit
        self.ranks = tuple(ranks)
        """The worker's own; none while this is a spare. See `identify`."""
        self._directory = directory
        self._on_change, self._tagger = on_change, tagger
        self._lock = threading.RLock()
        self._slots: dict[Path, Slot] = {}
        self._demand = Demand(limit)
        self._nodes: dict[int, int] = {}
        """NUMA nodes of own ranks' devices."""
        self._instance, self._serial = uuid.uuid4().hex[:6], 0

    def open(self) -> None:
        """Take inventory of what an earlier process left. Raises OSError if the volume cannot be used."""
        failpoint("before-inventory")
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # the volume's root may belong to the kubelet
            self._directory.chmod(0o777)
        for slot in take_inventory(self._directory):
            self._slots[slot.path] = slot
            self._demand.found(slot.pool, slot.size)

    # What is here

    def held(self) -> tuple[Seal, ...]:
        """Every verified artifact and parity block, oldest first."""
        with self._lock:
            seals = [slot.seal for slot in self._slots.values() if _readable(slot) and slot.seal]
        return tuple(sorted(seals, key=_age))

    def find(self, rank: int, version: Version, tier: Tier | None = None, kind: Kind = Kind.SNAPSHOT) -> Seal | None:
        """A whole artifact; never a parity block."""
        with self._lock:
            slot = self._find(rank, version, tier, kind)
            return slot.seal if slot else None

    def find_share(self, share: Share, version: Version, kind: Kind) -> Seal | None:
        """A complete parity block."""
        with self._lock:
            slot = self._find(share.ranks[0], version, Tier.PEER, kind, share)
            return slot.seal if slot else None

    def own(self, rank: int) -> set[Artifact]:
        """What an own rank is writing, wrote or has sealed."""
        used = (SlotState.WRITING, SlotState.SEALING, SlotState.SEALED)
        with self._lock:
            return {
                Artifact(rank, slot.seal.version if slot.seal else Version(slot.step, slot.attempt), slot.kind)
                for slot in self._slots.values()
                if slot.rank == rank and slot.tier is Tier.LOCAL and slot.state in used and not slot.doomed
            }

    def unfinished(self) -> set[Artifact]:
        """What own ranks are writing, or wrote and is not sealed yet."""
        with self._lock:
            return {
                Artifact(slot.rank, Version(slot.step, slot.attempt), slot.kind)
                for slot in self._slots.values()
                if slot.tier is Tier.LOCAL and slot.state in (SlotState.WRITING, SlotState.SEALING) and not slot.doomed
            }

    def pin(
        self, rank: int, version: Version, tier: Tier | None = None, kind: Kind = Kind.SNAPSHOT
    ) -> contextlib.AbstractContextManager[Slot]:
        """Keep a whole artifact from being freed while it is read. Raises NotHeld."""
        return self._pin(rank, version, tier, kind, None)

    def pin_share(self, share: Share, version: Version, kind: Kind) -> contextlib.AbstractContextManager[Slot]:
        """As `pin`, for a parity block."""
        return self._pin(share.ranks[0], version, Tier.PEER, kind, share)

    def fault(self, rank: int, version: Version, tier: Tier | None = None, kind: Kind = Kind.SNAPSHOT) -> str:
        """Read an artifact again and say what is wrong with it; empty if nothing is. Raises NotHeld, OSError."""
        with self.pin(rank, version, tier, kind) as slot:
            return fault(slot)

    def fault_share(self, share: Share, version: Version, kind: Kind) -> str:
        """As `fault`, for a parity block."""
        with self.pin_share(share, version, kind) as slot:
            return fault(slot)

    # Room

    def size_plan(self) -> sizing.Sizing:
        with self._lock:
            return self._demand.plan()

    def used(self) -> int:
        """Bytes of the volume taken by slots and seals."""
        with self._lock:
            return sum(_cost(slot) for slot in self._slots.values())

    def reserved(self, rank: int) -> sizing.Room | None:
        """What an own rank asked for, as far as it is known."""
        with self._lock:
            return self._demand.own.get(rank)

    def identify(self, ranks: Sequence[int]) -> None:
        """This worker has these ranks from now on. What lies here of others, own ones until now, stays as it is, and no slots are
        kept ready for it.
        """
        with self._lock:
            self.ranks = tuple(ranks)
            self._demand.only(self.ranks)

    def host(self, ranks: Iterable[int], shares: Iterable[Share] = ()) -> None:
        """Whose copies and which parity blocks are kept here from now on."""
        with self._lock:
            known = [(slot.pool, slot.size) for slot in self._slots.values() if slot.tier is Tier.PEER]
            self._demand.host(ranks, shares, known)
        self.tidy()

    def expect(self, cadence: int, guess: sizing.Room) -> None:
        """The coordinator's word: steps between snapshots, and the largest slots that any rank of the job has."""
        with self._lock:
            news = self._demand.expect(cadence, guess)
        if news:
            self.tidy()
            self._on_change()

    def reserve(self, rank: int, size: int, delta_size: int | None = 0, numa: int = -1) -> None:
        """Have snapshot slots of exactly `size` bytes for an own rank, pre-faulted, and delta slots of `delta_size` (0: none; None: not known yet),
        which `prepare` allocates, on that NUMA node (-1: anywhere). Raises MemoryTooSmall.
        """
        if rank not in self.ranks or size <= 0 or (delta_size or 0) < 0:
            raise ValueError(f"cannot reserve {size} and {delta_size} bytes for rank {rank}")
        with self._lock:
            self._nodes[rank] = numa
            self._demand.reserve(rank, size, delta_size)
        reason = self.too_small()
        if reason:
            raise MemoryTooSmall(reason)
        self.tidy()

    def too_small(self) -> str:
        """Why saving is refused, with the numbers; empty if memory is large enough."""
        with self._lock:
            return saving_refused(self._demand)

    def no_deltas(self) -> str:
        """Why ranks that want to take deltas cannot, with the numbers; empty if they can, or none wants to."""
        with self._lock:
            return deltas_refused(self._demand)

    def tidy(self) -> None:
        """Bring the snapshot slots to the planned number and size, as far as memory is free. Slow: pre-faults.

        Says that something changed only if it did: those who are told call this again.
        """
        self._trim()
        self._grow(Kind.SNAPSHOT)

    def prepare(self) -> None:
        """The same for the delta slots of own ranks. Apart, so that no trainer waits for it."""
        self._grow(Kind.DELTA)

    # Own ranks: the trainer writes

    def begin(self, rank: int, version: Version, kind: Kind = Kind.SNAPSHOT, size: int = 0) -> Path:
        """A slot for the trainer to write at most `size` bytes (0: as many as it reserved). Raises NoFreeSlot, MemoryTooSmall."""
        pool = Pool(Tier.LOCAL, rank, kind)
        with self._lock:
            capacity = self._demand.capacity(pool) or 0
            if size > capacity > 0:
                raise NoFreeSlot(f"the {kind.value} has {size} bytes, {capacity} were reserved")
            slot = self._free_slot(pool, capacity)
            if slot is None:
                self._refuse(kind)
                raise NoFreeSlot(f"no slot is free: older {kind.value}s are still needed or being copied")
            slot.state, slot.step, slot.attempt = SlotState.WRITING, version.step, version.attempt
            return slot.path

    def complete(self, path: Path, world_size: int) -> Kind:
        """The trainer has written the slot; `seal` must follow. Raises NotASlot; then the slot is free again."""
        slot = self._writing(path)
        try:
            with slot.mapped() as view:
                wrong = _unlike(slot, read_header(view), world_size)
        except (OSError, NotASlot) as error:
            wrong = str(error)
        except BaseException:
            self._drop(slot)
            raise
        if wrong:
            self._drop(slot)
            raise NotASlot(wrong)
        with self._lock:
            slot.state = SlotState.SEALING
        return slot.kind

    def seal(self, path: Path) -> Seal | None:
        """Digest and seal a completed slot; None if it could not be (it is free again). Slow: reads every byte."""
        slot = self._slots[path]
        try:
            with slot.mapped() as view:
                header = read_header(view)
                tagger = self._tagger(Artifact(slot.rank, header.version, slot.kind))
                digests, tags = digest_and_tag(view[: header.size], tagger)
            seal = Seal(slot.rank, header.version, header.world_size, Tier.LOCAL, digests, slot.kind, tags=tags)
            self._seal(slot, seal)
        except (OSError, NotASlot) as error:
            log.warning("%s could not be sealed: %s", path.name, error)
            self._drop(slot)
            return None
        except BaseException:
            self._drop(slot)
            raise
        return seal

    def abandon(self, path: Path) -> None:
        """The trainer says that it will not complete the slot. Raises NotASlot."""
        self._drop(self._writing(path))

    def lose(self, path: Path) -> None:
        """The trainer is gone, or silent: it may still be writing, so the file is never used again."""
        with self._lock:
            slot = self._slots.get(path)
            if slot is None or slot.state is not SlotState.WRITING:
                return
            slot.state = SlotState.GONE
        self._trim()

    # Copies, parity blocks and restored artifacts: this sidecar writes

    def draft(self, seal: Seal) -> Draft:
        """A slot to receive an artifact into, or to fold a parity block in. Raises NoFreeSlot, OSError."""
        pool = Pool(seal.tier, seal.rank, seal.kind, seal.share)
        with self._lock:
            if seal.tier is Tier.PEER and any(
                slot.state is SlotState.WRITING
                and slot.pool == pool
                and Version(slot.step, slot.attempt) == seal.version
                for slot in self._slots.values()
            ):
                raise NoFreeSlot("this artifact is being received already")
            with self._demand.learning(pool, seal.digests.size):
                slot = self._obtain(pool, seal.digests.size)
            if slot.state is SlotState.FREE:
                slot.state = SlotState.WRITING
            slot.step, slot.attempt = seal.version.step, seal.version.attempt
        if slot.state is SlotState.ALLOCATING and not self._allocate(slot, SlotState.WRITING):
            raise NoFreeSlot("the memory volume is full")
        try:
            return Draft(slot, seal, self._seal, self._drop)
        except BaseException:
            self._drop(slot)
            raise

    def leave(self, artifact: Artifact) -> None:
        """Whoever fills a slot with this own artifact may never come to an end, and may still be writing: the file is never used again."""
        with self._lock:
            for slot in self._slots.values():
                filling = slot.state is SlotState.WRITING and slot.tier is Tier.LOCAL
                if filling and Artifact(slot.rank, Version(slot.step, slot.attempt), slot.kind) == artifact:
                    slot.state = SlotState.GONE
        self._trim()

    # Freeing

    def free(self, unwanted: Callable[[Seal], bool]) -> tuple[Seal, ...]:
        """Free every held artifact that `unwanted` names, those in use as soon as they are not. Returns them."""
        with self._lock:
            doomed = [slot for slot in self._slots.values() if _readable(slot) and slot.seal and unwanted(slot.seal)]
            seals = tuple(slot.seal for slot in doomed if slot.seal)
            for slot in doomed:
                slot.doomed = True
                self._settle(slot)
                failpoint("mid-reclaim")
        if doomed:
            self._trim()
            self._on_change()
        return seals

    # Inside (the lock is held where a name says nothing else)

    @contextlib.contextmanager
    def _pin(self, rank: int, version: Version, tier: Tier | None, kind: Kind, share: Share | None) -> Iterator[Slot]:
        with self._lock:
            slot = self._find(rank, version, tier, kind, share)
            if slot is None:
                raise NotHeld(f"the {kind.value} of rank {rank}, {version}, is not here")
            slot.pins += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.pins -= 1
                self._settle(slot)

    def _find(
        self, rank: int, version: Version, tier: Tier | None, kind: Kind, share: Share | None = None
    ) -> Slot | None:
        for slot in self._slots.values():
            seal, pool = slot.seal, slot.pool
            if seal is None or seal.version != version or (pool.rank, pool.kind, pool.share) != (rank, kind, share):
                continue
            if tier in (None, pool.tier) and _readable(slot):
                return slot
        return None

    def _writing(self, path: Path) -> Slot:
        with self._lock:
            slot = self._slots.get(path)
            if slot is None or slot.state is not SlotState.WRITING or slot.tier is not Tier.LOCAL:
                raise NotASlot(f"{path.name} was not begun here")
            return slot

    def _refuse(self, kind: Kind) -> None:
        reason = saving_refused(self._demand)
        if reason:
            raise MemoryTooSmall(reason)
        if kind is Kind.DELTA and self._demand.plan().delta_slots == 0:
            raise NoDeltas(deltas_refused(self._demand) or "no delta slots were reserved")

    def _free_slot(self, pool: Pool, size: int) -> Slot | None:
        exact = pool.tier is Tier.LOCAL or (pool.kind is Kind.SNAPSHOT and pool.share is None)
        for slot in self._slots.values():
            fits = slot.size == size or (slot.size > size and not exact)
            if slot.state is SlotState.FREE and slot.pool == pool and fits:
                return slot
        return None

    def _obtain(self, pool: Pool, size: int) -> Slot:
        slot = self._free_slot(pool, size)
        if slot is not None:
            return slot
        self._trim()
        # A restore needs the whole chain at once, however few slots training gets afterwards: only memory bounds it.
        bounded = pool.tier is Tier.PEER or pool.kind is Kind.SNAPSHOT
        cap = self._demand.cap(pool)
        if bounded and self._count()[pool] >= cap:
            raise NoFreeSlot(f"all {cap} {pool.kind.value} slots for rank {pool.rank} hold what is still needed")
        capacity = size
        if pool.tier is Tier.PEER:
            capacity = max(size, self._demand.capacity(pool) or 0)
        cost = sizing.cost(capacity, pool.parts)
        if self.used() + cost > self.limit:
            raise NoFreeSlot(f"{self.used()} of {self.limit} bytes are in use, {cost} more do not fit")
        return self._place(pool, capacity)

    def _count(self) -> Counter[Pool]:
        return Counter(slot.pool for slot in self._slots.values() if slot.state is not SlotState.GONE)

    def _place(self, pool: Pool, size: int) -> Slot:
        self._serial += 1
        word = "own" if pool.tier is Tier.LOCAL else "parity" if pool.share else "copy"
        what = "delta-" if pool.kind is Kind.DELTA else ""
        path = self._directory / f"{word}-{what}{pool.rank}-{self._instance}-{self._serial}{SLOT_SUFFIX}"
        slot = Slot(path=path, size=size, pool=pool)
        self._slots[path] = slot
        return slot

    def _allocate(self, slot: Slot, state: SlotState = SlotState.FREE) -> bool:
        """Not under the lock."""
        try:
            with near(self._nodes.get(slot.rank, -1) if slot.tier is Tier.LOCAL else -1):
                slot.adopt(create(slot.path, slot.size))
        except OSError as error:
            log.warning("cannot allocate %d bytes for %s: %s", slot.size, slot.path.name, error)
            with self._lock:
                self._slots.pop(slot.path, None)
            return False
        except BaseException:
            with self._lock:
                self._slots.pop(slot.path, None)
            raise
        with self._lock:
            slot.state = state
        return True

    def _grow(self, kind: Kind) -> None:
        """Not under the lock."""
        added = False
        while (slot := self._next_missing(kind)) is not None and self._allocate(slot):
            added = True
        if added:
            self._on_change()

    def _next_missing(self, kind: Kind) -> Slot | None:
        """An own slot that the plan wants and memory allows, entered but not yet allocated."""
        with self._lock:
            if not self._demand.plan().fits:
                return None  # saving is refused, so a slot would only raise hopes
            count = self._count()
            for rank in self._demand.own:
                pool = Pool(Tier.LOCAL, rank, kind)
                size = self._demand.capacity(pool)
                if not size or count[pool] >= self._demand.cap(pool):
                    continue
                if self.used() + sizing.cost(size) <= self.limit:
                    return self._place(pool, size)
        return None

    def _seal(self, slot: Slot, seal: Seal) -> None:
        if slot.state is SlotState.GONE:
            raise OSError(errno.ESTALE, f"{slot.path.name} was given up")
        write_seal(slot.path, seal)
        failpoint("after-seal")
        with self._lock:
            slot.seal, slot.state = seal, SlotState.SEALED
            self._settle(slot)
        self._on_change()

    def _drop(self, slot: Slot) -> None:
        with self._lock:
            if slot.state in (SlotState.WRITING, SlotState.SEALING):
                slot.state = _emptied(slot)
        self._on_change()

    def _settle(self, slot: Slot) -> None:
        """Free a doomed slot that nobody uses."""
        if slot.doomed and slot.pins == 0 and slot.state is SlotState.SEALED:
            slot.seal, slot.doomed, slot.state = None, False, _emptied(slot)

    def _trim(self) -> None:
        """Remove free slots that the plan has no use for, and lost ones. The files go outside the lock if it can be."""
        with self._lock:
            count = self._count()
            for slot in self._slots.values():
                if slot.state is SlotState.FREE and self._useless(slot, count[slot.pool]):
                    slot.state = SlotState.GONE
                    count[slot.pool] -= 1
            gone = [slot for slot in self._slots.values() if slot.state is SlotState.GONE]
        for slot in gone:
            try:
                remove(slot.path)
            except OSError as error:  # a trainer put something else in its place; it holds up no other slot
                log.warning("%s cannot be removed: %s", slot.path.name, error)
            slot.unmap()
            with self._lock:
                self._slots.pop(slot.path, None)

    def _useless(self, slot: Slot, count: int) -> bool:
        capacity = self._demand.capacity(slot.pool)
        return capacity is None or capacity not in (0, slot.size) or count > self._demand.cap(slot.pool)


def _age(seal: Seal) -> tuple[int, int, int, str, bool]:
    version = seal.version
    return version.step, version.attempt, seal.rank, seal.kind, seal.share is not None


def _readable(slot: Slot) -> bool:
    return slot.state is SlotState.SEALED and not slot.doomed


def _emptied(slot: Slot) -> SlotState:
    """Make a slot that is given back unreadable. What becomes of it: one whose file was cut off, or taken away, is never used again."""
    try:
        tear(slot)
        return SlotState.FREE if slot.is_whole() else SlotState.GONE
    except OSError as error:
        log.warning("%s is given up: %s", slot.path.name, error)
        return SlotState.GONE


def _cost(slot: Slot) -> int:
    return sizing.cost(slot.size, slot.pool.parts)


def _unlike(slot: Slot, header: SlotHeader, world_size: int) -> str:
    """Why the slot does not hold what was begun; empty if it does."""
    begun = Artifact(slot.rank, Version(slot.step, slot.attempt), slot.kind)
    written = Artifact(header.rank, header.version, header.kind)
    if written != begun:
        return f"it holds the {written}, not what was begun"
    if slot.kind is Kind.SNAPSHOT and header.size != slot.size:
        return f"it holds {header.size} bytes, {slot.size} were reserved"
    if world_size and header.world_size != world_size:
        return f"it says world size {header.world_size}, the job has {world_size}"
    return ""
