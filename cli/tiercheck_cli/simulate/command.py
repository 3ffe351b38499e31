"""`simulate`: how much of its time a job would train, on nodes that may exist only on paper."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, layout_of, plan_layout
from tiercheck_cli.plan.command import JobFile, NodesFile, PerNode, Shape, job_and_nodes
from tiercheck_cli.simulate import assumptions
from tiercheck_cli.simulate.assumptions import STEP_SECONDS, Assumptions
from tiercheck_cli.simulate.lives import Result, scenario, simulate_lives, store_only
from tiercheck_cli.simulate.screen import screen
from tiercheck_cli.simulate.settings import settings
from tiercheck_cli.terminal import (
    Context,
    Kubeconfig,
    Namespace,
    Output,
    OutputFormat,
    console,
    remark,
    write,
)
from tiercheck_operator.planning.quantity import parse_quantity

_RATES, _TIMES = "What fails how often", "How long things take"


def simulate(
    job: Annotated[str | None, typer.Argument(help="A job in the cluster, as it is placed.")] = None,
    *,
    file: JobFile = None,
    nodes: NodesFile = None,
    made_up: Shape = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Instead of the file's.", rich_help_panel="Without a cluster"),
    ] = None,
    workers_per_node: PerNode = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                'Change one thing at a time: "copies=0,1,2 parity=4+1 spares=0,2 snapshot=10,100 '
                'remote=500,none".'
            )
        ),
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, help="Length of a life.")] = 30.0,
    runs: Annotated[int, typer.Option(min=1, max=100_000, help="How many lives.")] = 100,
    seed: Annotated[int, typer.Option(help="The same seed gives the same lives.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw it: FILE.svg, .png or .pdf, with ETTR against steps between saves."),
    ] = None,
    failures: Annotated[
        str, typer.Option(help="Whose failures: rsc-1, rsc-2 or llama-3.", rich_help_panel=_RATES)
    ] = "rsc-1",
    node_failures: Annotated[
        float | None, typer.Option(min=0, help="Per 1,000 node-days.", rich_help_panel=_RATES)
    ] = None,
    process_failures: Annotated[
        float | None, typer.Option(min=0, help="Crashes per 1,000 node-days.", rich_help_panel=_RATES)
    ] = None,
    domain_failures: Annotated[
        list[str] | None,
        typer.Option(help="LEVEL=RATE per 1,000 days of a domain: rack=2.", rich_help_panel=_RATES),
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Default: the job's own, else 5.", rich_help_panel=_TIMES)
    ] = None,
    state_size: Annotated[
        str | None,
        typer.Option(help="Of one rank, such as 24Gi. Default: the job's.", rich_help_panel=_TIMES),
    ] = None,
    peer_bandwidth: Annotated[
        str | None,
        typer.Option(help="Bytes/s per worker. Default: the job's, else 2Gi.", rich_help_panel=_TIMES),
    ] = None,
    remote_bandwidth: Annotated[
        str | None,
        typer.Option(help="Bytes/s per worker. Default: the job's, else 200Mi.", rich_help_panel=_TIMES),
    ] = None,
    detect_seconds: Annotated[
        float, typer.Option(min=0, help="Until a failure is acted on.", rich_help_panel=_TIMES)
    ] = 5.0,
    restart_seconds: Annotated[
        float,
        typer.Option(min=0, help="From the state's being there to the first step.", rich_help_panel=_TIMES),
    ] = 30.0,
    replace_seconds: Annotated[
        float, typer.Option(min=0, help="For a pod on another node, without a spare.", rich_help_panel=_TIMES)
    ] = 300.0,
    output: OutputFormat = Output.TABLE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """How much of its time a job would train (ETTR), by playing months of failures with the operator's own
    planning."""
    if picture is not None and picture.suffix not in (".svg", ".png", ".pdf"):
        raise CannotDo(f"{picture} must end with .svg, .png or .pdf", USAGE)
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
    if state_size is not None:
        layout = replace(layout, wanted=replace(layout.wanted, state_size=_bytes("--state-size", state_size)))
    pace = ((found.get("status") or {}).get("progress") or {}).get("stepSeconds")
    told = _Told(
        failures, node_failures, process_failures, tuple(domain_failures or ()),
        step_seconds or pace or STEP_SECONDS,
        peer_bandwidth, remote_bandwidth, detect_seconds, restart_seconds, replace_seconds,
    )  # fmt: skip
    assumed = _assume(layout, found["spec"], told)
    rows = settings(layout.wanted, compare or [])
    results = []
    with _progress() as progress:
        for row in rows:
            described = scenario(layout, row.wanted, assumed)
            task = progress.add_task(row.name, total=runs)
            try:
                simulation = simulate_lives(
                    described,
                    days=days,
                    runs=runs,
                    seed=seed,
                    tick=_advance(progress, task),
                )
            except ValueError as error:
                raise CannotDo(f"{row.name} cannot be simulated: {error}") from error
            results.append(Result(row, described.placed, simulation))
        every = layout.wanted.remote_every
        formula = (every, store_only(layout, assumed, every)) if every else None
        if picture is not None:
            from tiercheck_cli.simulate.picture import draw

            draw(picture, layout, results, assumed, days=days, runs=runs, seed=seed, progress=progress)
    if output is not Output.TABLE:
        write(_as_json(layout, results, assumed, formula, seed), output)
    else:
        terminal = console()
        terminal.print(screen(layout, results, assumed, terminal.width, formula))
    if picture is not None:
        remark(f"drawn: {picture}")


def _advance(progress: Progress, task: TaskID) -> Callable[[int], None]:
    return lambda done: progress.advance(task, done)


def _progress() -> Progress:
    """On standard error, and only for people."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip


