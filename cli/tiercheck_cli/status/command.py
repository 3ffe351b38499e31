"""Implements `status`: one job on one screen, or all jobs in a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Column, Table

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.events import EXACT_WORDS, PastRecovery, count_ranks, recovery_bar
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import levels_in, node_labels, planned_spec
from tiercheck_cli.status.view import (
    Attention,
    RestoreView,
    StatusView,
    TierView,
    WorkerView,
    status_view,
    worker_views,
)
from tiercheck_cli.terminal import (
    PHASES,
    TIER_COLOURS,
    Context,
    Kubeconfig,
    Namespace,
    Output,
    OutputFormat,
    Text,
    age,
    clock,
    columns,
    console,
    facts,
    folded,
    remark,
    right,
    short,
    show,
    write,
)  # fmt: skip
from tiercheck_operator.model.conditions import plural
from tiercheck_operator.planning.topology import Topology


def status(
    job: Annotated[str | None, typer.Argument(help="The job. Without it: all jobs of the namespace.")] = None,
    *,
    wide: Annotated[
        bool, typer.Option("--wide", "-w", help="Every worker: pod, node, domain, restarts.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every few seconds, until Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks with --watch.")] = 2.0,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")
    ] = False,
    output: OutputFormat = Output.TABLE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Phase, step, tiers, tolerance, what needs attention, and recent recoveries."""
    if job is not None and all_namespaces:
        raise CannotDo(
            "a job is in one namespace: give its name with -n NAMESPACE, or -A without a name", USAGE
        )
    if watch and output is not Output.TABLE:
        raise CannotDo("--watch is for people: leave out -o, or look once", USAGE)
    cluster = Cluster.connect(kubeconfig, context, namespace)
    if watch:
        _watch(cluster, job, all_namespaces, wide, every)
        return
    if job is None:
        views = _jobs(cluster, all_namespaces)
        if output is not Output.TABLE:
            write({"jobs": [view.as_json(time.time()) for view in views]}, output)
        else:
            if not views:
                where = "any namespace" if all_namespaces else f'namespace "{cluster.namespace}"; try -A'
                remark(f"there is no TierCheckJob in {where}")
            console().print(jobs_table(views, all_namespaces) if views else Text())
        return
    view = _job(cluster, job, wide or output is not Output.TABLE)
    show(output, lambda: view.as_json(time.time()), lambda width: screen(view, width, wide))


def _job(cluster: Cluster, name: str, members: bool) -> StatusView:
    found = cluster.job(name)
    if not members:
        return status_view(found, time.time())
    placement = cluster.placement(found)
    try:
        levels = levels_in(planned_spec(found["spec"], placement))
    except CannotDo as failure:  # a job that cannot be planned still has a status
        remark(str(failure))
        levels = ()
    labels, problem = node_labels(cluster, placement)
    if problem:
        remark(problem)
    topology = Topology.build(labels, levels)
    workers = worker_views(cluster.pods(found), placement.holders() if placement else {}, topology)
    return status_view(found, time.time(), workers, tuple(level.name for level in levels[:-1]))


def _jobs(cluster: Cluster, everywhere: bool) -> list[StatusView]:
    now = time.time()
    views = [status_view(job, now) for job in cluster.jobs(everywhere)]
    return sorted(views, key=lambda view: (view.namespace, view.name))


def _watch(cluster: Cluster, job: str | None, everywhere: bool, wide: bool, every: float) -> None:
    terminal = console()

    def look() -> Group:
        now = clock(time.time())
        if job is None:
            body: Group = Group(jobs_table(_jobs(cluster, everywhere), everywhere))
        else:
            body = screen(_job(cluster, job, wide), terminal.width, wide)
        return Group(body, Text(f"\n{now} UTC, every {every:g} s, Ctrl-C to leave", style="dim"))

    try:
        if not terminal.is_terminal:
            while True:
                terminal.print(look())
                time.sleep(every)
        with Live(look(), console=terminal, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every)
                live.update(look(), refresh=True)
    except KeyboardInterrupt:
        return


_PHASES = {
    "Running": "bold green", "Completed": "bold green", "Failed": "bold red", "Pending": "bold yellow",
    "Restoring": "bold yellow", "Starting": "bold cyan", "Suspended": "bold blue", "Suspending": "bold blue",
}  # fmt: skip
_RECOVERIES = 5
_BAR = 24


