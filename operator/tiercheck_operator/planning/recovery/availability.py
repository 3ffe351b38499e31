"""Answers which ranks can rebuild which versions, with sets of versions as the bits of integers.

A job of ten thousand ranks holds some hundred thousand artifacts, but of a few dozen versions only. With a
bit for each version, the artifacts of a rank are four numbers, a chain is a walk over bits, and ranks that
hold the same share the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, History, Kind, Share, Version
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.code_groups import OldGroup

Distance = Callable[[int, int], int]
"""A function that returns how far apart two workers are; 0 is the same host."""


@dataclass(frozen=True)
class Artifacts:
    """The artifacts of one rank (or one parity block) at one place."""

    snapshots: Collection[Version] = ()
    deltas: Collection[Version] = ()
    """The deltas, each named after the version that it leads to."""


@dataclass(frozen=True)
class JobInventory:
    """The verified artifacts in the memory of one sidecar that answered, without quarantined ones."""

    worker: int
    own: Mapping[int, Artifacts] = field(default_factory=dict)
    """The artifacts of the worker's own ranks, by rank."""
    hosted: Mapping[int, Artifacts] = field(default_factory=dict)
    """The copies kept for other workers, by rank."""
    blocks: Mapping[Share, Artifacts] = field(default_factory=dict)
    """The parity blocks kept for other workers."""

    def map_artifacts(self, change: Callable[[Artifacts], Artifacts]) -> JobInventory:
        """Returns the inventory with the result of `change` in place of what is at each of its places."""
        return JobInventory(
            self.worker,
            {rank: change(held) for rank, held in self.own.items()},
            {rank: change(held) for rank, held in self.hosted.items()},
            {share: change(held) for share, held in self.blocks.items()},
        )


@dataclass(frozen=True)
class RemoteInventory:
    """The snapshots known in the remote tier, complete for every rank; they count only if it is reachable."""

    configured: bool
    reachable: bool | None = None
    """True if the remote tier answers; None: it was not tried yet."""
    versions: Collection[Version] = ()
    ranks: Mapping[Version, int] = field(default_factory=dict)
    """The number of ranks that made each version, as far as it was looked up."""

    @property
    def usable(self) -> frozenset[Version]:
        """Returns the versions that can be fetched now."""
        return frozenset(self.versions) if self.configured and self.reachable else frozenset()

    @property
    def undecided(self) -> bool:
        """Returns whether the remote tier may hold versions that cannot be seen now."""
        return self.configured and not self.reachable


@dataclass(frozen=True)
class SourceChoice:
    """One place that has an artifact of a rank's chain. In the peer tier `worker` or `group` is set."""

    tier: Tier
    worker: int | None = None
    group: CodeGroup | OldGroup | None = None
    """The group to rebuild from, by its blocks and other members; an `OldGroup` if other ranks made it."""


Sources = Mapping[int, tuple[SourceChoice, ...]]
"""The sources of each rank, nearest first; together they hold a chain to the version."""


@dataclass(frozen=True)
class Missing:
    """The ranks for which a version cannot be rebuilt from the sources that answered."""

    ranks: tuple[int, ...]


Held = tuple[int, int]
"""The bits of the snapshots and the bits of the deltas."""
_NOTHING: Held = (0, 0)
_MOST_VERSIONS = 2**15
"""The most versions that count; no job has more. Decisions take quadratic time and block other jobs."""


