"""Computes what a drawing of a placement shows: domains, workers, and how many copies go where."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tiercheck_cli.layout import JobLayout
from tiercheck_operator.planning.topology import short_name

UNKNOWN = "not known"


@dataclass(frozen=True)
class Domain:
    """One domain of the level that is drawn. `path`: as the topology names it; empty where labels do not
    say."""

    path: str
    name: str
    parent: str
    """The domain around it at the next wider level that tells anything; empty: none does."""
    nodes: Mapping[str, tuple[int, ...]]
    """Workers by node, in order."""

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(worker for workers in self.nodes.values() for worker in workers)


@dataclass(frozen=True)
class Links:
    """Who keeps whose. With parity, a holder's block counts as a copy of each member of its group."""

    level: str
    parent_level: str
    """Empty: there is none that tells anything."""
    domains: tuple[Domain, ...]
    keepers: Mapping[int, tuple[int, ...]]
    """By worker: the workers that keep its copies, or the blocks of its group."""
    group: Mapping[int, int]
    """With parity: the group that each worker is a member of."""
    unprotected: frozenset[int]

    @property
    def domain_of(self) -> dict[int, int]:
        """By worker: the position of its domain."""
        return {worker: index for index, domain in enumerate(self.domains) for worker in domain.workers}

    def between(self) -> Counter[tuple[int, int]]:
        """By (owner's domain, keeper's domain): how many copies or blocks."""
        where = self.domain_of
        return Counter(
            (where[owner], where[keeper]) for owner, kept in self.keepers.items() for keeper in kept
        )

    def kept(self) -> Counter[int]:
        """By worker: how many copies or blocks it keeps."""
        if self.group:
            seen = {(group, keeper) for owner, group in self.group.items() for keeper in self.keepers[owner]}
            return Counter(keeper for _, keeper in seen)
        return Counter(keeper for kept in self.keepers.values() for keeper in kept)


def links(layout: JobLayout) -> Links:
    """Of the level that says most, with the domains in the order of their names."""
    topology, placement, level = layout.topology, layout.placement, layout.level
    found: dict[str, dict[str, list[int]]] = {}
    for site in sorted(layout.sites, key=lambda site: site.worker):
        path = topology.domain(site.node, level) or ""
        found.setdefault(path, {}).setdefault(site.node, []).append(site.worker)
    wider = [name for name in topology.level_names[: topology.level_index(level)] if _tells(layout, name)]
    parent_level = wider[-1] if wider else ""
    domains = tuple(
        Domain(
            path=path,
            name=short_name(path) if path else UNKNOWN,
            parent=_parent(layout, next(iter(found[path])), parent_level),
            nodes={node: tuple(found[path][node]) for node in sorted(found[path], key=_natural)},
        )
        for path in sorted(found, key=_natural)
    )
    keepers = dict(enumerate(placement.holders))
    group: dict[int, int] = {}
    for index, entry in enumerate(placement.groups):
        for member in entry.members:
            keepers[member], group[member] = entry.holders, index
    return Links(level, parent_level, domains, keepers, group, frozenset(placement.unprotected))


def _tells(layout: JobLayout, level: str) -> bool:
    """Whether that level tells nodes apart, or at least names what they are in."""
    return any(layout.topology.domain(site.node, level) is not None for site in layout.sites)


def _parent(layout: JobLayout, node: str, level: str) -> str:
    if not level:
        return ""
    path = layout.topology.domain(node, level)
    return UNKNOWN if path is None else short_name(path)


def _natural(text: str) -> list[str | int]:
    """rack-2 before rack-10."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", text))]
