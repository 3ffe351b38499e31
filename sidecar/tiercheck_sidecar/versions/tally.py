"""Counts the ranks with equal holdings, and refuses reports that cannot be true.

Ranks of one job train in step, so at any moment there are some dozens of different holdings among them, and
each is evaluated once. A worker's new report changes only the counts of its own ranks.

A report may be of another worker, or larger than a worker can have: a peer has proved that it has the job's
token, not that it works correctly. Its memory may be bad, or its process compromised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tiercheck.protocol.directive import Directive
from tiercheck.protocol.version import RankArtifact, Version
from tiercheck_sidecar.model.tier_verdict import Needs, Span

T = TypeVar("T")


@dataclass(frozen=True)
class RankHoldings:
    """The accepted versions that a rank has in each place, as its sidecar sees them in one attempt."""

    local: tuple[Span, ...] = ()
    """Versions that can be rebuilt from its own memory without the snapshots in `leaving`."""
    snapshots: tuple[Version, ...] = ()
    """Snapshots sealed in its own memory."""
    leaving: tuple[Version, ...] = ()
    """The part of `snapshots` that is freed once the coordinator has accepted this report."""
    unfinished: tuple[Version, ...] = ()
    """Snapshots being written or sealed."""
    unfinished_deltas: tuple[Version, ...] = ()
    reached: Version | None = None
    """The newest snapshot that it captured or skipped.
    It will never contribute to an older one that it does not hold."""
    copied: tuple[Span, ...] = ()
    """Versions that can be rebuilt at each of its holders, from what they acknowledged."""
    copied_snapshots: tuple[Version, ...] = ()
    """Snapshots acknowledged by all its holders."""


@dataclass(frozen=True)
class HeldCopies:
    """The copies that a holder keeps of another worker's rank, or of several as parity blocks."""

    snapshots: tuple[Version, ...] = ()
    versions: tuple[Span, ...] = ()
    """Versions that can be rebuilt from them."""


class Interned(Generic[T]):
    """A decoded value that all equal reports share. Equal only to itself."""

    def __init__(self, text: bytes, value: T, wrong: str = "", many: int = 0) -> None:
        self.text, self.value, self.wrong, self.many = text, value, wrong, many
        """The JSON, its value, why it cannot be true (a clause), and the number of versions in it."""
        self._shapes: dict[tuple[bool, tuple[Version, ...]], RankState] = {}

    def shape(self: Interned[RankHoldings], own: RankOwn) -> RankState:
        key = bool(own.holders), tuple(artifact.version for artifact in own.uploaded)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = RankState(self, *key)
        return found


@dataclass(frozen=True, eq=False)
class RankState:
    """Everything about a rank that counts for the job's versions. Equal only to itself."""

    held: Interned[RankHoldings]
    guarded: bool
    """True if other workers keep copies or parity of it."""
    uploaded: tuple[Version, ...]


CopyGroup = tuple[tuple[tuple[int, ...], ...], Interned[HeldCopies]]
"""Ranks (each alone, or several coded together), and the copies kept of each."""


@dataclass(frozen=True)
class WorkerHead:
    """The identity and state of a worker."""

    job_uid: str
    attempt: int
    worker: int
    placement: str = ""
    """The placement of the directive that the sidecar followed when it gathered this report."""
    final: bool = False
    """True if the job is over and nothing will be added to this report."""
    done: bool = False
    """True if it is final and nothing here could still be uploaded.
    This sidecar may end without another report."""


@dataclass(frozen=True)
class RankOwn:
    """The facts that concern one rank alone, which seldom change."""

    rank: int
    holders: tuple[int, ...] = ()
    """Workers that keep its copies or its parity."""
    uploaded: tuple[RankArtifact, ...] = ()
    """Artifacts in the remote tier, of the version that the coordinator asked for."""
    needs: Needs | None = None
    """The sizes of its artifacts; None until it has reserved slots."""


@dataclass(frozen=True)
class WorkerState:
    """The complete report of a worker. Never changed once made."""

    head: WorkerHead
    own: Mapping[int, RankOwn]
    shapes: Mapping[int, RankState]
    """The shapes of the same ranks."""
    copies: tuple[CopyGroup, ...]


