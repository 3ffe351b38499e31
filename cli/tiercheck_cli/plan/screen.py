"""Prints a placement: boxes with every worker if they fit, else a matrix or list of domains."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table

from tiercheck_cli.layout import JobLayout, workers_by_domain
from tiercheck_cli.terminal import Text, columns, right
from tiercheck_operator.model.conditions import plural
from tiercheck_operator.planning.topology import short_name

UNKNOWN = "not known"


@dataclass(frozen=True)
class Domain:
    """One domain of the level that is drawn. `path`: the topology's name; empty if labels do not give one."""

    path: str
    name: str
    parent: str
    """The domain around it at the next wider level with known domains; empty: there is none."""
    nodes: Mapping[str, tuple[int, ...]]

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(worker for workers in self.nodes.values() for worker in workers)


@dataclass(frozen=True)
class Links:
    """The holders of each worker. With parity, a holder's block counts as a copy of each group member."""

    level: str
    parent_level: str
    """The next wider level with known domains; empty: there is none."""
    domains: tuple[Domain, ...]
    keepers: Mapping[int, tuple[int, ...]]
    """The workers that hold each worker's copies, or the blocks of its group."""
    group: Mapping[int, int]
    """The group that each worker is a member of; empty without parity."""
    unprotected: frozenset[int]

    @property
    def domain_of(self) -> dict[int, int]:
        """Returns the position of each worker's domain."""
        return {worker: index for index, domain in enumerate(self.domains) for worker in domain.workers}

    def between(self) -> Counter[tuple[int, int]]:
        """Counts the copies or blocks by (owner's domain, holder's domain)."""
        where = self.domain_of
        return Counter(
            (where[owner], where[keeper]) for owner, kept in self.keepers.items() for keeper in kept
        )

    def kept(self) -> Counter[int]:
        """Counts the copies or blocks that each worker holds."""
        if self.group:
            seen = {(group, keeper) for owner, group in self.group.items() for keeper in self.keepers[owner]}
            return Counter(keeper for _, keeper in seen)
        return Counter(keeper for kept in self.keepers.values() for keeper in kept)


def links(layout: JobLayout) -> Links:
    """Returns the links at the layout's level, with the domains in the order of their names."""
    topology, placement, level = layout.topology, layout.placement, layout.level
    found: dict[str, dict[str, list[int]]] = {}
    for site in sorted(layout.sites, key=lambda site: site.worker):
        path = topology.domain(site.node, level) or ""
        found.setdefault(path, {}).setdefault(site.node, []).append(site.worker)
    wider = [
        name
        for name in topology.level_names[: topology.level_index(level)]
        if workers_by_domain(layout.sites, topology, name)
    ]
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


def _parent(layout: JobLayout, node: str, level: str) -> str:
    if not level:
        return ""
    path = layout.topology.domain(node, level)
    return UNKNOWN if path is None else short_name(path)


def _natural(text: str) -> list[str | int]:
    """Returns a sort key that puts rack-2 before rack-10."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", text))]


COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#B8A900", "#8C8C8C")
"""The colours of domains, in turn: Okabe and Ito's, with the yellow darkened for light paper."""
_WORKERS_IN_BOXES = 96
_DOMAINS_LISTED = 40


def screen(layout: JobLayout, width: int) -> Group:
    """Returns the plan for a terminal of `width` columns."""
    drawn = links(layout)
    parts: list[RenderableType] = [_summary(layout, drawn), Text()]
    if len(layout.sites) <= _WORKERS_IN_BOXES:
        parts.append(_boxes(drawn, width))
        if layout.placement.groups:
            parts += [Text(), _groups(layout, drawn)]
    elif _matrix_width(drawn) <= width:
        parts.append(_matrix(drawn))
    else:
        parts.append(_list(drawn))
    return Group(*parts)


def colour(index: int) -> str:
    """Returns the colour of the domain at that position."""
    return COLOURS[index % len(COLOURS)]


