"""Prints the outcome of a simulation: a line for each setting, and the assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table

from tiercheck_cli.durations import short
from tiercheck_cli.events.recoveries import TIERS
from tiercheck_cli.layout import JobLayout
from tiercheck_cli.simulate.assumptions import Assumptions
from tiercheck_cli.simulate.play import Simulation
from tiercheck_cli.terminal import TIER_COLOURS, Text, columns, folded, plural, right
from tiercheck_operator.planning.placement.placement import Placement


@dataclass(frozen=True)
class Result:
    """Of one setting."""

    setting: str
    placement: Placement
    simulation: Simulation


def screen(
    layout: JobLayout,
    results: Sequence[Result],
    assumed: Assumptions,
    width: int,
    *,
    formula: tuple[int, float] | None,
) -> Group:
    """`formula`: (steps between versions, ETTR) of a store alone."""
    nodes = len({site.node for site in layout.sites})
    days = results[0].simulation.days
    runs = len(results[0].simulation.runs)
    failures = assumed.failures_per_day(layout.sites, layout.topology)
    parts: list[RenderableType] = [
        Text.assemble(
            (layout.name, "bold"),
            f": {plural(len(layout.sites), 'worker')} on {plural(nodes, 'node')}, {runs} lives of "
            f"{days:g} days, {_rate(failures)} failures a day",
        ),
        Text(),
        _table(results, formula, width),
        Text(),
        *([Text("measured", style="dim")] if assumed.measured else []),
        *(_item(sentence) for sentence in assumed.measured),
        *([Text()] if assumed.measured else []),
        Text("assumed", style="dim"),
        *(_item(sentence) for sentence in assumed.sources),
        *([_item(f"* {_store_only(formula[0])}")] if formula is not None else []),
        *(_item(remark, "yellow") for remark in layout.remarks),
    ]
    return Group(*parts)


def _store_only(every: int) -> str:
    what = f"a version every {every:,} steps in the store and nothing in memory"
    return f"{what}, by Daly's formula (FGCS 22(3), 2006)"


def _item(sentence: str, style: str = "dim") -> Padding:
    return Padding(Text(sentence, style=style), (0, 0, 0, 2))


def _table(results: Sequence[Result], formula: tuple[int, float] | None, width: int) -> Table:
    scratch = any(result.simulation.recoveries.get("scratch") for result in results)
    table = columns(
        folded("SETTING"),
        Column("ETTR", justify="right", no_wrap=True),
        Column("5-95 %", justify="right", no_wrap=True),
        *(Column(tier.upper(), justify="right", header_style=TIER_COLOURS[tier]) for tier in TIERS),
        *([Column("SCRATCH", justify="right", header_style="bold red")] if scratch else []),
        right("LOST"),
        right("DOWN"),
        *([Column("SURVIVES", ratio=1)] if width >= 110 else []),
        caption="recoveries from each tier, steps lost, and time without training, per day",
        caption_justify="left",
        caption_style="dim",
    )
    for result in results:
        found, days = result.simulation, result.simulation.days
        shown = (*TIERS, "scratch") if scratch else TIERS
        cells = [_rate(found.recoveries.get(tier, 0.0) / days) for tier in shown]
        table.add_row(
            Text(result.setting),
            Text(f"{found.ettr:.4f}", style="bold"),
            Text(f"{found.ettr_quantile(0.05):.4f}-{found.ettr_quantile(0.95):.4f}", style="dim"),
            *(Text(cell) for cell in cells),
            Text(_rate(found.lost_steps / days)),
            Text(short(found.down_seconds / days)),
            *([Text("; ".join(result.placement.tolerates) or "-", style="dim")] if width >= 110 else []),
        )
    if formula is not None:
        _, ettr = formula
        blank = [Text("")] * (6 if scratch else 5)
        table.add_row(
            Text("store only*", style="dim"), Text(f"{ettr:.4f}", style="dim"), Text("Daly", style="dim"),
            *blank, *([Text("-", style="dim")] if width >= 110 else []),
        )  # fmt: skip
    return table


def _rate(value: float) -> str:
    """A count per day: with decimals while they say something."""
    if value == 0:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}" if value >= 0.0001 else "<0.0001"
