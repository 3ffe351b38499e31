"""Represents the workers and their failure domains as dense numbers, fast enough for ten thousand.

`PlacementDraft` is a placement under construction, discarded once the best one is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tiercheck_operator.model.conditions import listed
from tiercheck_operator.planning.topology import Topology, short_name

Assignment = list[tuple[int, tuple[int, ...]]]
"""Pairs of a worker and the holders of its copies."""


@dataclass(frozen=True)
class WorkerSite:
    """The node that one worker runs on, and its memory."""

    worker: int
    node: str
    memory: int | None = None
    """Bytes that it has for copies of others. None: enough."""


@dataclass(frozen=True)
class PlacementProblem:
    """Workers 0..n-1 with their nodes and domain numbers at every level; -1 where labels do not give one."""

    copies: int
    node: Sequence[int]
    local: Sequence[int]
    """The position of each worker among those of its node."""
    levels: tuple[str, ...]
    domain: Sequence[Sequence[int]]
    """Domain numbers by level (widest first; the last is the host), then by worker."""
    domain_name: Sequence[Sequence[str]]
    """Domain names by level, then by domain number."""
    can_hold: Sequence[bool]
    """True for each worker that is not on a suspect node and has memory for the copies."""
    load_limit: int
    """The most copies per holder: equal shares, rounded up, and those that holders with less memory leave."""
    limit: Sequence[int]
    """The most copies of each worker: `load_limit`, or as many as its memory has room for."""
    short_of_memory: tuple[int, ...]
    unlabelled: Sequence[tuple[str, ...]]
    """The nodes in use without a known domain, by level."""

    @staticmethod
    def of(
        sites: Sequence[WorkerSite],
        topology: Topology,
        copies: int,
        copy_bytes: int | None,
        suspects: Collection[str],
    ) -> PlacementProblem:
        """Builds the problem. Raises ValueError if the workers are not 0..n-1, each once."""
        ordered = sorted(sites, key=lambda site: site.worker)
        if [site.worker for site in ordered] != list(range(len(ordered))):
            raise ValueError("sites must name the workers 0..n-1, each once")
        names = tuple(sorted({site.node for site in ordered}))
        domain: list[list[int]] = []
        domain_name: list[list[str]] = []
        unlabelled: list[tuple[str, ...]] = []
        for level in topology.levels:
            of_node = {name: topology.domain(name, level) for name in names}
            known = sorted({path for path in of_node.values() if path is not None})
            number = {path: index for index, path in enumerate(known)}
            numbers = {name: -1 if path is None else number[path] for name, path in of_node.items()}
            domain.append([numbers[site.node] for site in ordered])
            domain_name.append(known)
            unlabelled.append(tuple(name for name in names if of_node[name] is None))
        # A node is numbered as its host domain: two names of one machine are one node.
        node = domain[-1]
        seats = [0] * len(domain_name[-1])
        local = []
        for place in node:
            local.append(seats[place])
            seats[place] += 1
        need = None if copy_bytes is None else copies * copy_bytes
        short = tuple(
            site.worker
            for site in ordered
            if need is not None and site.memory is not None and site.memory < need
        )
        tight = set(short)
        can_hold = [site.node not in suspects and site.worker not in tight for site in ordered]
        rooms = [
            (copies * len(ordered) if not copy_bytes or site.memory is None else site.memory // copy_bytes)
            if able
            else 0
            for site, able in zip(ordered, can_hold, strict=True)
        ]
        load_limit = _share(copies * len(ordered), rooms)
        return PlacementProblem(
            copies=copies,
            node=node,
            local=local,
            levels=topology.level_names,
            domain=domain,
            domain_name=domain_name,
            can_hold=can_hold,
            load_limit=load_limit,
            limit=[min(load_limit, room) for room in rooms],
            short_of_memory=short,
            unlabelled=unlabelled,
        )

    @property
    def workers(self) -> int:
        return len(self.node)

    @cached_property
    def one_node(self) -> bool:
        """Returns whether there is no other node to keep a copy on; cached, because each worker needs it."""
        return len(set(self.node)) <= 1

    def levels_to_try(self, wanted: str | None) -> list[int]:
        """Returns the wanted level; None: all at which workers may be apart, then the last.

        They are sorted widest first. Raises ValueError if there is no such level."""
        if wanted is not None:
            if wanted not in self.levels:
                raise ValueError(f"no topology level {wanted!r}; there are {', '.join(self.levels)}")
            return [self.levels.index(wanted)]
        last = len(self.levels) - 1
        return [*(n for n in range(last) if not self.unlabelled[n] and len(self.domain_name[n]) > 1), last]

    def apart(self, level: int, a: int, b: int) -> bool:
        """Returns whether two workers are known to be in different domains of that level."""
        domain = self.domain[level]
        return domain[a] != domain[b] and domain[a] >= 0 and domain[b] >= 0

    def without_labels(self, level: int) -> str:
        """Returns the reason why that level's domains are not known, as a clause."""
        nodes = self.unlabelled[level]
        noun = "node" if len(nodes) == 1 else "nodes"
        return f"the {self.levels[level]} of {noun} {listed(nodes, 3)} is not known from labels"

    def parting_level(self, start: int, a: int, b: int) -> int:
        """Returns the widest level from `start` on at which both are apart, else the number of levels."""
        for level in range(start, len(self.levels)):
            if self.apart(level, a, b):
                return level
        return len(self.levels)