def _summary(layout: JobLayout, drawn: Links) -> Group:
    placement = layout.placement
    nodes = {site.node for site in layout.sites}
    kind = _kind(layout)
    head = Text.assemble(
        (layout.name, "bold"),
        f": {plural(len(layout.sites), 'worker')} on {plural(len(nodes), 'node')}, {kind}",
        ("  planned" if layout.attempt is None else f"  attempt {layout.attempt}", "dim"),
    )
    rows: list[tuple[str, Text]] = []
    if survives := "; ".join(placement.tolerates):
        rows.append(("survives", Text(f"the loss of {survives}", style="bold green")))
    else:
        rows.append(("survives", Text("no loss of a pod: its memory is the only one", style="bold red")))
    if placement.achieved_level != layout.spread and (any(placement.holders) or placement.groups):
        got = f"only by {placement.achieved_level}" if placement.achieved_level else "not even by node"
        rows.append(("apart", Text(f"{got}, and {layout.spread} was asked for", style="bold yellow")))
    kept = drawn.kept()
    if kept:
        least, most = min(kept.get(site.worker, 0) for site in layout.sites), max(kept.values())
        unit = "block" if placement.groups else "copy"
        many = f"{least} to {most}" if least != most else str(most)
        noun = unit if many == "1" else {"block": "blocks", "copy": "copies"}[unit]
        rows.append(("each keeps", Text(f"{many} {noun} for others")))
    rows += [("note", Text(remark, style="yellow")) for remark in layout.remarks]
    if placement.unprotected and (any(placement.holders) or placement.groups):
        more = " ..." if len(placement.unprotected) > 12 else ""
        shown = ", ".join(map(str, placement.unprotected[:12])) + more
        whole = f"{plural(len(placement.unprotected), 'worker')}: {shown}"
        rows.append(("unprotected", Text(whole, style="bold red")))
    if placement.reason:
        rows.append(("why", Text(placement.reason)))
    return Group(head, *(Text.assemble((f"  {name:<13}", "dim"), what) for name, what in rows))


def _kind(layout: JobLayout) -> str:
    groups = layout.placement.groups
    if groups:
        data, parity = max(len(g.members) for g in groups), max(len(g.holders) for g in groups)
        return f"{plural(len(groups), 'parity group')} of {data} + {parity}, apart by {layout.spread}"
    copies = max((len(kept) for kept in layout.placement.holders), default=0)
    if not copies:
        return "no copies"
    return f"{copies} {'copy' if copies == 1 else 'copies'} of each, apart by {layout.spread}"


def _boxes(drawn: Links, width: int) -> Group:
    parts: list[RenderableType] = []
    where = drawn.domain_of
    position = 0
    for parent, members in groupby(drawn.domains, key=lambda domain: domain.parent):
        if parent:
            parts.append(Text(f"{drawn.parent_level} {parent}", style="bold"))
        panels = []
        for domain in members:
            panels.append(_box(drawn, domain, where, position))
            position += 1
        inner = max(panel_width for _, panel_width in panels)
        parts.append(Columns([panel for panel, _ in panels], width=min(inner, width), padding=(0, 1)))
    parts.append(Text(f"{_example(drawn)}colours are domains", style="dim"))
    return Group(*parts)


def _example(drawn: Links) -> str:
    """Explains the marks by one that is drawn."""
    for worker, group in sorted(drawn.group.items()):
        name = group_name(group)
        return f"{worker}·{name}: worker {worker} is a member of group {name}; "
    for worker, (keeper, *_) in sorted((worker, kept) for worker, kept in drawn.keepers.items() if kept):
        return f"{worker}→{keeper}: the copies of worker {worker} are kept by worker {keeper}; "
    return ""