class Availability:
    """Answers from which artifacts a job's ranks can be rebuilt; ranks outside 0..ranks-1 are ignored.

    `bad` names artifacts of which every copy is useless. `groups` are those of the placement: they name the
    intended holder of a block that was lost. `ranks_per_worker`: None if the ranks are not those of any
    worker now, so that no artifact counts as local.
    """

    def __init__(
        self,
        ranks: int,
        ranks_per_worker: int | None,
        history: History,
        inventories: Sequence[JobInventory],
        remote: RemoteInventory,
        *,
        bad: Collection[Artifact] = (),
        groups: Iterable[CodeGroup] = (),
    ) -> None:
        self._ranks, self._per_worker, self._history = ranks, ranks_per_worker, history
        self._bits: dict[Version, int] = {}
        self._masks: dict[frozenset[Version], int] = {}
        self._remote = self._mask(remote.usable)
        self._own: list[Held] = [_NOTHING] * ranks
        self._memory: list[Held] = [_NOTHING] * ranks
        self._keepers: dict[int, list[tuple[int, Held]]] = {}
        blocks: dict[tuple[int, ...], dict[int, list[tuple[int, Held]]]] = {}
        for inventory in inventories:
            for share, held in inventory.blocks.items():
                blocks.setdefault(share.ranks, {}).setdefault(share.index, []).append(
                    (inventory.worker, self._held(held))
                )
            for holdings in (inventory.own, inventory.hosted):
                self._collect(inventory.worker, holdings)
        self._bad = self._bad_bits(bad)
        for rank, worse in self._bad.items():
            self._own[rank] = _less(self._own[rank], worse)
            self._memory[rank] = _less(self._memory[rank], worse)
        self._planned = {group.members: group for group in groups}
        self._parity: dict[int, list[tuple[CodeGroup, Held]]] = {}
        for ranks_of, kept in sorted(blocks.items()):
            self._decode(ranks_of, kept)
        self.versions = tuple(sorted(version for version, bit in self._bits.items() if bit))
        """The accepted versions of which any artifact is held, oldest first."""
        self._order = [(self._bits[version], self._before(version)) for version in self.versions]
        self._previous = dict(self._order)
        self._reachable: dict[Held, int] = {}
        self._local = [self._reach(held) for held in self._own]
        self._near = [self._reach(held) for held in self._memory]
        self._all = [self._reach(self._union(rank)) for rank in range(ranks)]
        self._by_every_rank = [(tier, reduce(and_, found)) for tier, found in self._tiers()]

    def farthest_tier(self, version: Version) -> Tier | None:
        """Returns the farthest tier that any rank needs; None if some rank cannot rebuild the version."""
        bit = self._bits.get(version, 0)
        return next((tier for tier, every in self._by_every_rank if every & bit), None)

    def tier_of(self, rank: int, version: Version) -> Tier | None:
        """Returns the farthest tier of the rank's nearest chain to the version; None if there is no chain."""
        bit = self._bits.get(version, 0)
        return next((tier for tier, found in self._tiers() if found[rank] & bit), None)

    def lacking(self, version: Version) -> tuple[int, ...]:
        """Returns the ranks that cannot rebuild the version."""
        bit = self._bits.get(version, 0)
        return tuple(rank for rank, found in enumerate(self._all) if not found & bit)

    def gap(self, rank: int, version: Version) -> str:
        """Returns what the rank lacks, as a clause: "has no copy", "lacks the delta of step 7"."""
        snapshots, deltas = self._union(rank)
        bit = self._bits.get(version, 0)
        if not (snapshots | deltas) & bit:
            return "has no copy"
        step = version.step
        while deltas & bit:
            step, bit = step - 1, self._previous.get(bit, 0)
        rests = any(before.step < step for before in self.versions if snapshots & self._bits[before])
        return f"lacks the delta of step {step}" if rests else f"lacks a snapshot before step {version.step}"

    def base_of(self, version: Version) -> Version | None:
        """Returns a snapshot from which every rank can rebuild the version; None: they have none in common.

        One in memory is preferred, then the one that most ranks hold themselves, then the newest."""
        bit = self._bits.get(version, 0)
        for held in (set(self._memory), set(map(self._union, range(self._ranks)))):
            common = reduce(and_, (self._chains(bit, each)[0] for each in held))
            shared = [each for each in self.versions if self._bits[each] & common]
            if shared:
                bits, own = self._bits, [snapshots for snapshots, _ in self._own]
                return max(shared, key=lambda each: (sum(bool(held & bits[each]) for held in own), each))
        return None

    def sources(self, version: Version, distance: Distance | None = None) -> Sources | Missing:
        """Returns the places of each rank's chain: own memory, nearest holder, other holders, parity, remote.

        Without `distance` holders are ordered by index.
        """
        missing = self.lacking(version)
        if missing:
            return Missing(missing)
        bit = self._bits[version]
        chains: dict[Held, Held] = {}
        found: dict[int, tuple[SourceChoice, ...]] = {}
        for rank in range(self._ranks):
            union = self._union(rank)
            wanted = chains.get(union)
            if wanted is None:
                wanted = chains[union] = self._chains(bit, union)
            found[rank] = tuple(self._places(rank, wanted, distance))
        return found

    def _places(self, rank: int, wanted: Held, distance: Distance | None) -> Iterator[SourceChoice]:
        if _common(self._own[rank], wanted):
            yield SourceChoice(Tier.LOCAL)
        home = self._home(rank)
        worse = self._bad.get(rank, _NOTHING)
        keepers = [
            worker for worker, held in self._keepers.get(rank, ()) if _common(_less(held, worse), wanted)
        ]
        for worker in sorted(
            keepers,
            key=lambda other: (0 if distance is None or home is None else distance(home, other), other),
        ):
            yield SourceChoice(Tier.PEER, worker)
        for group, held in self._parity.get(rank, ()):
            if _common(held, wanted):
                yield SourceChoice(Tier.PEER, group=group)
        if self._stored(rank) & wanted[0]:
            yield SourceChoice(Tier.REMOTE)

    def _home(self, rank: int) -> int | None:
        return None if self._per_worker is None else rank // self._per_worker

    def _union(self, rank: int) -> Held:
        return self._memory[rank][0] | self._stored(rank), self._memory[rank][1]

    def _stored(self, rank: int) -> int:
        """Returns the snapshots of the rank in the remote tier."""
        return self._remote & ~self._bad.get(rank, _NOTHING)[0]

    def _tiers(self) -> tuple[tuple[Tier, list[int]], ...]:
        return ((Tier.LOCAL, self._local), (Tier.PEER, self._near), (Tier.REMOTE, self._all))

    # Reading the inventories

    def _mask(self, versions: Collection[Version]) -> int:
        if not versions:
            return 0
        key = versions if isinstance(versions, frozenset) else None
        if key is not None and key in self._masks:
            return self._masks[key]
        bits, mask = self._bits, 0
        few = len(versions) <= _MOST_VERSIONS
        for version in versions if few else sorted(versions, reverse=True)[:_MOST_VERSIONS]:
            bit = bits.get(version)
            if bit is None:
                known = len(bits)
                is_used = known < _MOST_VERSIONS and self._history.accepts(version)
                bit = bits[version] = 1 << known if is_used else 0
            mask |= bit
        if key is not None:
            self._masks[key] = mask
        return mask

    def _held(self, artifacts: Artifacts) -> Held:
        return self._mask(artifacts.snapshots), self._mask(artifacts.deltas)

    def _collect(self, worker: int, holdings: Mapping[int, Artifacts]) -> None:
        for rank, artifacts in holdings.items():
            if not 0 <= rank < self._ranks:
                continue
            held = self._held(artifacts)
            self._memory[rank] = _both(self._memory[rank], held)
            if self._home(rank) == worker:
                self._own[rank] = _both(self._own[rank], held)
            else:
                self._keepers.setdefault(rank, []).append((worker, held))

    def _bad_bits(self, bad: Collection[Artifact]) -> dict[int, Held]:
        found: dict[int, Held] = {}
        for artifact in bad:
            bit = self._bits.get(artifact.version, 0)
            if bit and 0 <= artifact.rank < self._ranks:
                worse = (bit, 0) if artifact.kind is Kind.SNAPSHOT else (0, bit)
                found[artifact.rank] = _both(found.get(artifact.rank, _NOTHING), worse)
        return found

    # Parity

    def _decode(self, ranks: tuple[int, ...], kept: Mapping[int, Sequence[tuple[int, Held]]]) -> None:
        """Adds what each of `ranks` can rebuild from its group's blocks and the other members' artifacts."""
        if not all(0 <= rank < self._ranks for rank in ranks):
            return
        group = self._group(ranks, kept)
        by_index = [reduce(_both, (held for _, held in entries)) for entries in kept.values()]
        rebuilt = [[0, 0] for _ in ranks]
        for kind in (0, 1):
            own = [self._own[rank][kind] for rank in ranks]
            blocks = [held[kind] for held in by_index]
            everyone, some = reduce(and_, own), reduce(or_, blocks)
            for entry in rebuilt:
                entry[kind] |= everyone & some
            for bit in _each(some & ~everyone):
                room = sum(bool(block & bit) for block in blocks) - sum(not held & bit for held in own)
                for entry, held in zip(rebuilt, own, strict=True):
                    # A member that has the artifact may lose it: one block more is needed then.
                    if room >= (1 if held & bit else 0):
                        entry[kind] |= bit
        for rank, entry in zip(ranks, rebuilt, strict=True):
            given = _less((entry[0], entry[1]), self._bad.get(rank, _NOTHING))
            self._memory[rank] = _both(self._memory[rank], given)
            self._parity.setdefault(rank, []).append((group, given))

    def _group(self, ranks: Sequence[int], kept: Mapping[int, Sequence[tuple[int, Held]]]) -> CodeGroup:
        """Returns the group with the holders of its blocks.

        In place of a lost block's holder it names the planned one, or any: no block will be found there."""
        assert self._per_worker is not None, "of other ranks: see resharded.py"
        members = tuple(rank // self._per_worker for rank in ranks)
        planned = self._planned.get(members)
        wanted = planned.holders if planned is not None else ()
        holders: list[int] = []
        taken = {*members, *(min(worker for worker, _ in entries) for entries in kept.values())}
        for index in range(max(max(kept) + 1, len(wanted))):
            if index in kept:
                holders.append(min(worker for worker, _ in kept[index]))
                continue
            worker = wanted[index] if index < len(wanted) and wanted[index] not in taken else None
            if worker is None:
                others = (other for other in range(self._ranks // self._per_worker) if other not in taken)
                worker = next(others, min(taken))
            holders.append(worker)
            taken.add(worker)
        return CodeGroup(members, tuple(holders))

    # Chains

    def _before(self, version: Version) -> int:
        owner = self._history.owner(version.step - 1)
        return 0 if owner is None else self._bits.get(Version(version.step - 1, owner), 0)

    def _reach(self, held: Held) -> int:
        found = self._reachable.get(held)
        if found is None:
            found, deltas = held
            for bit, before in self._order:
                if deltas & bit and found & before:
                    found |= bit
            self._reachable[held] = found
        return found

    def _chains(self, bit: int, held: Held) -> Held:
        """Returns the artifacts of all chains that lead to the version `bit`."""
        snapshots, deltas = held
        of_use = [0, 0]
        pending = 0
        while bit:
            if snapshots & bit:
                of_use[0] |= bit
                of_use[1] |= pending
                pending = 0
            if not deltas & bit:
                break
            pending |= bit
            bit = self._previous[bit]
        return of_use[0], of_use[1]


def _both(a: Held, b: Held) -> Held:
    return a[0] | b[0], a[1] | b[1]


def _less(a: Held, b: Held) -> Held:
    return a[0] & ~b[0], a[1] & ~b[1]


def _common(a: Held, b: Held) -> bool:
    return bool(a[0] & b[0] or a[1] & b[1])


def _each(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
