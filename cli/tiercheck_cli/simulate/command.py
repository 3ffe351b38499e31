"""Implements `simulate`: how much of its time a job would train, on real or invented nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.table import Column, Table

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.events import TIERS
from tiercheck_cli.layout import JobLayout, layout_of, plan_layout
from tiercheck_cli.plan.command import JobFile, NodesFile, PerNode, Shape, check_named, job_and_nodes
from tiercheck_cli.simulate.assumptions import (
    Assumptions,
    assume,
    read_assumed,
    scenario,
    settings,
    store_only,
)
from tiercheck_cli.simulate.play import Simulation, play
from tiercheck_cli.simulate.scenario import jobs_in
from tiercheck_cli.terminal import (
    TIER_COLOURS,
    Context,
    Kubeconfig,
    Namespace,
    Output,
    OutputFormat,
    Text,
    columns,
    folded,
    progress_bar,
    right,
    short,
    show,
)
from tiercheck_operator.model.conditions import plural
from tiercheck_operator.planning.placement.placement import Placement


def simulate(
    job: Annotated[str | None, typer.Argument(help="A job in the cluster, as it is placed.")] = None,
    *,
    file: JobFile = None,
    nodes: NodesFile = None,
    made_up: Shape = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=20_000, help="Instead of the file's.", rich_help_panel="Without a cluster"),
    ] = None,
    workers_per_node: PerNode = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                'Gain one thing at a time: "copies=0,1,2 parity=4+1 spares=0,2 snapshot=10,100 '
                'remote=500,none".'
            )
        ),
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, help="Length of a life.")] = 30.0,
    runs: Annotated[int, typer.Option(min=1, max=100_000, help="How many lives.")] = 100,
    seed: Annotated[int, typer.Option(help="The same seed gives the same lives.")] = 0,
    assumed_by: Annotated[
        str | None,
        typer.Option(
            "--assume", metavar="FILE", help="YAML: whose failures or which rates, times, sizes, bandwidths."
        ),
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(help="Times of recoveries, of kubectl get tcj -o json. Default: the job's own."),
    ] = None,
    output: OutputFormat = Output.TABLE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Play months of failures with the operator's planning: how much of its time a job would train (ETTR)."""
    overrides = read_assumed(assumed_by)
    found: dict[str, Any]
    if job is not None:
        check_named(job, file, nodes, made_up, workers)
        cluster = Cluster.connect(kubeconfig, context, namespace)
        found = cluster.job(job)
        layout = layout_of(cluster, found)
    else:
        found, listed = job_and_nodes(file, nodes, made_up)
        if workers is not None:
            found["spec"]["workers"] = workers
        layout = plan_layout(found, listed, workers_per_node)
    if overrides.state_size is not None:
        layout = replace(layout, spec=replace(layout.spec, state_size=overrides.bytes_of("state_size", "")))
    assumed = assume(
        layout, found, overrides, jobs_in(measured) if measured else [found] if job is not None else []
    )
    results = []
    with progress_bar() as progress:
        for name, spec in settings(layout.spec, compare or [], layout.topology.level_names).items():
            described = scenario(layout, spec, assumed)
            task = progress.add_task(name, total=runs)
            tick = partial(progress.advance, task)
            simulation = play(described, days=days, runs=runs, seed=seed, tick=tick)
            results.append(Result(name, described.placement, simulation))
    every = layout.spec.remote_every
    formula = (every, store_only(layout, assumed, every)) if every else None
    show(
        output,
        lambda: _as_json(layout, results, assumed, formula=formula, seed=seed),
        lambda width: screen(layout, results, assumed, width, formula=formula),
    )


def _as_json(
    layout: JobLayout,
    results: Sequence[Result],
    assumed: Assumptions,
    *,
    formula: tuple[int, float] | None,
    seed: int,
) -> dict[str, Any]:
    return {
        "job": layout.name,
        "workers": len(layout.sites),
        "nodes": len({site.node for site in layout.sites}),
        "seed": seed,
        "failuresPerDay": assumed.failures_per_day(layout.sites, layout.topology),
        "assumed": list(assumed.sources),
        "measured": list(assumed.measured),
        "storeOnly": None if formula is None else {"everySteps": formula[0], "ettr": formula[1]},
        "settings": [
            {
                "setting": result.setting,
                "ettr": result.simulation.ettr,
                "ettr5": result.simulation.ettr_quantile(0.05),
                "ettr95": result.simulation.ettr_quantile(0.95),
                "recoveriesPerLife": dict(result.simulation.recoveries),
                "failuresPerLife": dict(result.simulation.failures),
                "lostStepsPerLife": result.simulation.lost_steps,
                "downSecondsPerLife": result.simulation.down_seconds,
                "tolerates": list(result.placement.tolerates),
                "runs": [run.ettr for run in result.simulation.runs],
            }
            for result in results
        ],
    }


@dataclass(frozen=True)
class Result:
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
    """Returns the results for a terminal; `formula`: (steps between versions, ETTR) of a store alone."""
    nodes = len({site.node for site in layout.sites})
    days = results[0].simulation.days
    runs = len(results[0].simulation.runs)
    failures = assumed.failures_per_day(layout.sites, layout.topology)
    return Group(
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
        *([_item(_STORE_ONLY.format(every=formula[0]))] if formula is not None else []),
        *(_item(remark, "yellow") for remark in layout.remarks),
    )


_STORE_ONLY = (
    "* a version every {every:,} steps in the store and nothing in memory, by Daly's formula "
    "(FGCS 22(3), 2006)"
)


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
    """Formats a count per day, with decimals while they are significant."""
    if value == 0:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}" if value >= 0.0001 else "<0.0001"
