"""`simulate`: how much of its time a job would train, on nodes that may exist only on paper."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from tiercheck_cli.simulate.measured import Told, jobs_in, times_of
from tiercheck_cli.simulate.screen import screen
from tiercheck_cli.simulate.sensitivity import Gain, changes, find_gains
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
from tiercheck_operator.model.quantity import parse_quantity

_RATES, _TIMES = "What fails how often", "How long things take"


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
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Which second saved would buy most, too.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw it: FILE.svg, .png or .pdf, with ETTR against steps between saves."),
    ] = None,
    failures: Annotated[
        str, typer.Option(help=f"Whose failures: {', '.join(assumptions.RECORDS)}.", rich_help_panel=_RATES)
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
    moves: Annotated[
        float, typer.Option(min=0, help="Pods moved or evicted, per day of the job.", rich_help_panel=_RATES)
    ] = 0.0,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            help="Times of recoveries, of kubectl get tcj -o json. Default: the job's own.",
            rich_help_panel=_TIMES,
        ),
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
        float | None,
        typer.Option(
            min=0, help="Until a failure is acted on. Default: as measured, else 5.", rich_help_panel=_TIMES
        ),
    ] = None,
    restart_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="From the state's being there to the first step. Default: as measured, else 30.",
            rich_help_panel=_TIMES,
        ),
    ] = None,
    replace_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="For a pod on another node, without a spare. Default: as measured, else 300.",
            rich_help_panel=_TIMES,
        ),
    ] = None,
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
    told = _CommandLine(
        failures, node_failures, process_failures, tuple(domain_failures or ()),
        step_seconds or pace or STEP_SECONDS,
        peer_bandwidth, remote_bandwidth, Told(detect_seconds, restart_seconds, replace_seconds), moves,
    )  # fmt: skip
    jobs = jobs_in(measured) if measured else [found] if job is not None else []
    assumed = _assume(layout, found["spec"], told, jobs)
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
        gains: tuple[Gain, ...] = ()
        if sensitivity:
            described = scenario(layout, rows[0].wanted, assumed)
            task = progress.add_task("sensitivity", total=runs * len(list(changes(described))))
            gains = find_gains(results[0].simulation, described, seed=seed, tick=_advance(progress, task))
        every = layout.wanted.remote_every
        formula = (every, store_only(layout, assumed, every)) if every else None
        if picture is not None:
            from tiercheck_cli.simulate.picture import draw

            draw(
                picture, layout, results, assumed, gains=gains,
                days=days, runs=runs, seed=seed, progress=progress,
            )  # fmt: skip
    if output is not Output.TABLE:
        write(_as_json(layout, results, assumed, formula=formula, seed=seed, gains=gains), output)
    else:
        terminal = console()
        terminal.print(screen(layout, results, assumed, terminal.width, formula=formula, gains=gains))
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
class _CommandLine:
    """What the command line says; None: nothing."""

    failures: str
    node: float | None
    process: float | None
    domains: tuple[str, ...]
    step_seconds: float
    peer_bandwidth: str | None
    remote_bandwidth: str | None
    recovery: Told
    moves: float


def _assume(
    layout: JobLayout, spec: dict[str, Any], told: _CommandLine, jobs: Sequence[Mapping[str, Any]]
) -> Assumptions:
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
    usual = assumptions.times(
        wanted,
        peer_bandwidth=_bytes("--peer-bandwidth", peer),
        remote_bandwidth=_bytes("--remote-bandwidth", remote),
    )
    times, measured = times_of(jobs, usual, told.recovery, layout.topology)
    rates = ", ".join(
        f"{name} {rate:.3g}" for name, rate in {"node": node, "process": process, **domains}.items()
    )
    return Assumptions(
        node=node,
        process=process,
        domains=domains,
        times=times,
        step_seconds=told.step_seconds,
        moves=told.moves,
        sources=(
            f"failures per 1,000 days of a node or domain: {rates}",
            *((counted.source,) if told.node is None and told.process is None else ()),
            *((f"{told.moves:g} pods a day are moved or evicted",) if told.moves else ()),
            f"a step takes {told.step_seconds:g} s",
            *(() if measured else assumptions.times_told(times, guessed=not wanted.state_size)),
        ),
        measured=measured,
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
    *,
    formula: tuple[int, float] | None,
    seed: int,
    gains: Sequence[Gain],
) -> dict[str, Any]:
    return {
        "job": layout.name,
        "workers": len(layout.sites),
        "nodes": len({site.node for site in layout.sites}),
        "seed": seed,
        "failuresPerDay": assumed.failures_per_day(layout.sites, layout.topology),
        "assumed": list(assumed.sources),
        "measured": list(assumed.measured),
        "sensitivity": [asdict(each) for each in gains],
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
