"""Counts what all ranks have, kept by what is equal, and refuses reports that cannot be true.

Ranks of one job train in step, so at any moment there are some dozens of different holdings among them, and
each is judged once. What a worker says anew changes the counts of its own ranks; nobody looks at the others.

A report may be of another worker, or larger than a worker can have: a peer has proved that it knows the job's
token, which says nothing of its sanity. Its memory may be bad, or somebody else may have got in there.
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
    """What a rank has where, as its sidecar knows it in one attempt. Of accepted versions only."""

    local: tuple[Span, ...] = ()
    """What can be rebuilt from its own memory, without what is `leaving`."""
    snapshots: tuple[Version, ...] = ()
    """Sealed in its own memory."""
    leaving: tuple[Version, ...] = ()
    """Those of them that go as soon as the coordinator has this."""
    unfinished: tuple[Version, ...] = ()
    """Snapshots being written or sealed."""
    unfinished_deltas: tuple[Version, ...] = ()
    reached: Version | None = None
    """The newest snapshot that it captured or skipped: it will never contribute to an older one that it does
    not hold."""
    copied: tuple[Span, ...] = ()
    """What can be rebuilt at each of its holders, from what they acknowledged."""
    copied_snapshots: tuple[Version, ...] = ()
    """Acknowledged by all its holders."""


@dataclass(frozen=True)
class HeldCopies:
    """What a holder keeps of another worker's rank, or as a parity block of several."""

    snapshots: tuple[Version, ...] = ()
    versions: tuple[Span, ...] = ()
    """What can be rebuilt from it."""


class Shared(Generic[T]):
    """One object for all who say the same: equal only to itself."""

    def __init__(self, text: bytes, value: T, wrong: str = "", many: int = 0) -> None:
        self.text, self.value, self.wrong, self.many = text, value, wrong, many
        """As it is written; what it says; why it cannot be true, as a clause; how many versions it names."""
        self._shapes: dict[tuple[bool, tuple[Version, ...]], RankShape] = {}

    def shape(self: Shared[RankHoldings], guarded: bool, uploaded: tuple[Version, ...]) -> RankShape:
        """Of ranks that have this."""
        found = self._shapes.get((guarded, uploaded))
        if found is None:
            found = self._shapes[guarded, uploaded] = RankShape(self, guarded, uploaded)
        return found


@dataclass(frozen=True, eq=False)
class RankShape:
    """Everything about a rank that counts for the job's versions. Equal only to itself."""

    held: Shared[RankHoldings]
    guarded: bool
    """Somebody keeps copies or parity of it."""
    uploaded: tuple[Version, ...]


CopyGroup = tuple[tuple[tuple[int, ...], ...], Shared[HeldCopies]]
"""Of which ranks, one or together, this is kept."""


@dataclass(frozen=True)
class WorkerHead:
    """A worker, and how it stands."""

    job_uid: str
    attempt: int
    worker: int
    placement: str = ""
    """Of the directive that the sidecar followed when it gathered this."""
    final: bool = False
    """The job is over, and nothing will be added to what is said here."""
    done: bool = False
    """Final, and nothing here could go to the remote tier any more: this sidecar may go without another word.
    """


@dataclass(frozen=True)
class RankOwn:
    """What is of one rank alone, and seldom changes."""

    rank: int
    holders: tuple[int, ...] = ()
    """Workers that keep its copies or its parity."""
    uploaded: tuple[RankArtifact, ...] = ()
    """In the remote tier, for the version that the coordinator asked for."""
    needs: Needs | None = None
    """None: it has not said yet."""


@dataclass(frozen=True)
class WorkerWord:
    """All that a worker says. Never changed once made."""

    head: WorkerHead
    own: Mapping[int, RankOwn]
    shapes: Mapping[int, RankShape]
    """Of the same ranks."""
    copies: tuple[CopyGroup, ...]


