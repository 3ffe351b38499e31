"""Owns every slot of this worker: what is written, what is held, what may be written next.

Memory is bounded: a slot is allocated only inside the limit, and when none is free the caller is told so at
once. Nothing here decides what may be freed; the watermark does (`reclaim.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts import sizing
from tiercheck.protocol.artifacts.slot import NotASlot, SlotHeader, read_header
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_sidecar.vault.demand import deltas_refused, saving_refused
from tiercheck_sidecar.vault.draft import SlotDraft
from tiercheck_sidecar.vault.inventory import fault, take_inventory
from tiercheck_sidecar.vault.pages import step_back, touch_on_node
from tiercheck_sidecar.vault.seal import Seal, write_seal
from tiercheck_sidecar.vault.slot_table import Guarded, SlotTable, remove_files
from tiercheck_sidecar.vault.slots import MemoryTooSmall, NoFreeSlot, Pool, Slot, SlotState, create
from tiercheck_sidecar.vault.stock import NOTHING, MemoryStock, Where, where
from tiercheck_sidecar.vault.tags import Tagger, digest_and_tag

log = logging.getLogger(__name__)


class Vault:
    """Thread-safe. No method waits for the network; only allocation and sealing touch many bytes, outside the
    lock.

    The table of slots is to be had under the lock only: what needs the lock is a method of it.
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
        """`tagger`: makes the tags of an own artifact that is sealed now; None if they are not worth it.
        `instance`: tells this vault's files from those of an earlier one in this place. `hands`: threads that
        allocate slots."""
        self.limit = limit
        self.ranks = tuple(ranks)
        """The worker's own; none while this is a spare. See `identify`."""
        self._directory = directory
        self._on_change, self._tagger, self._hands = on_change, tagger, hands
        self._table = Guarded(SlotTable(directory, limit, instance or uuid.uuid4().hex[:6]))

    def open(self) -> None:
        """Take inventory of what an earlier process left. Raises OSError if the volume cannot be used."""
        failpoint("before-inventory")
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # the volume's root may belong to the kubelet
            self._directory.chmod(0o777)
        found = take_inventory(self._directory)
        with self._table as table:
            table.enter(found)

    # What is here

    def held(self) -> tuple[Seal, ...]:
        """Every verified artifact and parity block, oldest first."""
        with self._table as table:
            return table.stock.seals()

    def stocks(self) -> Mapping[Where, MemoryStock]:
        """The same as versions, by place."""
        with self._table as table:
            return table.stock.places()

    def own_stock(self, rank: int) -> MemoryStock:
        """What lies in own slots of a rank."""
        return self.stocks().get(Where(Tier.LOCAL, rank), NOTHING)

    def own_artifacts(self, rank: int) -> dict[Artifact, int]:
        """The same, with bytes."""
        place = Where(Tier.LOCAL, rank)
        return {seal.artifact: seal.digests.size for seal in self.held() if where(seal) == place}

    def find(
        self, rank: int, version: Version, tier: Tier | None = None, kind: Kind = Kind.SNAPSHOT
    ) -> Seal | None:
        """A whole artifact; never a parity block."""
        with self._table as table:
            slot = table.find(rank, version, tier, kind)
            return slot.seal if slot else None

    def find_share(self, share: Share, version: Version, kind: Kind) -> Seal | None:
        """A complete parity block."""
        with self._table as table:
            slot = table.find(share.ranks[0], version, Tier.PEER, kind, share)
            return slot.seal if slot else None

    def own(self, rank: int) -> set[Artifact]:
        """What an own rank is writing, wrote or has sealed."""
        with self._table as table:
            return table.artifacts(SlotState.WRITING, SlotState.SEALING, SlotState.SEALED, of=rank)

    def unfinished(self) -> set[Artifact]:
        """What own ranks are writing, or wrote and is not sealed yet."""
        with self._table as table:
            return table.artifacts(SlotState.WRITING, SlotState.SEALING)

    def pin(
        self, rank: int, version: Version, tier: Tier | None = None, kind: Kind = Kind.SNAPSHOT
    ) -> contextlib.AbstractContextManager[Slot]:
        """Keep a whole artifact from being freed while it is read. Raises NotHeld."""
        return self._pin(rank, version, tier, kind, None)

    def pin_share(
        self, share: Share, version: Version, kind: Kind
    ) -> contextlib.AbstractContextManager[Slot]:
        """As `pin`, for a parity block."""
        return self._pin(share.ranks[0], version, Tier.PEER, kind, share)

    def fault(self, rank: int, version: Version, tier: Tier | None = None, kind: Kind = Kind.SNAPSHOT) -> str:
        """Read an artifact again and say what is wrong with it; empty if nothing is. Raises NotHeld,
        OSError.
        """
        with self.pin(rank, version, tier, kind) as slot:
            return fault(slot)

    def fault_share(self, share: Share, version: Version, kind: Kind) -> str:
        """As `fault`, for a parity block."""
        with self.pin_share(share, version, kind) as slot:
            return fault(slot)

    # Room

    def size_plan(self) -> sizing.Sizing:
        with self._table as table:
            return table.demand.plan()

    def used(self) -> int:
        """Bytes of the volume taken by slots and seals."""
        with self._table as table:
            return table.used()

    def reserved(self, rank: int) -> sizing.Room | None:
        """What an own rank asked for, as far as it is known."""
        with self._table as table:
            return table.demand.own.get(rank)

    def identify(self, ranks: Sequence[int]) -> None:
        """This worker has these ranks from now on. What lies here of others, own ones until now, stays as it
        is, and no slots are kept ready for it.
        """
        with self._table as table:
            self.ranks = tuple(ranks)
            table.demand.only(self.ranks)

    def host(self, ranks: Iterable[int], shares: Iterable[Share] = ()) -> None:
        """Whose copies and which parity blocks are kept here from now on."""
        with self._table as table:
            known = [(slot.pool, slot.size) for slot in table.slots.values() if slot.tier is Tier.PEER]
            table.demand.host(ranks, shares, known)
        self.tidy()

    def expect(self, cadence: int, guess: sizing.Room) -> None:
        """The coordinator's word: steps between snapshots, and the largest slots that any rank of the job
        has."""
        with self._table as table:
            news = table.demand.expect(cadence, guess)
        if news:
            self.tidy()
            self._on_change()

    def reserve(self, rank: int, size: int, delta_size: int | None = 0, numa: int = -1) -> None:
        """Have snapshot slots of exactly `size` bytes for an own rank, pre-faulted, and delta slots of
        `delta_size` (0: none; None: not known yet), which `prepare` allocates, on that NUMA node (-1:
        anywhere). Raises MemoryTooSmall.
        """
        if rank not in self.ranks or size <= 0 or (delta_size or 0) < 0:
            raise ValueError(f"cannot reserve {size} and {delta_size} bytes for rank {rank}")
        with self._table as table:
            table.numa[rank] = numa
            table.demand.reserve(rank, size, delta_size)
        reason = self.too_small()
        if reason:
            raise MemoryTooSmall(reason)
        self.tidy()
        # `prepare` may be making one of them, and a trainer that was told they are there would find none.
        snapshots = Pool(Tier.LOCAL, rank, Kind.SNAPSHOT)
        self._table.wait_until(lambda table: not table.is_making(snapshots))

    def too_small(self) -> str:
        """Why saving is refused, with the numbers; empty if memory is large enough."""
        with self._table as table:
            return saving_refused(table.demand)

    def no_deltas(self) -> str:
        """Why ranks that want to take deltas cannot, with the numbers; empty if they can, or none wants
        to.
        """
        with self._table as table:
            return deltas_refused(table.demand)

    def tidy(self) -> None:
        """Bring the snapshot slots to the planned number and size, as far as memory is free. Slow:
        pre-faults.

        Says that something changed only if it did: those who are told call this again.
        """
        self.trim()
        self._grow(Kind.SNAPSHOT)

    def trim(self) -> None:
        """Remove free slots that the plan has no use for, and lost ones. Never slow."""
        with self._table as table:
            gone = table.retire()
        remove_files(gone)
        if gone:
            with self._table as table:
                table.forget(gone)

    def prepare(self, *, deltas: bool = True) -> None:
        """Allocate what is missing for own ranks, on several cores but behind whoever else wants them. Apart,
        so that no trainer waits for it."""
        kinds = (Kind.SNAPSHOT, Kind.DELTA) if deltas else (Kind.SNAPSHOT,)
        with self._table as table:
            missing = table.missing(kinds)
        hands = min(self._hands, missing)
        if not missing:
            return
        if hands < 2:
            self._grow(*kinds)
            return
        with ThreadPoolExecutor(hands, "prepare", initializer=step_back) as pool:
            for done in [pool.submit(self._grow, *kinds) for _ in range(hands)]:
                done.result()

    # Own ranks: the trainer writes

    def begin(self, rank: int, version: Version, kind: Kind = Kind.SNAPSHOT, size: int = 0) -> Path:
        """A slot for the trainer to write at most `size` bytes (0: as many as it reserved). Raises
        NoFreeSlot, MemoryTooSmall."""
        with self._table as table:
            return table.begin(rank, version, kind, size).path

    def complete(self, path: Path, world_size: int) -> Kind:
        """The trainer has written the slot; `seal` must follow. Raises NotASlot; then the slot is free
        again.
        """
        with self._table as table:
            slot = table.writing(path)
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
        with self._table:
            slot.state = SlotState.SEALING
        return slot.kind

    def seal(self, path: Path) -> Seal | None:
        """Digest and seal a completed slot; None if it could not be (it is free again). Slow: reads every
        byte."""
        with self._table as table:
            slot = table.slots[path]
        try:
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
            self._drop(slot)
            return None
        except BaseException:
            self._drop(slot)
            raise
        return seal

    def abandon(self, path: Path) -> None:
        """The trainer says that it will not complete the slot. Raises NotASlot."""
        with self._table as table:
            slot = table.writing(path)
        self._drop(slot)

    def lose(self, path: Path) -> None:
        """The trainer is gone, or silent: it may still be writing, so the file is never used again."""
        with self._table as table:
            lost = table.give_up(lambda slot: slot.path == path)
        if lost:
            self.trim()

    # Copies, parity blocks and restored artifacts: this sidecar writes

    def draft(self, seal: Seal) -> SlotDraft:
        """A slot to receive an artifact into, or to fold a parity block in. One of an own rank is made on
        several cores: nothing trains during a restore. Raises NoFreeSlot, OSError."""
        with self._table as table:
            slot = table.draft(seal)
        hands = self._hands if seal.tier is Tier.LOCAL else 1
        if slot.state is SlotState.ALLOCATING and not self._allocate(slot, SlotState.WRITING, hands):
            raise NoFreeSlot("the memory volume is full")
        try:
            return SlotDraft(slot, seal, self._seal, self._drop)
        except BaseException:
            self._drop(slot)
            raise

    def leave(self, artifact: Artifact) -> None:
        """Whoever fills a slot with this own artifact may never come to an end, and may still be writing: the
        file is never used again."""

        def fills(slot: Slot) -> bool:
            begun = Artifact(slot.rank, Version(slot.step, slot.attempt), slot.kind)
            return slot.tier is Tier.LOCAL and begun == artifact

        with self._table as table:
            table.give_up(fills)
        self.trim()

    # Freeing

    def free(self, unwanted: Callable[[Seal], bool]) -> tuple[Seal, ...]:
        """Free every held artifact that `unwanted` names, those in use as soon as they are not. Returns
        them.
        """
        with self._table as table:
            seals = table.doom(unwanted)
        if seals:
            self.trim()
            self._on_change()
        return seals

    # Inside

    @contextlib.contextmanager
    def _pin(
        self, rank: int, version: Version, tier: Tier | None, kind: Kind, share: Share | None
    ) -> Iterator[Slot]:
        with self._table as table:
            slot = table.pin(rank, version, tier, kind, share)
        try:
            yield slot
        finally:
            with self._table as table:
                table.unpin(slot)

    def _allocate(self, slot: Slot, state: SlotState = SlotState.FREE, hands: int = 1) -> bool:
        with self._table as table:
            numa = table.numa_of(slot)
        try:
            with touch_on_node(numa):
                slot.adopt(create(slot.path, slot.size, hands))
            with self._table:
                slot.state = state
        except OSError as error:
            log.warning("cannot allocate %d bytes for %s: %s", slot.size, slot.path.name, error)
            with self._table as table:
                table.forget([slot])
            return False
        except BaseException:
            with self._table as table:
                table.forget([slot])
            raise
        finally:
            self._table.tell()
        return True

    def _grow(self, *kinds: Kind) -> None:
        added = False
        while (slot := self._next_missing(kinds)) is not None and self._allocate(slot):
            added = True
        if added:
            self._on_change()

    def _next_missing(self, kinds: tuple[Kind, ...]) -> Slot | None:
        with self._table as table:
            return table.next_missing(kinds)

    def _seal(self, slot: Slot, seal: Seal) -> None:
        if slot.state is SlotState.GONE:
            raise OSError(errno.ESTALE, f"{slot.path.name} was given up")
        write_seal(slot.path, seal)
        failpoint("after-seal")
        with self._table as table:
            table.keep(slot, seal)
        self._on_change()

    def _drop(self, slot: Slot) -> None:
        with self._table as table:
            table.drop(slot)
        self._on_change()


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
