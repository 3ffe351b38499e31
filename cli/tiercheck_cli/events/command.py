"""`events`: what happened to a job, in order of time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Column, Table

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.events.recoveries import Happening, story
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.terminal import (
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
    remark,
    write,
)

_STYLE = {"Warning": "yellow", "Recovery": "cyan"}
_GOOD = {"Recovered", "Completed", "TrainingReleased", "Grown"}


def events(
    job: Annotated[str, typer.Argument(help="The job.")],
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on with what happens next, until Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks with --watch.")] = 2.0,
    output: OutputFormat = Output.TABLE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """The job's Events and recoveries, merged in order of time (UTC)."""
    if watch and output is not Output.TABLE:
        raise CannotDo("--watch is for people: leave out -o, or look once", USAGE)
    cluster = Cluster.connect(kubeconfig, context, namespace)
    told = _look(cluster, job)
    if output is not Output.TABLE:
        write({"job": job, "events": told}, output)
        return
    if not told:
        remark(
            f"nothing is told of {job}: Kubernetes forgets Events after an hour, and it has not recovered "
            "from anything"
        )
    terminal = console()
    if told:
        terminal.print(events_table(told, time.time()))
    try:
        while watch:
            time.sleep(every)
            latest = _look(cluster, job)
            fresh = [entry for entry in latest if entry not in told]
            told = latest
            if fresh:
                terminal.print(events_table(fresh, time.time(), heading=False))
    except KeyboardInterrupt:
        return


def events_table(told: Sequence[Happening], now: float | None = None, heading: bool = True) -> Table:
    """Oldest first, each with its age if `now` is given."""
    table = columns(
        Column("TIME", no_wrap=True, min_width=19),
        Column("WHAT", no_wrap=True, min_width=16),
        Column("MESSAGE", ratio=1),
        *([] if now is None else [Column("AGO", no_wrap=True, justify="right", min_width=5)]),
        show_header=heading,
    )
    for entry in told:
        style = "green" if entry.reason in _GOOD else _STYLE.get(entry.kind, "")
        again = f"  (×{entry.count})" if entry.count > 1 else ""
        row = [Text(clock(entry.at)), Text(entry.reason, style=style), Text(entry.message + again)]
        table.add_row(*row, *([] if now is None else [Text(age(max(0.0, now - entry.at)))]))
    return table


def _look(cluster: Cluster, job: str) -> tuple[Happening, ...]:
    found = cluster.job(job)
    return story(found, cluster.events(found))