class Tally:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._shapes: dict[RankShape, int] = {}
        """With how many ranks have each; nobody's are left out when they are looked at."""
        self._ranks: dict[int, RankShape] = {}
        self._copies: dict[int, tuple[CopyGroup, ...]] = {}
        self._kept: Counter[Shared[HeldCopies]] = Counter()
        self._complete = 0
        """So many ranks, from 0 on, are known, if not more."""

    def put(self, word: WorkerWord) -> None:
        """Its worker has said this. Ranks that it does not name stay as they were."""
        ranks, shapes = self._ranks, self._shapes
        for rank, shape in word.shapes.items():
            before = ranks.get(rank)
            if before is shape:
                continue
            ranks[rank] = shape
            shapes[shape] = shapes.get(shape, 0) + 1
            if before is not None:
                shapes[before] -= 1
        self._keep(word.head.worker, word.copies)

    def _keep(self, worker: int, copies: tuple[CopyGroup, ...]) -> None:
        before = self._copies.get(worker, ())
        if before is copies:
            return
        self._copies[worker] = copies
        for _, shared in copies:
            self._kept[shared] += 1
        for _, shared in before:
            self._kept[shared] -= 1
            if not self._kept[shared]:
                del self._kept[shared]

    @property
    def ranks(self) -> Mapping[int, RankShape]:
        """All that are known."""
        return self._ranks

    @property
    def shapes(self) -> list[RankShape]:
        """How ranks differ."""
        self._shapes = {shape: count for shape, count in self._shapes.items() if count}
        return list(self._shapes)

    @property
    def copies(self) -> Iterable[HeldCopies]:
        """How copies differ."""
        return (shared.value for shared in self._kept)

    def has_all(self, world_size: int) -> bool:
        """Whether every rank of the job is known."""
        if self._complete < world_size and len(self._ranks) >= world_size:
            self._complete = world_size if all(map(self._ranks.__contains__, range(world_size))) else 0
        return self._complete >= world_size

    def all_have_copies(self, shapes: Collection[RankShape], enough: Callable[[HeldCopies], bool]) -> bool:
        """Whether for every rank of these shapes somebody keeps `enough`."""
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
        return all(rank in found for rank, shape in self._ranks.items() if shape in these)

    def kept_of_each(self, shapes: Collection[RankShape]) -> set[frozenset[Shared[HeldCopies]]]:
        """What is kept of each rank of these shapes; equal sets once."""
        found: dict[int, frozenset[Shared[HeldCopies]]] = {}
        nothing: frozenset[Shared[HeldCopies]] = frozenset()
        for groups in self._copies.values():
            for of, shared in groups:
                for ranks in of:
                    for rank in ranks:
                        found[rank] = found.get(rank, nothing) | {shared}
        these = set(shapes)
        return {found.get(rank, nothing) for rank, shape in self._ranks.items() if shape in these}


_MOST_VERSIONS = 20_000
"""Versions in all spans of a report, for each rank of a worker. There are some hundreds."""
_MOST_NAMED = 256
"""Versions that are named one by one, of one rank: as many as slots. Everybody may be told of them."""
_MOST_RANKS = 2**24
_MOST = 2**53
"""Of steps, attempts and bytes."""
_NO_VERSIONS = "it names versions that cannot be"


def find_objection(word: WorkerWord, directive: Directive, base: WorkerWord | None = None) -> str:
    """Why the word cannot be true, as a clause; empty if it can. To `base`, in the same attempt, there was
    none."""
    procs, head = directive.procs_per_worker, word.head
    if not 0 <= head.worker < directive.workers:
        return f"the job has {directive.workers} workers"
    if base is None or base.own is not word.own:
        wrong = _senseless(word, range(head.worker * procs, (head.worker + 1) * procs), base)
        if wrong:
            return wrong
    shared: list[Shared[Any]] = [shape.held for shape in word.shapes.values()]
    # Not of this job's ranks alone: one that became smaller goes on from what its former ranks have left.
    copies = word.copies if base is None or base.copies is not word.copies else ()
    if any(not 0 <= rank < _MOST_RANKS for of, _ in copies for ranks in of for rank in ranks):
        return "it keeps copies of ranks that there cannot be"
    for of, kept in word.copies:
        shared += [kept] * len(of)
    many = 0
    for each in shared:
        if each.wrong:
            return each.wrong
        many += each.many
    return f"it has {many} versions" if many > _MOST_VERSIONS * procs else ""


def _senseless(word: WorkerWord, own: range, base: WorkerWord | None) -> str:
    for rank, each in word.own.items():
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


def objection_to_holdings(held: RankHoldings | HeldCopies) -> str:
    """Why these cannot be anybody's, as a clause; empty if they can."""
    named = _named(held)
    if len(named) > _MOST_NAMED:
        return f"it names {len(named)} versions"
    if not all(map(_is_sound, named)):
        return _NO_VERSIONS
    # Spans are short words for many versions, each of which costs room where they are compared.
    ends = any(not 0 <= span.first <= span.last < _MOST for span in _spans(held))
    return "it has spans that end before they begin" if ends else ""


def many_versions(held: RankHoldings | HeldCopies) -> int:
    """Versions in all spans."""
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