def screen(view: StatusView, width: int, wide: bool = False) -> Group:
    """Returns the status for a terminal of `width` columns."""
    parts: list[RenderableType] = [_headline(view)]
    if view.doing and view.doing not in {entry.message for entry in view.attention}:
        parts.append(Padding(Text(view.doing), (0, 0, 0, 2)))
    parts += [Text(), _facts(view), Text(), _tiers(view)]
    if view.attention:
        parts += [Text(), Text("needs attention", style="bold"), *map(_attention, view.attention)]
    if view.recoveries:
        parts += [Text(), _recoveries(view, width)]
    if wide:
        parts += [Text(), _workers(view.members, view.levels)]
    return Group(*parts)


def jobs_table(views: Sequence[StatusView], everywhere: bool) -> Table:
    table = columns(
        *(["NAMESPACE"] if everywhere else []), folded("NAME"), "PHASE", right("STEP"), right("PEER LAG"),
        right("REMOTE"), right("RESTARTS"), Column("SURVIVES", ratio=1), right("!"), right("AGE"),
        collapse_padding=True,
    )  # fmt: skip
    for view in views:
        by_name = {tier.name: tier for tier in view.tiers}
        table.add_row(
            *([Text(view.namespace)] if everywhere else []),
            Text(view.name),
            Text(view.phase, style=_PHASES.get(view.phase, "")),
            Text(_number(view.step)),
            Text(_number(by_name["peer"].lag_steps)),
            Text(_number(by_name["remote"].step)),
            Text(str(view.restarts)),
            Text(", ".join(view.tolerates) or "-"),
            Text(str(len(view.attention)) if view.attention else "", style="bold yellow"),
            Text(age(view.age_seconds) if view.age_seconds is not None else "-"),
        )
    return table


def _headline(view: StatusView) -> RenderableType:
    ranks = "" if view.procs_per_worker == 1 else f" × {view.procs_per_worker} ranks"
    return Text.assemble(
        (f"{view.namespace}/", "dim"),
        (view.name, "bold"),
        "  ",
        (view.phase, _PHASES.get(view.phase, "bold")),
        (f"  attempt {view.attempt} · ", "dim"),
        (_workers_now(view), "dim" if view.workers == view.wanted_workers else "bold yellow"),
        (ranks, "dim"),
        (f" · {age(view.age_seconds)} old" if view.age_seconds is not None else "", "dim"),
    )


def _workers_now(view: StatusView) -> str:
    wanted = plural(view.wanted_workers, "worker")
    return wanted if view.workers == view.wanted_workers else f"{view.workers} of {wanted}"


def _facts(view: StatusView) -> Table:
    grid = facts()
    pace = f"   {short(view.step_seconds)} each" if view.step_seconds else ""
    grid.add_row("  step", Text.assemble((_number(view.step), "bold"), pace))
    if view.restoring is not None:
        grid.add_row("  restored", _restored(view.restoring))
    spread = f"   (copies apart by {view.spread})" if view.spread and view.spread != "none" else ""
    grid.add_row("  survives", Text.assemble(_survives(view), (spread, "dim")))
    if view.unprotected_workers:
        unprotected = f"{view.unprotected_workers} of {view.workers} workers"
        grid.add_row("  unprotected", Text(unprotected, style="bold yellow"))
    grid.add_row("  restarts", _restarts(view))
    if view.recoveries and view.recoveries[0].exact:
        grid.add_row("  resume", _resume(view.recoveries[0]))
    if view.snapshot_every or view.deltas:
        grid.add_row("  saves", _saves(view))
    if view.memory_needed and view.memory_limit:
        memory = f"{_gib(view.memory_needed)} of {_gib(view.memory_limit)} in the fullest pod"
        style = "bold yellow" if view.memory_needed > view.memory_limit else ""
        grid.add_row("  memory", Text(memory, style=style))
    return grid


