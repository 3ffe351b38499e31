"""`status`: one job on one screen, or all jobs in a table."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.durations import clock
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import levels_in, node_labels, planned_spec
from tiercheck_cli.status.screen import jobs_table, screen
from tiercheck_cli.status.view import StatusView, status_view, worker_views
from tiercheck_cli.terminal import (
    Context,
    Kubeconfig,
    Namespace,
    Output,
    OutputFormat,
    Text,
    console,
    remark,
    write,
)
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
            _say_if_none(views, cluster, all_namespaces)
            console().print(jobs_table(views, all_namespaces) if views else Text())
        return
    view = _job(cluster, job, wide or output is not Output.TABLE)
    if output is not Output.TABLE:
        write(view.as_json(time.time()), output)
        return
    terminal = console()
    terminal.print(screen(view, terminal.width, wide))


def _job(cluster: Cluster, name: str, members: bool) -> StatusView:
    found = cluster.job(name)
    if not members:
        return status_view(found, time.time())
    placement = cluster.placement(found)
    try:
        levels = levels_in(planned_spec(found["spec"], placement))
    except CannotDo as failure:  # a job that cannot be planned has a status all the same
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


def _say_if_none(views: list[StatusView], cluster: Cluster, everywhere: bool) -> None:
    if not views:
        where = "in any namespace" if everywhere else f'in namespace "{cluster.namespace}"; try -A'
        remark(f"there is no TierCheckJob {where}")


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
