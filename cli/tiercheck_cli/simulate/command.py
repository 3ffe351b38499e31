"""`simulate`: how much of its time a job would train, on nodes that may exist only on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, layout_of, plan_layout
from tiercheck_cli.plan.command import JobFile, NodesFile, PerNode, Shape, job_and_nodes
from tiercheck_cli.simulate.assumptions import Assumptions, assume, read_assumed
from tiercheck_cli.simulate.measured import jobs_in
from tiercheck_cli.simulate.play import play
from tiercheck_cli.simulate.screen import Result, screen
from tiercheck_cli.simulate.settings import scenario, settings, store_only
from tiercheck_cli.terminal import (
    Context,
    Kubeconfig,
    Namespace,
    Output,
    OutputFormat,
    console,
    progress_bar,
    write,
)


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
    """How much of its time a job would train (ETTR), by playing months of failures with the operator's own
    planning."""
    said = read_assumed(assumed_by)
    found: dict[str, Any]
    if job is not None:
        if file or nodes or made_up or workers:
            raise CannotDo("give either a job of the cluster, or -f with --nodes; not both", USAGE)
        cluster = Cluster.connect(kubeconfig, context, namespace)
        found = cluster.job(job)
        layout = layout_of(cluster, found)
    else:
        found, listed = job_and_nodes(file, nodes, made_up)
        if workers is not None:
            found["spec"]["workers"] = workers
        layout = plan_layout(found, listed, workers_per_node)
    if said.state_size is not None:
        layout = replace(layout, spec=replace(layout.spec, state_size=said.bytes_of("state_size", "")))
    assumed = assume(
        layout, found, said, jobs_in(measured) if measured else [found] if job is not None else []
    )
    results = []
    with progress_bar() as progress:
        for row in settings(layout.spec, compare or [], layout.topology.level_names):
            described = scenario(layout, row.spec, assumed)
            task = progress.add_task(row.name, total=runs)
            tick = partial(progress.advance, task)
            simulation = play(described, days=days, runs=runs, seed=seed, tick=tick)
            results.append(Result(row.name, described.placement, simulation))
    every = layout.spec.remote_every
    formula = (every, store_only(layout, assumed, every)) if every else None
    if output is not Output.TABLE:
        write(_as_json(layout, results, assumed, formula=formula, seed=seed), output)
    else:
        terminal = console()
        terminal.print(screen(layout, results, assumed, terminal.width, formula=formula))


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