def _share(wanted: int, rooms: Sequence[int]) -> int:
    """Returns the smallest limit per holder at which `wanted` copies have room; the largest room if none."""
    left, limit = wanted, 0
    holders = sorted(room for room in rooms if room)
    while holders and left > 0:
        share = -(-left // len(holders))
        # Holders with less room than an equal share are full; the copies beyond their room are shared again.
        full = [room for room in holders if room < limit + share]
        if not full:
            return limit + share
        step = full[0] - limit
        if step:
            left -= step * len(holders)
            limit = full[0]
        holders = [room for room in holders if room > limit]
    return limit


@dataclass
class PlacementDraft:
    """The holders of each worker so far, and the resulting load of each holder."""

    ground: PlacementProblem
    holders: list[tuple[int, ...]] = field(init=False)
    load: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.holders = [()] * self.ground.workers
        self.load = [0] * self.ground.workers

    def give(self, assignment: Assignment) -> None:
        for owner, holders in assignment:
            for holder in self.holders[owner]:
                self.load[holder] -= 1
            for holder in holders:
                self.load[holder] += 1
            self.holders[owner] = holders


def has_no_copy(ground: PlacementProblem, worker: int, kept: Sequence[int]) -> bool:
    """Returns whether no copy of the worker is on another node although there is one."""
    return ground.copies > 0 and not any(
        ground.one_node or ground.node[h] != ground.node[worker] for h in kept
    )


# A domain can vanish without loss if every worker inside it has a copy outside it. Nothing is claimed for a
# level at which a node's domain is unknown, because that node could be in any domain.
#
# Smaller values are better, and each only breaks ties of those before it. Fewer fatal sets and shorter
# distances decide between placements when copies must be made anyway. They do not justify moves while a job
# runs: every copy that moves is sent over the network that training uses.
Cost = tuple[int, tuple[int, ...], int, int, int, int, int]


def cost(
    ground: PlacementProblem,
    start: int,
    holders: Sequence[tuple[int, ...]],
    previous: Mapping[int, tuple[int, ...]],
) -> Cost:
    """Returns the cost of `holders`; smaller is better. Its parts, most important first:

    workers without any copy on another node, those not apart from all their copies (wanted level first, then
    narrower), copies lacking, unequal load, fatal sets of nodes, copies moved, network distance."""
    levels = range(start, len(ground.levels))
    near = [0] * len(levels)
    bare = lacking = distance = moved = 0
    sets: set[tuple[int, ...]] = set()
    load: Counter[int] = Counter()
    for worker, kept in enumerate(holders):
        bare += has_no_copy(ground, worker, kept)
        lacking += ground.copies - len(kept)
        for position, level in enumerate(levels):
            if len(kept) < ground.copies or not all(ground.apart(level, worker, holder) for holder in kept):
                near[position] += 1
        sets.add(tuple(sorted({ground.node[worker], *(ground.node[holder] for holder in kept)})))
        before = previous.get(worker, ())
        for holder in kept:
            load[holder] += 1
            moved += holder not in before
            distance += len(ground.levels) - ground.parting_level(0, worker, holder)
    unequal = sum(count * count for count in load.values())
    return bare, tuple(near), lacking, unequal, len(sets), moved, distance


def fatal_domains(
    ground: PlacementProblem, level: int, holders: Sequence[tuple[int, ...]]
) -> frozenset[int] | None:
    """Returns the domains that hold a worker and all its copies; None if a worker's domain is unknown."""
    domain = ground.domain[level]
    if any(place < 0 for place in domain):
        return None
    return frozenset(
        domain[worker]
        for worker, kept in enumerate(holders)
        if not any(domain[holder] != domain[worker] for holder in kept)
    )


def tolerated(
    ground: PlacementProblem, holders: Sequence[tuple[int, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (levels of which any one domain may vanish, phrases for users), widest first."""
    levels: list[str] = []
    sentences: list[str] = []
    for index, name in enumerate(ground.levels):
        fatal = fatal_domains(ground, index, holders)
        if fatal is None:
            continue
        if not fatal:
            levels.append(name)
            sentences.append(f"any one {name}")
        elif len(fatal) <= 2 and len(fatal) < len(ground.domain_name[index]):
            names = " and ".join(short_name(ground.domain_name[index][place]) for place in sorted(fatal))
            sentences.append(f"any one {name} except {names}")
    if holders and not levels and all(holders):
        sentences.append("any one worker")
    return tuple(levels), tuple(sentences)


Holders = Sequence[tuple[int, ...]]


@dataclass(frozen=True, order=True)
class PlacementScore:
    """Rates a placement: fields are compared in this order, and smaller is better."""

    bare: int
    """Workers without any copy on another node, though copies were asked for."""
    lacking: int
    """Copies that were asked for and have no holder."""
    near: tuple[int, ...]
    """Workers not apart from all their copies: at the wanted level first, then at narrower ones."""
    unfit: int
    """Copies at workers that should keep none: on suspect or cordoned nodes, or with too little memory."""
    overload: int
    """Copies beyond an equal share, or beyond what memory has room for."""
    surplus: int
    """Copies beyond those that were asked for."""

    @property
    def urgent(self) -> tuple[int, int, tuple[int, ...], int]:
        """Returns the fields that may cost state when something fails."""
        return self.bare, self.lacking, self.near, self.unfit


def score_placement(
    ground: PlacementProblem, start: int, holders: Holders, among: Collection[int] | None = None
) -> PlacementScore:
    """Rates `holders`; `among`: only these workers and holders. `start`: the index of the wanted level."""
    levels = range(start, len(ground.levels))
    near = [0] * len(levels)
    bare = lacking = unfit = surplus = 0
    load: Counter[int] = Counter()
    for worker, kept in enumerate(holders):
        load.update(kept)
        if among is not None and worker not in among:
            continue
        bare += has_no_copy(ground, worker, kept)
        lacking += max(0, ground.copies - len(kept))
        surplus += max(0, len(kept) - ground.copies)
        unfit += sum(not ground.can_hold[holder] for holder in kept)
        for position, level in enumerate(levels):
            near[position] += not all(ground.apart(level, worker, holder) for holder in kept)
    overload = sum(
        max(0, count - ground.limit[holder])
        for holder, count in load.items()
        if ground.can_hold[holder] and (among is None or holder in among)
    )
    return PlacementScore(bare, lacking, tuple(near), unfit, overload, surplus)