def _box(drawn: Links, domain: Domain, where: dict[int, int], position: int) -> tuple[Panel, int]:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    longest = 0
    for node, workers in domain.nodes.items():
        cell = Text("  ").join(_worker(drawn, worker, where) for worker in workers)
        # At the host level the domain is the node itself, and the name would appear twice.
        name = "" if drawn.level == "host" else node
        grid.add_row(name, cell)
        longest = max(longest, len(name) + 1 + cell.cell_len)
    title = Text(f"{drawn.level} {domain.name}", style=f"bold {colour(position)}")
    panel = Panel(
        grid, title=title, title_align="left", border_style=colour(position), box=box.ROUNDED, expand=True
    )
    return panel, max(longest, title.cell_len + 2) + 4


def _worker(drawn: Links, worker: int, where: dict[int, int]) -> Text:
    cell = Text(str(worker), style=f"bold {colour(where[worker])}")
    if worker in drawn.unprotected:
        cell.append("!", style="bold red")
    if worker in drawn.group:
        return cell.append(f"·{group_name(drawn.group[worker])}", style="dim")
    keepers = drawn.keepers.get(worker, ())
    if keepers:
        cell.append("→", style="dim")
        for index, keeper in enumerate(keepers):
            cell.append("," if index else "").append(str(keeper), style=colour(where[keeper]))
    return cell


def group_name(index: int) -> str:
    """Returns the name of a group: a, b ... z, aa, ab ..."""
    name = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        name = chr(ord("a") + rest) + name
    return name


def _groups(layout: JobLayout, drawn: Links) -> Table:
    where = drawn.domain_of
    table = columns("GROUP", "MEMBERS, IN DOMAINS OF THEIR OWN COLOUR", "BLOCKS KEPT BY")
    for index, group in enumerate(layout.placement.groups):
        table.add_row(
            Text(group_name(index)),
            Text(" ").join(
                Text(str(worker), style=f"bold {colour(where[worker])}") for worker in group.members
            ),
            Text(" ").join(Text(str(worker), style=colour(where[worker])) for worker in group.holders),
        )
    return table


def _matrix_width(drawn: Links) -> int:
    cell = max(len(str(max(drawn.between().values(), default=0))), *(len(d.name) for d in drawn.domains)) + 2
    return max(len(domain.name) for domain in drawn.domains) + 14 + cell * len(drawn.domains)


def _matrix(drawn: Links) -> Group:
    counts = drawn.between()
    table = columns(f"OF {drawn.level.upper()}", right("WORKERS"))
    for index, domain in enumerate(drawn.domains):
        table.add_column(Text(domain.name, style=colour(index)), justify="right")
    for row, domain in enumerate(drawn.domains):
        cells = [_cell(counts[(row, column)], row == column) for column in range(len(drawn.domains))]
        table.add_row(Text(domain.name, style=f"bold {colour(row)}"), str(len(domain.workers)), *cells)
    title = f"copies of the workers of each {drawn.level}, by the {drawn.level} that keeps them"
    return Group(Text(title, style="dim"), table)


def _cell(count: int, same: bool) -> Text:
    if not count:
        return Text("-" if same else "·", style="dim")
    return Text(f"{count:,}", style="bold red" if same else "")


def _list(drawn: Links) -> Group:
    counts = drawn.between()
    kept_in = Column("COPIES ARE KEPT IN", ratio=1)
    table = columns(drawn.level.upper(), right("WORKERS"), right("NODES"), kept_in)
    for row, domain in enumerate(drawn.domains[:_DOMAINS_LISTED]):
        keeping = Counter({column: count for (owner, column), count in counts.items() if owner == row})
        parts = [f"{drawn.domains[column].name} ×{count}" for column, count in keeping.most_common(4)]
        more = len(keeping) - 4
        table.add_row(
            Text(domain.name, style=f"bold {colour(row)}"),
            str(len(domain.workers)),
            str(len(domain.nodes)),
            ", ".join(parts) + (f" and {more} more" if more > 0 else ""),
        )
    rest = len(drawn.domains) - _DOMAINS_LISTED
    tail = [Text(f"and {rest} more; --picture FILE.svg draws them all", style="dim")] if rest > 0 else []
    return Group(table, *tail)
