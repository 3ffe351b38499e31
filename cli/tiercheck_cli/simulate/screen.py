"""Prints the outcome of a simulation: a line for each setting, the spread, the assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from tiercheck_cli.durations import short
from tiercheck_cli.layout import JobLayout
from tiercheck_cli.simulate.assumptions import Assumptions
from tiercheck_cli.simulate.play import Simulation
from tiercheck_cli.terminal import TIER_COLOURS, Text, plural
from tiercheck_operator.planning.placement.placement import Placement

_BLOCKS = " ▁▂▃▄▅▆▇█"


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
            f": {plural(len(layout.sites), 'worker')} on {plural(nodes, 'node')}, {runs} lives of {days:g} "
            "days, "
            f"{_rate(failures)} failures a day",
        ),
        Text(),
        _table(results, formula, width),
        Text(),
        Text("how the runs are spread (ETTR)", style="dim"),
        _spread(results, width),
        Text(),
        *([Text("measured", style="dim")] if assumed.measured else []),
        *(_item(sentence) for sentence in assumed.measured),
        *([Text()] if assumed.measured else []),
        Text("assumed", style="dim"),
        *(_item(sentence) for sentence in assumed.sources),
        *(
            [
                _item(
                    f"* a version every {formula[0]:,} steps in the store and nothing in memory, by Daly's "
                    "formula (FGCS 22(3), 2006)"
                )
            ]
            if formula is not None
            else []
        ),
        *(_item(remark, "yellow") for remark in layout.remarks),
    ]
    return Group(*parts)


def _item(sentence: str, style: str = "dim") -> Padding:
    return Padding(Text(sentence, style=style), (0, 0, 0, 2))


def _table(results: Sequence[Result], formula: tuple[int, float] | None, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("SETTING", overflow="fold")
    table.add_column("ETTR", justify="right", no_wrap=True)
    table.add_column("5-95 %", justify="right", no_wrap=True)
    scratch = any(result.simulation.recoveries.get("scratch") for result in results)
    for tier in ("local", "peer", "remote"):
        table.add_column(tier.upper(), justify="right", header_style=TIER_COLOURS[tier])
    if scratch:
        table.add_column("SCRATCH", justify="right", header_style="bold red")
    table.add_column("LOST", justify="right")
    table.add_column("DOWN", justify="right")
    if width >= 110:
        table.add_column("SURVIVES", ratio=1)
    for result in results:
        found, days = result.simulation, result.simulation.days
        cells = [_rate(found.recoveries.get(tier, 0.0) / days) for tier in ("local", "peer", "remote")]
        if scratch:
            cells.append(_rate(found.recoveries.get("scratch", 0.0) / days))
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
    table.caption = "recoveries from each tier, steps lost, and time without training, per day"
    table.caption_justify = "left"
    table.caption_style = "dim"
    return table


def _spread(results: Sequence[Result], width: int) -> Table:
    """A histogram for each setting, all on one axis."""
    # One life in a hundred that ends in disaster must not squeeze the others into one column.
    low = min(result.simulation.ettr_quantile(0.02) for result in results)
    high = max(result.simulation.ettr_quantile(1.0) for result in results)
    columns = max(16, min(56, width - max(len(result.setting) for result in results) - 8))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    for result in results:
        table.add_row(
            Text(f"  {result.setting}"),
            Text(_histogram(result.simulation, low, high, columns), style="#0072B2"),
        )
    gap = columns - len(f"{low:.4f}") - len(f"{high:.4f}")
    table.add_row("", Text(f"{low:.4f}{' ' * gap}{high:.4f}", style="dim"))
    return table


def _histogram(simulation: Simulation, low: float, high: float, columns: int) -> str:
    counts = [0] * columns
    for run in simulation.runs:
        counts[max(0, min(columns - 1, int((run.ettr - low) / ((high - low) or 1.0) * columns)))] += 1
    most = max(counts)
    return "".join(_BLOCKS[0 if not count else max(1, round(count / most * 8))] for count in counts)


def _rate(value: float) -> str:
    """A count per day: with decimals while they say something."""
    if value == 0:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}" if value >= 0.0001 else "<0.0001"
