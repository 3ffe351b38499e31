"""Draws the outcome of a simulation: how runs are spread, and what saving and copies are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tiercheck_cli.failure import CannotDo
from tiercheck_cli.figures import new_figure, remove_frame, save_figure
from tiercheck_cli.layout import JobLayout
from tiercheck_cli.report.style import FAULT, TIERS
from tiercheck_cli.simulate.assumptions import Assumptions
from tiercheck_cli.simulate.lives import Result, scenario, simulate_lives, store_only
from tiercheck_cli.simulate.sensitivity import Gain

_CADENCES = (1, 3, 10, 30, 100, 300, 1000, 3000)
"""Steps between saves."""
_DELTAS, _SNAPSHOTS = "a delta at every step, and copies", "snapshots only, and copies"
_ALONE = "no copies: lost nodes come back from the store"
_STYLES = {_DELTAS: TIERS["local"], _SNAPSHOTS: TIERS["peer"], _ALONE: TIERS["remote"]}
_SHOWN = 14
"""Bars: the rest is hardly seen."""
_RUNS = 20
"""Lives for each point: a mean needs fewer than a distribution."""


def draw(
    path: Path, layout: JobLayout, results: Sequence[Result], assumed: Assumptions, *,
    gains: Sequence[Gain], days: float, runs: int, seed: int, progress: Progress,
) -> None:  # fmt: skip
    """SVG, PNG or PDF by the name's end; `gains`, if there are any, below. Raises CannotDo."""
    gains = [each for each in gains if each.gain > 0][:_SHOWN]
    curves = _curves(layout, assumed, days=days, runs=min(runs, _RUNS), seed=seed, progress=progress)
    nodes = len({site.node for site in layout.sites})
    upper, lower = 3.2 + 0.32 * len(results), 1.1 + 0.2 * len(gains) if gains else 0.0
    with new_figure(11.0, upper + lower) as figure:
        if gains:
            grid = figure.add_gridspec(2, 2, width_ratios=(1.0, 1.15), height_ratios=(upper, lower))
            spread, cadence = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
            _gains(figure.add_subplot(grid[1, :]), gains)
        else:
            spread, cadence = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
        _spread(spread, results)
        _cadence(cadence, curves, layout, assumed)
        figure.suptitle(
            f"{layout.name}: {len(layout.sites):,} workers on {nodes:,} nodes, "
            f"{assumed.failures_per_day(layout.sites, layout.topology):.3g} failures a day",
            x=0.01, ha="left", fontweight="bold",
        )  # fmt: skip
        try:
            save_figure(figure, path)
        except OSError as error:
            raise CannotDo(f"{path} cannot be written: {error.strerror}") from error


def _spread(axes: Any, results: Sequence[Result]) -> None:
    names = [result.setting.name for result in results]
    for row, result in enumerate(results):
        found = result.simulation
        quantiles = [found.ettr_quantile(part) for part in (0.05, 0.25, 0.75, 0.95)]
        axes.hlines(row, quantiles[0], quantiles[3], color=TIERS["peer"], linewidth=1.4)
        axes.hlines(row, quantiles[1], quantiles[2], color=TIERS["peer"], linewidth=6)
        axes.plot(found.ettr, row, "o", color="white", markeredgecolor=TIERS["peer"], markersize=7)
        axes.annotate(
            f"{found.ettr:.3f}",
            (found.ettr, row),
            (0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.8)
    axes.set_xlabel("ETTR: training time that counted, of all time")
    axes.set_title("mean, and where half and nine tenths of the lives end", loc="left", fontsize=10)
    remove_frame(axes, "x")


def _gains(axes: Any, gains: Sequence[Gain]) -> None:
    rows = range(len(gains))
    colours = [TIERS["peer"] if each.by.endswith("s less") else TIERS["local"] for each in gains]
    axes.barh(rows, [1440 * each.gain for each in gains], color=colours, height=0.65)
    axes.set_yticks(rows, [f"{each.part}, {each.by}" for each in gains], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("minutes of training gained per day")
    axes.set_title("what would change it most", loc="left", fontsize=10)
    remove_frame(axes, "x")


def _cadence(
    axes: Any, curves: dict[str, list[tuple[int, float]]], layout: JobLayout, assumed: Assumptions
) -> None:
    for name, points in curves.items():
        axes.plot(
            *zip(*points, strict=True), "-", color=_STYLES[name], marker="o", markersize=3.5, label=name
        )
    formula = [(every, store_only(layout, assumed, every)) for every in _CADENCES]
    axes.plot(
        *zip(*formula, strict=True),
        "--",
        color=FAULT,
        label="everything comes back from a store (Daly's formula)",
    )
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(_CADENCES, [f"{every:,}" for every in _CADENCES])
    axes.set_xlabel(f"steps between saves ({assumed.step_seconds:g} s each)")
    axes.set_ylim(0, 1)
    axes.set_title("what saving more often is worth", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    remove_frame(axes, "y")


def _curves(
    layout: JobLayout, assumed: Assumptions, *, days: float, runs: int, seed: int, progress: Progress
) -> dict[str, list[tuple[int, float]]]:
    base = layout.wanted
    # Where the job asks for no copies there is nothing to compare with.
    copies = base if base.parity or base.copies else replace(base, copies=min(1, base.workers - 1))
    alone = replace(base, copies=0, parity=None, deltas=False)
    found: dict[str, list[tuple[int, float]]] = {}
    task = progress.add_task("the picture", total=3 * len(_CADENCES) * runs)
    for name in _STYLES:
        points = []
        for every in _CADENCES:
            wanted = (
                replace(copies, deltas=name == _DELTAS, snapshot_every=every)
                if name != _ALONE
                else replace(alone, remote_every=every)
            )
            described = scenario(layout, wanted, assumed)
            simulation = simulate_lives(
                described, days=days, runs=runs, seed=seed, tick=lambda done: progress.advance(task, done)
            )
            points.append((every, simulation.ettr))
        found[name] = points
    return found
