"""The workers and their failure domains as dense numbers, fast enough for ten thousand.

`PlacementDraft` is a placement under construction: scratch, thrown away once the best one is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tiercheck_operator.planning.topology import Topology

Assignment = list[tuple[int, tuple[int, ...]]]
"""(worker, the holders of its copies)."""


@dataclass(frozen=True)
class WorkerSite:
    """Where one worker runs."""

    worker: int
    node: str
    memory: int | None = None
    """Bytes that it can give to copies of others. None: enough."""


@dataclass(frozen=True)
class PlacementProblem:
    """Workers 0..n-1, their nodes, and their domain at every level as a number; -1 where labels do not
    say.
    """

    copies: int
    node: Sequence[int]
    local: Sequence[int]
    """Position among the workers of the same node."""
    levels: tuple[str, ...]
    domain: Sequence[Sequence[int]]
    """By level (widest first; the last is the host), then by worker."""
    domain_name: Sequence[Sequence[str]]
    """By level, then by domain number."""
    can_hold: Sequence[bool]
    """Not on a suspect node, and memory for the copies."""
    load_limit: int
    """Copies that one holder may be given: equal shares, rounded up, and what those take over that have less
    memory."""
    limit: Sequence[int]
    """By worker: the same, or as many as its memory has room for."""
    short_of_memory: tuple[int, ...]
    node_names: tuple[str, ...]
    unlabelled: Sequence[tuple[str, ...]]
    """By level: nodes in use whose domain is unknown."""

    @staticmethod
    def of(
        sites: Sequence[WorkerSite],
        topology: Topology,
        copies: int,
        copy_bytes: int | None,
        suspects: Collection[str],
    ) -> PlacementProblem:
        """Raises ValueError if the workers are not 0..n-1, each once."""
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
            node_names=tuple(site.node for site in ordered),
            unlabelled=unlabelled,
        )

    @property
    def workers(self) -> int:
        return len(self.node)

    @cached_property
    def one_node(self) -> bool:
        """Whether there is no other node to keep a copy on. Asked for each worker, so found out once."""
        return len(set(self.node)) <= 1

    def apart(self, level: int, a: int, b: int) -> bool:
        """Whether two workers are known to be in different domains of that level."""
        domain = self.domain[level]
        return domain[a] != domain[b] and domain[a] >= 0 and domain[b] >= 0

    def parting_level(self, start: int, a: int, b: int) -> int:
        """The widest level from `start` on at which the two are apart; the number of levels if none."""
        for level in range(start, len(self.levels)):
            if self.apart(level, a, b):
                return level
        return len(self.levels)


def _share(wanted: int, rooms: Sequence[int]) -> int:
    """The smallest limit per holder with which `wanted` copies find room; the largest room if they do not."""
    left, limit = wanted, 0
    holders = sorted(room for room in rooms if room)
    while holders and left > 0:
        share = -(-left // len(holders))
        # Those with less room than an equal share are full; the rest of theirs is shared anew.
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
    """Holders per worker so far, and the load that this puts on each."""

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
