"""The vault owns every slot of this worker: what is being written, what is held, what may be written next.

Memory is bounded: a slot is allocated only inside the limit, and when none is free the caller is told so at once.
Nothing here decides what may be freed; the watermark does (`reclaim.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.slot import NotASlot, read_header
from tiercheck.protocol.version import Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.vault import sizing
from tiercheck_sidecar.vault.inventory import SLOT_SUFFIX, fault, header_fault, take_inventory
from tiercheck_sidecar.vault.seal import Seal, write_seal
from tiercheck_sidecar.vault.slots import Slot, SlotState, create, remove, tear

log = logging.getLogger(__name__)


class NoFreeSlot(Exception):
    """Every slot that could be used is in use; the message is a sentence. Try again later."""


class MemoryTooSmall(Exception):
    """The memory volume cannot hold the fewest slots that saving needs; the message says what to set."""


class NotHeld(LookupError):
    """No such verified artifact is here."""


class Draft:
    """A slot that this sidecar itself fills, chunk by verified chunk."""

    def __init__(self, vault: Vault, slot: Slot, seal: Seal) -> None:
        self._vault, self._slot, self.seal = vault, slot, seal
        self._over = False
        self._stack = contextlib.ExitStack()
        self.view = self._stack.enter_context(slot.mapped(write=True))

    def keep(self) -> None:
        """The caller has verified every chunk: seal. Raises NotASlot if the content is not the artifact it claims to be."""
        reason = header_fault(self.view, self.seal)
        if reason:
            self.discard()
            raise NotASlot(reason)
        self._stack.close()
        self._vault._seal(self._slot, self.seal)
        self._over = True

    def discard(self) -> None:
        """Give the slot back. Harmless after `keep`."""
        if self._over:
            return
        self._over = True
        self._stack.close()
        self._vault._drop(self._slot)


class Vault:
    """Thread-safe. No method waits for the network; only allocation and sealing touch many bytes, outside the lock."""

    def __init__(
        self, directory: Path, limit: int, ranks: Sequence[int], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.limit = limit
        self.ranks = tuple(ranks)
        self._directory = directory
        self._on_change = on_change
        self._lock = threading.RLock()
        self._slots: dict[Path, Slot] = {}
        self._own: dict[int, int] = {}
        self._hosted: dict[int, int | None] = {}
        self._instance, self._serial = uuid.uuid4().hex[:6], 0

    def open(self) -> None:
        """Take inventory of what an earlier process left. Raises OSError if the volume cannot be used."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # the volume's root may belong to the kubelet
            self._directory.chmod(0o777)
        for slot in take_inventory(self._directory):
            self._slots[slot.path] = slot
            if slot.tier is Tier.LOCAL:
                self._own.setdefault(slot.rank, slot.size)

    # What is here

    def held(self) -> tuple[Seal, ...]:
        """Every verified artifact, oldest first."""
        with self._lock:
            seals = [slot.seal for slot in self._slots.values() if _readable(slot) and slot.seal]
        return tuple(sorted(seals, key=lambda seal: (seal.version, seal.rank)))

    def find(self, rank: int, version: Version, tier: Tier | None = None) -> Seal | None:
        with self._lock:
            slot = self._find(rank, version, tier)
            return slot.seal if slot else None

    def unfinished(self) -> set[tuple[int, Version]]:
        """What own ranks are writing, or wrote and is not sealed yet."""
        with self._lock:
            return {
                (slot.rank, Version(slot.step, slot.attempt))
                for slot in self._slots.values()
                if slot.tier is Tier.LOCAL and slot.state in (SlotState.WRITING, SlotState.SEALING) and not slot.doomed
            }

    @contextlib.contextmanager
    def pin(self, rank: int, version: Version, tier: Tier | None = None) -> Iterator[Slot]:
        """Keep an artifact from being freed while it is read. Raises NotHeld."""
        with self._lock:
            slot = self._find(rank, version, tier)
            if slot is None:
                raise NotHeld(f"rank {rank} {version} is not here")
            slot.pins += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.pins -= 1
                self._settle(slot)

    def fault(self, rank: int, version: Version, tier: Tier | None = None) -> str:
        """Read an artifact again and say what is wrong with it; empty if nothing is. Raises NotHeld, OSError."""
        with self.pin(rank, version, tier) as slot:
            return fault(slot)

    # Room

    def size_plan(self) -> sizing.Sizing:
        with self._lock:
            return sizing.plan(self.limit, self._own, self._hosted)

    def used(self) -> int:
        """Bytes of the volume taken by slots and seals."""
        with self._lock:
            return sum(sizing.cost(slot.size) for slot in self._slots.values())

    def host(self, ranks: Iterable[int]) -> None:
        """Whose copies are kept here from now on."""
        with self._lock:
            known = {slot.rank: slot.size for slot in self._slots.values() if slot.tier is Tier.PEER}
            self._hosted = {rank: self._hosted.get(rank) or known.get(rank) for rank in ranks}
        self.tidy()

    def reserve(self, rank: int, size: int) -> None:
        """Have slots of exactly `size` bytes for an own rank, pre-faulted. Raises MemoryTooSmall."""
        if rank not in self.ranks or size <= 0:
            raise ValueError(f"cannot reserve {size} bytes for rank {rank}")
        with self._lock:
            self._own[rank] = size
        fits = self.size_plan()
        if not fits.fits:
            raise MemoryTooSmall(self.too_small())
        self.tidy()

    def too_small(self) -> str:
        """Why saving is refused, with the numbers; empty if memory is large enough."""
        fits = self.size_plan()
        if fits.fits:
            return ""
        return (
            f"tiers.local.sizeLimit is {self.limit}, needed {fits.minimum} bytes ({fits.needed} to never skip a snapshot): "
            f"two slots for each of {len(self._own)} ranks here and of {len(self._hosted)} ranks hosted for other workers. "
            "Raise tiers.local.sizeLimit and the sidecar's memory limit"
        )

    def tidy(self) -> None:
        """Bring the slots to the planned number and size, as far as memory is free. Slow: pre-faults.

        Says that something changed only if it did: those who are told call this again.
        """
        self._trim()
        added = False
        while (slot := self._next_missing()) is not None and self._allocate(slot):
            added = True
        if added:
            self._on_change()

    # Own ranks: the trainer writes

    def begin(self, rank: int, version: Version) -> Path:
        """A slot for the trainer to write. Raises NoFreeSlot, MemoryTooSmall."""
        with self._lock:
            slot = self._free_slot(rank, Tier.LOCAL, self._own.get(rank, 0))
            if slot is None:
                if self.too_small():
                    raise MemoryTooSmall(self.too_small())
                raise NoFreeSlot("no slot is free: older snapshots are still needed or being copied")
            slot.state, slot.step, slot.attempt = SlotState.WRITING, version.step, version.attempt
            return slot.path

    def complete(self, path: Path, world_size: int) -> None:
        """The trainer has written the slot; `seal` must follow. Raises NotASlot; then the slot is free again."""
        slot = self._writing(path)
        with slot.mapped() as view:
            try:
                header = read_header(view)
                wrong = ""
                if (header.rank, header.version) != (slot.rank, Version(slot.step, slot.attempt)):
                    wrong = f"it holds rank {header.rank} {header.version}, not what was begun"
                elif header.size != slot.size:
                    wrong = f"it holds {header.size} bytes, {slot.size} were reserved"
                elif world_size and header.world_size != world_size:
                    wrong = f"it says world size {header.world_size}, the job has {world_size}"
            except NotASlot as error:
                wrong = str(error)
        if wrong:
            self._drop(slot)
            raise NotASlot(wrong)
        with self._lock:
            slot.state = SlotState.SEALING

    def seal(self, path: Path) -> Seal | None:
        """Digest and seal a completed slot; None if it could not be (it is free again). Slow: reads every byte."""
        slot = self._slots[path]
        try:
            with slot.mapped() as view:
                header = read_header(view)
                seal = Seal(slot.rank, header.version, header.world_size, Tier.LOCAL, digest(view))
            self._seal(slot, seal)
        except (OSError, NotASlot) as error:
            log.warning("%s could not be sealed: %s", path.name, error)
            self._drop(slot)
            return None
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

    # Copies and restored artifacts: this sidecar writes

    def draft(self, seal: Seal) -> Draft:
        """A slot to receive an artifact into. Raises NoFreeSlot."""
        with self._lock:
            if seal.tier is Tier.PEER and seal.rank in self._hosted:
                self._hosted[seal.rank] = seal.digests.size
            for slot in self._slots.values():
                if slot.state is SlotState.WRITING and (slot.rank, slot.tier) == (seal.rank, seal.tier):
                    same = Version(slot.step, slot.attempt) == seal.version
                    if same and seal.tier is Tier.PEER:
                        raise NoFreeSlot("this artifact is being received already")
            slot = self._obtain(seal.rank, seal.tier, seal.digests.size)
            if slot.state is SlotState.FREE:
                slot.state = SlotState.WRITING
            slot.step, slot.attempt = seal.version.step, seal.version.attempt
        if slot.state is SlotState.ALLOCATING and not self._allocate(slot, SlotState.WRITING):
            raise NoFreeSlot("the memory volume is full")
        return Draft(self, slot, seal)

    # Freeing

    def free(self, unwanted: Callable[[Seal], bool]) -> tuple[Seal, ...]:
        """Free every held artifact that `unwanted` names, those in use as soon as they are not. Returns them."""
        with self._lock:
            doomed = [slot for slot in self._slots.values() if _readable(slot) and slot.seal and unwanted(slot.seal)]
            seals = tuple(slot.seal for slot in doomed if slot.seal)
            for slot in doomed:
                slot.doomed = True
                self._settle(slot)
        if doomed:
            self._trim()
            self._on_change()
        return seals

    # Inside (the lock is held where a name says nothing else)

    def _find(self, rank: int, version: Version, tier: Tier | None) -> Slot | None:
        for slot in self._slots.values():
            seal = slot.seal
            if _readable(slot) and seal and (seal.rank, seal.version) == (rank, version) and tier in (None, seal.tier):
                return slot
        return None

    def _writing(self, path: Path) -> Slot:
        with self._lock:
            slot = self._slots.get(path)
            if slot is None or slot.state is not SlotState.WRITING or slot.tier is not Tier.LOCAL:
                raise NotASlot(f"{path.name} was not begun here")
            return slot

    def _free_slot(self, rank: int, tier: Tier, size: int) -> Slot | None:
        for slot in self._slots.values():
            if slot.state is SlotState.FREE and (slot.rank, slot.tier, slot.size) == (rank, tier, size):
                return slot
        return None

    def _obtain(self, rank: int, tier: Tier, size: int) -> Slot:
        slot = self._free_slot(rank, tier, size)
        if slot is not None:
            return slot
        if tier is Tier.LOCAL:
            self._own.setdefault(rank, size)
        self._trim()
        cap = self._cap(tier)
        if self._count(rank, tier) >= cap:
            raise NoFreeSlot(f"all {cap} slots for rank {rank} hold artifacts that are still needed")
        if self.used() + sizing.cost(size) > self.limit:
            raise NoFreeSlot(f"{self.used()} of {self.limit} bytes are in use, {sizing.cost(size)} more do not fit")
        return self._place(rank, tier, size)

    def _cap(self, tier: Tier) -> int:
        if tier is Tier.PEER:
            return sizing.HOSTED_SLOTS
        return sizing.plan(self.limit, self._own, self._hosted).own_slots or sizing.OWN_SLOTS_MIN

    def _count(self, rank: int, tier: Tier) -> int:
        return sum((slot.rank, slot.tier) == (rank, tier) for slot in self._slots.values())

    def _place(self, rank: int, tier: Tier, size: int) -> Slot:
        self._serial += 1
        word = "own" if tier is Tier.LOCAL else "copy"
        path = self._directory / f"{word}-{rank}-{self._instance}-{self._serial}{SLOT_SUFFIX}"
        slot = Slot(path=path, size=size, rank=rank, tier=tier)
        self._slots[path] = slot
        return slot

    def _allocate(self, slot: Slot, state: SlotState = SlotState.FREE) -> bool:
        """Not under the lock."""
        try:
            create(slot.path, slot.size)
        except OSError as error:
            log.warning("cannot allocate %d bytes for %s: %s", slot.size, slot.path.name, error)
            with self._lock:
                self._slots.pop(slot.path, None)
            return False
        with self._lock:
            slot.state = state
        return True

    def _next_missing(self) -> Slot | None:
        """An own slot that the plan wants and memory allows, entered but not yet allocated."""
        with self._lock:
            if not self.size_plan().fits:
                return None  # saving is refused, so a slot would only raise hopes
            cap = self._cap(Tier.LOCAL)
            for rank, size in self._own.items():
                if self._count(rank, Tier.LOCAL) < cap and self.used() + sizing.cost(size) <= self.limit:
                    return self._place(rank, Tier.LOCAL, size)
        return None

    def _seal(self, slot: Slot, seal: Seal) -> None:
        write_seal(slot.path, seal)
        with self._lock:
            slot.seal, slot.state = seal, SlotState.SEALED
            self._settle(slot)
        self._on_change()

    def _drop(self, slot: Slot) -> None:
        with self._lock:
            if slot.state in (SlotState.WRITING, SlotState.SEALING):
                tear(slot)
                slot.state = SlotState.FREE
        self._on_change()

    def _settle(self, slot: Slot) -> None:
        """Free a doomed slot that nobody uses."""
        if slot.doomed and slot.pins == 0 and slot.state is SlotState.SEALED:
            tear(slot)
            slot.seal, slot.doomed, slot.state = None, False, SlotState.FREE

    def _trim(self) -> None:
        """Remove free slots that the plan has no use for, and lost ones. The files go outside the lock if it can be."""
        with self._lock:
            cap = self._cap(Tier.LOCAL)
            for slot in self._slots.values():
                if slot.state is SlotState.FREE and self._useless(slot, cap):
                    slot.state = SlotState.GONE
            gone = [slot for slot in self._slots.values() if slot.state is SlotState.GONE]
        for slot in gone:
            remove(slot.path)
            with self._lock:
                self._slots.pop(slot.path, None)

    def _useless(self, slot: Slot, cap: int) -> bool:
        if slot.tier is Tier.PEER:
            return slot.rank not in self._hosted or self._hosted[slot.rank] not in (None, slot.size)
        rest = sum(
            (other.rank, other.tier) == (slot.rank, slot.tier) and other.state is not SlotState.GONE
            for other in self._slots.values()
        )
        return self._own.get(slot.rank) != slot.size or rest > cap


def _readable(slot: Slot) -> bool:
    return slot.state is SlotState.SEALED and not slot.doomed
