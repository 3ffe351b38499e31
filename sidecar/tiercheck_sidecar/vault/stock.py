"""Records which artifacts are where in this worker's memory, from the start and as they come and go.

All values are immutable, and stay the same object as long as nothing changes at their place. So a caller can
compare objects to find out whether a place changed, and what follows from a place alone is computed once.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from tiercheck.plain_files import is_plain
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, History, Kind, Share, Version, rebuildable
from tiercheck_sidecar.digest import chunk_view, digest_chunk, length_of
from tiercheck_sidecar.model.tier_verdict import Span, spans
from tiercheck_sidecar.vault.seal import SUFFIX, Seal, header_fault, read_seal, seal_path
from tiercheck_sidecar.vault.slots import Pool, Slot, SlotState, remove

T = TypeVar("T")


@dataclass(frozen=True)
class StockPlace:
    """The name of a place: own slots of a rank, a holder's slots for it, or its blocks of a parity lane."""

    tier: Tier
    rank: int
    share: Share | None = None


@dataclass(frozen=True)
class MemoryStock:
    """The versions of each kind at one place."""

    snapshots: frozenset[Version] = frozenset()
    deltas: frozenset[Version] = frozenset()
    _found: dict[str, tuple[History, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cached results by name, each with the history that it was computed for."""

    def plus(self, kind: Kind, version: Version) -> MemoryStock:
        return self if version in self.of(kind) else self._with(kind, self.of(kind) | {version})

    def minus(self, kind: Kind, version: Version) -> MemoryStock:
        return self._with(kind, self.of(kind) - {version})

    def _with(self, kind: Kind, versions: frozenset[Version]) -> MemoryStock:
        if kind is Kind.SNAPSHOT:
            return MemoryStock(versions, self.deltas)
        return MemoryStock(self.snapshots, versions)

    def of(self, kind: Kind) -> frozenset[Version]:
        return self.snapshots if kind is Kind.SNAPSHOT else self.deltas

    def accepted(self, history: History) -> MemoryStock:
        """Returns the versions that `history` continues, with as many ranks; others only serve restores."""

        def find() -> MemoryStock:
            kept = (frozenset(filter(history.continues, each)) for each in (self.snapshots, self.deltas))
            left = MemoryStock(*kept)
            return self if left == self else left

        return self._once("accepted", history, find)

    def rebuildable(self, history: History) -> tuple[Span, ...]:
        """Returns the versions that can be rebuilt from it, as spans."""
        return self._once(
            "rebuildable", history, lambda: spans(rebuildable(self.snapshots, self.deltas, history))
        )

    def _once(self, name: str, history: History, find: Callable[[], T]) -> T:
        known = self._found.get(name)
        if known is None or known[0] is not history:
            known = self._found[name] = history, find()
        found: T = known[1]
        return found


NOTHING = MemoryStock()


def where(seal: Seal) -> StockPlace:
    return StockPlace(seal.tier, seal.rank, seal.share)


def by_rank(artifacts: Iterable[Artifact]) -> dict[int, MemoryStock]:
    found: dict[int, MemoryStock] = {}
    for each in artifacts:
        found[each.rank] = found.get(each.rank, NOTHING).plus(each.kind, each.version)
    return found


class HeldStock:
    """Holds the seals of all that is held, and the stocks. Not thread-safe: the vault guards it."""

    def __init__(self) -> None:
        self._seals: list[Seal] = []
        self._places: dict[StockPlace, MemoryStock] = {}
        self._cached_views: tuple[tuple[Seal, ...], Mapping[StockPlace, MemoryStock]] | None = None

    def add(self, seal: Seal) -> None:
        insort(self._seals, seal, key=_age)
        place = where(seal)
        self._places[place] = self._places.get(place, NOTHING).plus(seal.kind, seal.version)
        self._cached_views = None

    def remove(self, seal: Seal) -> None:
        """Removes this seal; another slot may hold the same artifact."""
        age = _age(seal)
        first, end = (side(self._seals, age, key=_age) for side in (bisect_left, bisect_right))
        (found,) = (number for number in range(first, end) if self._seals[number] is seal)
        others = (each for each in self._seals[first:end] if each is not seal)
        place = where(seal)
        if not any(where(each) == place for each in others):
            left = self._places.pop(place).minus(seal.kind, seal.version)
            if left.snapshots or left.deltas:
                self._places[place] = left
        del self._seals[found]
        self._cached_views = None

    def seals(self) -> tuple[Seal, ...]:
        return self._views()[0]

    def places(self) -> Mapping[StockPlace, MemoryStock]:
        return self._views()[1]

    def _views(self) -> tuple[tuple[Seal, ...], Mapping[StockPlace, MemoryStock]]:
        if self._cached_views is None:
            self._cached_views = tuple(self._seals), MappingProxyType(dict(self._places))
        return self._cached_views


def _age(seal: Seal) -> tuple[int, int, int, str, bool]:
    version = seal.version
    return version.step, version.attempt, seal.rank, seal.kind, seal.share is not None


log = logging.getLogger(__name__)

SLOT_SUFFIX = ".safetensors"
_VERIFIERS = 4


def take_inventory(directory: Path) -> list[Slot]:
    """Returns every sealed and verified slot in `directory`; removes all other slot files."""
    files = [
        path
        for path in sorted(directory.glob(f"*{SLOT_SUFFIX}"))
        if is_plain(path) and is_plain(seal_path(path))
    ]
    with ThreadPoolExecutor(_VERIFIERS) as pool:
        found = list(pool.map(_inspect, files))
    kept = [slot for slot in found if slot is not None]
    _clear(directory, {slot.path for slot in kept})
    return kept


def _inspect(path: Path) -> Slot | None:
    seal = read_seal(path)
    if seal is None:
        log.info("%s has no seal: torn or free", path.name)
        return None
    pool = Pool(seal.tier, seal.rank, seal.kind, seal.share)
    slot = Slot(path=path, size=path.stat().st_size, pool=pool, state=SlotState.SEALED, seal=seal)
    try:
        reason = fault(slot)
    except OSError as error:
        reason = str(error)
    if reason:
        log.warning("%s is given up: %s", path.name, reason)
        return None
    return slot


def fault(slot: Slot, threads: Executor | None = None, read: Callable[[int], None] = lambda _: None) -> str:
    """Returns why the slot's bytes do not match its seal; empty if they do. Raises OSError.

    `threads` share the chunks; `read` is called with the size of each."""
    with sealed(slot) as (view, seal):
        digests = seal.digests

        def is_bad(index: int) -> bool:
            bad = digest_chunk(chunk_view(view, digests, index)) != digests.values[index]
            read(length_of(digests, index))
            return bad

        found = [*(map if threads is None else threads.map)(is_bad, range(len(digests.values)))]
        if True in found:
            return f"chunk {found.index(True)} does not match its digest"
        return header_fault(view, seal) if seal.share is None else ""


@contextlib.contextmanager
def sealed(slot: Slot) -> Iterator[tuple[memoryview, Seal]]:
    """Yields the bytes that the slot's seal covers, and the seal. Raises OSError if there are fewer."""
    seal = slot.seal
    assert seal is not None
    if slot.size < seal.digests.size:
        raise OSError(f"it is {slot.size} bytes long, its seal says {seal.digests.size}")
    with slot.mapped(size=seal.digests.size) as view:
        yield view, seal


def _clear(directory: Path, kept: Iterable[Path]) -> None:
    keep = {name for path in kept for name in (path, seal_path(path))}
    for path in directory.iterdir():
        if path in keep:
            continue
        try:
            if path.name.endswith(SLOT_SUFFIX):
                remove(path)
            elif SUFFIX in path.name:
                path.unlink(missing_ok=True)
        except OSError as error:  # a folder of that name, for example
            log.warning("%s cannot be removed: %s", path.name, error)