class RankTable:
    """Holds the newest reports of all workers, and counts equal ones. Not thread-safe."""

    def __init__(self) -> None:
        self._shapes: dict[RankState, int] = {}
        """The number of ranks of each shape. Reading `shapes` removes those without any."""
        self.ranks: dict[int, RankState] = {}
        self._copies: dict[int, tuple[CopyGroup, ...]] = {}
        self._kept: Counter[Interned[HeldCopies]] = Counter()
        self._complete = 0
        """All ranks below this number are known."""

    def put(self, report: WorkerState) -> None:
        """Replaces the report of its worker. Ranks that it does not name stay as they were."""
        ranks, shapes = self.ranks, self._shapes
        for rank, shape in report.shapes.items():
            before = ranks.get(rank)
            if before is shape:
                continue
            ranks[rank] = shape
            shapes[shape] = shapes.get(shape, 0) + 1
            if before is not None:
                shapes[before] -= 1
        worker = report.head.worker
        kept = self._copies.get(worker, ())
        if kept is not report.copies:
            self._copies[worker] = report.copies
            self._kept.update(shared for _, shared in report.copies)
            for _, shared in kept:
                self._kept[shared] -= 1
                if not self._kept[shared]:
                    del self._kept[shared]

    @property
    def shapes(self) -> list[RankState]:
        self._shapes = {shape: count for shape, count in self._shapes.items() if count}
        return list(self._shapes)

    @property
    def copies(self) -> Iterable[HeldCopies]:
        return (shared.value for shared in self._kept)

    def has_all(self, world_size: int) -> bool:
        """Returns whether every rank of the job is known."""
        if self._complete < world_size and len(self.ranks) >= world_size:
            self._complete = world_size if all(map(self.ranks.__contains__, range(world_size))) else 0
        return self._complete >= world_size

    def all_have_copies(self, shapes: Collection[RankState], enough: Callable[[HeldCopies], bool]) -> bool:
        """Returns whether some worker keeps `enough` of every rank of these shapes."""
        if not shapes:
            return True
        these, good = set(shapes), {shared for shared in self._kept if enough(shared.value)}
        found = {
            rank
            for groups in self._copies.values()
            for of, shared in groups
            if shared in good
            for ranks in of
            for rank in ranks
        }
        return all(rank in found for rank, shape in self.ranks.items() if shape in these)

    def kept_of_each(self, shapes: Collection[RankState]) -> set[frozenset[Interned[HeldCopies]]]:
        """Returns the copies kept of each rank of these shapes; equal sets once."""
        found: dict[int, frozenset[Interned[HeldCopies]]] = {}
        nothing: frozenset[Interned[HeldCopies]] = frozenset()
        for groups in self._copies.values():
            for of, shared in groups:
                for ranks in of:
                    for rank in ranks:
                        found[rank] = found.get(rank, nothing) | {shared}
        these = set(shapes)
        return {found.get(rank, nothing) for rank, shape in self.ranks.items() if shape in these}


_MOST_VERSIONS = 20_000
"""The limit of versions in all spans of a report, per rank of a worker. Some hundreds are usual."""
_MOST_NAMED = 256
"""The limit of versions named one by one for a rank: one per slot. All sidecars may be sent them."""
_MOST_RANKS = 2**24
_MOST = 2**53
"""The limit of steps, attempts and bytes."""
_NO_VERSIONS = "it names versions that cannot be"


def validate_report(report: WorkerState, directive: Directive, base: WorkerState | None = None) -> str:
    """Returns why the report cannot be true, as a clause; empty if it can.
    `base`, of the same attempt, is valid, so what it shares with the report is not checked again."""
    procs, head = directive.procs_per_worker, report.head
    if not 0 <= head.worker < directive.workers:
        return f"the job has {directive.workers} workers"
    if base is None or base.own is not report.own:
        wrong = _validate_ranks(report, range(head.worker * procs, (head.worker + 1) * procs), base)
        if wrong:
            return wrong
    shared: list[Interned[Any]] = [shape.held for shape in report.shapes.values()]
    # Copies may be of ranks that the job had before it became smaller: it continues from those.
    copies = report.copies if base is None or base.copies is not report.copies else ()
    if any(not 0 <= rank < _MOST_RANKS for of, _ in copies for ranks in of for rank in ranks):
        return "it keeps copies of ranks that there cannot be"
    for of, kept in report.copies:
        shared += [kept] * len(of)
    many = 0
    for each in shared:
        if each.wrong:
            return each.wrong
        many += each.many
    return f"it has {many} versions" if many > _MOST_VERSIONS * procs else ""


def _validate_ranks(report: WorkerState, own: range, base: WorkerState | None) -> str:
    for rank, each in report.own.items():
        if base is not None and base.own.get(rank) is each:
            continue
        if rank not in own:
            return f"it speaks for rank {rank}, which is another worker's"
        needs = each.needs
        if needs is not None and not (0 < needs.snapshot < _MOST and 0 <= needs.delta < _MOST):
            return f"rank {rank} has senseless sizes"
        for artifact in each.uploaded:
            if artifact.rank != rank or not 0 <= artifact.bytes < _MOST:
                return f"the upload that it names for rank {rank} is none of that rank"
            if not _is_sound(artifact.version):
                return _NO_VERSIONS
    return ""


def validate_holdings(held: RankHoldings | HeldCopies) -> str:
    """Returns why no rank can have these holdings, as a clause; empty if one can."""
    named = _named(held)
    if len(named) > _MOST_NAMED:
        return f"it names {len(named)} versions"
    if not all(map(_is_sound, named)):
        return _NO_VERSIONS
    # A short span may stand for many versions, each of which costs memory where they are compared.
    ends = any(not 0 <= span.first <= span.last < _MOST for span in _spans(held))
    return "it has spans that end before they begin" if ends else ""


def many_versions(held: RankHoldings | HeldCopies) -> int:
    return sum(span.last - span.first + 1 for span in _spans(held))


def _spans(held: RankHoldings | HeldCopies) -> tuple[Span, ...]:
    return held.versions if isinstance(held, HeldCopies) else (*held.local, *held.copied)


def _named(held: RankHoldings | HeldCopies) -> tuple[Version, ...]:
    if isinstance(held, HeldCopies):
        return held.snapshots
    reached = () if held.reached is None else (held.reached,)
    return (
        *held.snapshots,
        *held.leaving,
        *held.unfinished,
        *held.unfinished_deltas,
        *held.copied_snapshots,
        *reached,
    )


def _is_sound(version: Version) -> bool:
    return 0 <= version.step < _MOST and 0 <= version.attempt < _MOST