@dataclass(frozen=True)
class _Told:
    """What the command line says; None: nothing."""

    failures: str
    node: float | None
    process: float | None
    domains: tuple[str, ...]
    step_seconds: float
    peer_bandwidth: str | None
    remote_bandwidth: str | None
    detect: float
    restart: float
    replace: float


def _assume(layout: JobLayout, spec: dict[str, Any], told: _Told) -> Assumptions:
    counted, wanted = assumptions.record(told.failures), layout.wanted
    node = counted.node if told.node is None else told.node
    process = counted.process if told.process is None else told.process
    domains = assumptions.domain_rates(told.domains, layout.topology)
    if not told.domains:
        shared = assumptions.shared_domain_rate(
            counted,
            node=node,
            process=process,
            sites=layout.sites,
            topology=layout.topology,
            level=wanted.level,
        )
        domains = {wanted.level: shared} if shared else {}
    tiers = spec.get("tiers") or {}
    peer = (
        told.peer_bandwidth or (tiers.get("peer") or {}).get("bandwidth") or str(assumptions.PEER_BANDWIDTH)
    )
    remote = (
        told.remote_bandwidth
        or (tiers.get("remote") or {}).get("bandwidth")
        or str(assumptions.REMOTE_BANDWIDTH)
    )
    times = assumptions.times(
        wanted,
        peer_bandwidth=_bytes("--peer-bandwidth", peer),
        remote_bandwidth=_bytes("--remote-bandwidth", remote),
        detect=told.detect,
        restart=told.restart,
        replace=told.replace,
    )
    restore = times.restore
    rates = ", ".join(
        f"{name} {rate:.3g}" for name, rate in {"node": node, "process": process, **domains}.items()
    )
    guess = "" if wanted.state_size else " (guesses: checkpoint.stateSize is not given)"
    return Assumptions(
        node=node,
        process=process,
        domains=domains,
        times=times,
        step_seconds=told.step_seconds,
        sources=(
            f"failures per 1,000 days of a node or domain: {rates}",
            *((counted.source,) if told.node is None and told.process is None else ()),
            f"a step takes {told.step_seconds:g} s; a failure is acted on after {told.detect:g} s, a pod is "
            "elsewhere after "
            f"{told.replace:g} s ({times.spare:g} s with a spare), the first step comes {told.restart:g} s "
            "after the state",
            f"restores take {restore.local:.3g} s from own memory, {restore.peer:.3g} s from a peer, "
            f"{restore.remote:.3g} s from the "
            f"remote tier{guess}",
        ),
    )


def _bytes(option: str, text: str) -> int:
    try:
        found = parse_quantity(text)
    except ValueError as error:
        raise CannotDo(f"{option}: {error}; say it as 24Gi or 200Mi", USAGE) from error
    if found <= 0:
        raise CannotDo(f"{option} must be above zero", USAGE)
    return found


def _as_json(
    layout: JobLayout,
    results: list[Result],
    assumed: Assumptions,
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
        "storeOnly": None if formula is None else {"everySteps": formula[0], "ettr": formula[1]},
        "settings": [
            {
                "setting": result.setting.name,
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