def _restored(restoring: RestoreView) -> RenderableType:
    pace = "" if not restoring.bytes_per_second else f", {_gib(int(restoring.bytes_per_second))}/s"
    share = min(100, 100 * restoring.bytes // restoring.wanted)
    return Text.assemble(
        (f"{share} %", "bold"), f"   {_gib(restoring.bytes)} of {_gib(restoring.wanted)}{pace}"
    )


def _survives(view: StatusView) -> str:
    if view.tolerates:
        return f"the loss of {'; '.join(view.tolerates)}"
    if view.tolerates_once_complete:
        return f"nothing yet; once its copies are made, the loss of {'; '.join(view.tolerates_once_complete)}"
    return "nothing" if view.spread else "nothing is placed yet"


def _restarts(view: StatusView) -> RenderableType:
    if not view.restarts:
        return Text("none")
    nearly = view.crashes >= max(1, view.max_restarts - 1)
    return Text.assemble(
        f"{view.restarts}: {plural(view.disruptions, 'disruption')}, ",
        (f"{view.crashes} of {view.max_restarts} crashes", "bold yellow" if nearly else ""),
    )


def _resume(entry: PastRecovery) -> RenderableType:
    style = {"Proven": "green", "Differs": "bold red"}.get(entry.exact, "")
    return Text.assemble(
        (EXACT_WORDS.get(entry.exact, entry.exact), style), (f"   {entry.exact_message}", "dim")
    )


def _saves(view: StatusView) -> str:
    parts = [f"a snapshot every {view.snapshot_every} steps"] if view.snapshot_every else []
    if view.deltas:
        parts.append("a delta at every step" if view.deltas == "EveryStep" else "no deltas")
    return ", ".join(parts)


def _tiers(view: StatusView) -> Table:
    numbers = map(right, ("STEP", "BEHIND", "LOST IF USED", "COMPLETE", "PROVED"))
    table = columns("TIER", *numbers, collapse_padding=True)
    for tier in view.tiers:
        table.add_row(Text(f"● {tier.name}", style=TIER_COLOURS[tier.name]), *_tier_cells(tier))
    return table


def _tier_cells(tier: TierView) -> tuple[Text, ...]:
    if tier.step is None:
        state = "nothing yet" if tier.configured else "not configured"
        return (Text(state, style="dim"), Text(), Text(), Text(), Text())
    lag = tier.lag_steps or 0
    return (
        Text(_number(tier.step)),
        Text(f"{lag:,} step{'' if lag == 1 else 's'}"),
        Text("-" if tier.lag_seconds is None else short(tier.lag_seconds)),
        Text("-" if tier.age_seconds is None else f"{age(tier.age_seconds)} ago"),
        Text("-" if tier.proof_age_seconds is None else f"{age(tier.proof_age_seconds)} ago"),
    )


def _attention(entry: Attention) -> Table:
    grid = facts(gap=1)
    since = f"  {age(entry.since_seconds)}" if entry.since_seconds is not None else ""
    grid.add_row(
        Text("  !", style="bold yellow"),
        Text.assemble((entry.reason, "bold yellow"), (f"  {entry.condition}{since}", "dim")),
    )
    grid.add_row("", Text(entry.message))
    grid.add_row("", Text.assemble(("to do  ", "bold"), entry.advice))
    return grid


def _recoveries(view: StatusView, width: int) -> Group:
    shown = view.recoveries[:_RECOVERIES]
    longest = max(recovery.total for recovery in shown) or 1.0
    bar = _BAR if width >= 100 else max(6, width - 68)
    phases = Column(min_width=bar, no_wrap=True)
    table = columns(
        "RECOVERY", "FROM", right("STEP"), right("LOST"), right("TOOK"), phases, collapse_padding=True
    )
    for entry in shown:
        table.add_row(
            Text(entry.cause),
            Text(count_ranks(entry.tiers)),
            Text(_number(entry.step)),
            Text(_number(entry.lost_steps)),
            Text(short(entry.total)),
            recovery_bar(entry, longest, bar),
        )
    legend = Text("  ")
    for _, words, colour in PHASES:
        legend.append("█ ", style=colour).append(f"{words}  ", style="dim")
    return Group(table, legend)


def _workers(members: Sequence[WorkerView], levels: Sequence[str]) -> Table:
    shown = [index for index in range(len(levels)) if any(member.domains[index] != "?" for member in members)]
    domains = (folded(levels[index].upper()) for index in shown)
    table = columns(
        right("WORKER"), folded("POD"), "PHASE", folded("NODE"), *domains, folded("KEPT BY"), right("PODS"),
        right("RESTARTS"), collapse_padding=True,
    )  # fmt: skip
    for member in members:
        table.add_row(
            Text(str(member.worker)),
            Text(member.pod),
            Text(member.phase, style="" if member.phase == "Running" else "bold yellow"),
            Text(member.node or "-"),
            *(Text(member.domains[index]) for index in shown),
            Text(", ".join(map(str, member.holders)) or "-"),
            Text(str(member.replaced + 1)),
            Text(str(member.container_restarts)),
        )
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
