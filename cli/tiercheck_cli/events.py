"""Implements `events`: the Events and recoveries of a job, in order of time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from tiercheck.protocol.directive import Tier
from tiercheck_cli.cluster import Cluster
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.terminal import (
    PHASES,
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
    short,
    write,
)
from tiercheck_operator.model.conditions import plural
from tiercheck_operator.model.serialization import As, At, from_api
from tiercheck_operator.model.status import parse_time

EXACT_WORDS = {"Proven": "proven", "NotComparable": "unproven", "Differs": "differs"}
"""Labels for the result of comparing the steps that were trained again."""
TIERS = ("local", "peer", "remote")
"""The tiers, nearest first."""


def count_ranks(tiers: Mapping[str, int]) -> str:
    """Returns how many ranks came back from where, nearest first: "3 local, 1 peer"."""
    sources = ("local", "peer", "parity", "remote")  # parity is part of the peer tier
    return ", ".join(f"{tiers[source]} {source}" for source in sources if tiers.get(source)) or "from scratch"


def _read_tiers(raw: Mapping[str, Any]) -> dict[str, int]:
    return {tier: int(raw.get(tier) or 0) for tier in TIERS}


@dataclass(frozen=True)
class PastRecovery:
    """A recovery that has ended, as the CRD describes it. Seconds are durations; `ended` is unix seconds."""

    attempt: int = 0
    cause: str = "Unknown"
    message: str = ""
    reason: str = ""
    step: int = 0
    lost_steps: int = 0
    tiers: Annotated[Mapping[str, int], As(_read_tiers)] = field(default_factory=lambda: _read_tiers({}))
    deltas: int = 0
    rebuilt: int = 0
    in_process: Annotated[int, At("inProcess")] = 0
    restarted: int = 0
    restarted_message: Annotated[str, At("restartedMessage")] = ""
    detect: Annotated[float, At("detectSeconds")] = 0.0
    restore: Annotated[float, At("restoreSeconds")] = 0.0
    total: Annotated[float, At("totalSeconds")] = 0.0
    ended: Annotated[float | None, At("time"), As(parse_time)] = None
    exact: str = ""
    """The status's verdict on whether steps trained again gave the same bits; empty: not known."""
    exact_message: str = ""

    @property
    def start(self) -> float:
        """Returns the seconds from the restored state to the first new step."""
        return max(0.0, self.total - self.detect - self.restore)

    @property
    def farthest(self) -> Tier | None:
        """Returns the farthest tier that any rank needed; None: training began from scratch."""
        return next(
            (tier for tier in (Tier.REMOTE, Tier.PEER, Tier.LOCAL) if self.tiers.get(tier.value)), None
        )


def recoveries(job: Mapping[str, Any]) -> tuple[PastRecovery, ...]:
    """Returns the recoveries that the status keeps, newest first."""
    status = job.get("status") or {}
    entries = [entry for entry in status.get("recoveries") or [] if entry]
    last = status.get("lastRecovery")
    if last and not any(entry.get("attempt") == last.get("attempt") for entry in entries):
        entries.append(last)
    return tuple(
        sorted((from_api(PastRecovery, entry) for entry in entries), key=lambda entry: -entry.attempt)
    )


@dataclass(frozen=True)
class TimelineEntry:
    """One line of the list. `at` is unix seconds."""

    at: float
    kind: str
    """The kind: Normal, Warning or Recovery."""
    reason: str
    message: str
    count: int = 1


def timeline(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> tuple[TimelineEntry, ...]:
    """Merges Events and recoveries, oldest first; a recovery with an Event of its end is listed once."""
    entries = [_of_event(event) for event in events]
    ends = {
        entry.message.split(" ", 3)[1]
        for entry in entries
        if entry.reason == "Recovered" and " " in entry.message
    }
    entries += [
        _of_recovery(entry)
        for entry in recoveries(job)
        if entry.ended is not None and str(entry.attempt) not in ends
    ]
    return tuple(sorted(entries, key=lambda entry: entry.at))


def _of_event(event: Mapping[str, Any]) -> TimelineEntry:
    series = event.get("series") or {}
    times = (
        event.get("lastTimestamp"),
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
    )
    known = [at for at in map(parse_time, times) if at is not None]
    created = parse_time((event.get("metadata") or {}).get("creationTimestamp"))
    return TimelineEntry(
        at=known[0] if known else created or 0.0,
        kind=str(event.get("type") or "Normal"),
        reason=str(event.get("reason") or ""),
        message=str(event.get("message") or ""),
        count=int(series.get("count") or event.get("count") or 1),
    )


def _of_recovery(entry: PastRecovery) -> TimelineEntry:
    lost = plural(entry.lost_steps, "step")
    return TimelineEntry(
        at=entry.ended or 0.0,
        kind="Recovery",
        reason="Recovered",
        message=f"attempt {entry.attempt} after {entry.cause}: back at step {entry.step} "
        f"({count_ranks(entry.tiers)}), {lost} lost, {short(entry.total)} in all",
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
    entries = _read_timeline(cluster, job)
    if output is not Output.TABLE:
        write({"job": job, "events": entries}, output)
        return
    if not entries:
        remark(
            f"there are no Events of {job}: Kubernetes forgets Events after an hour, and it has not "
            "recovered from anything"
        )
    terminal = console()
    if entries:
        terminal.print(events_table(entries, time.time()))
    try:
        while watch:
            time.sleep(every)
            latest = _read_timeline(cluster, job)
            fresh = [entry for entry in latest if entry not in entries]
            entries = latest
            if fresh:
                terminal.print(events_table(fresh, time.time(), heading=False))
    except KeyboardInterrupt:
        return


def events_table(entries: Sequence[TimelineEntry], now: float | None = None, heading: bool = True) -> Table:
    """Returns a table in the given order, with ages if `now` is given."""
    table = columns(
        Column("TIME", no_wrap=True, min_width=19),
        Column("WHAT", no_wrap=True, min_width=16),
        Column("MESSAGE", ratio=1),
        *([] if now is None else [Column("AGO", no_wrap=True, justify="right", min_width=5)]),
        show_header=heading,
    )
    for entry in entries:
        style = "green" if entry.reason in _GOOD else _STYLE.get(entry.kind, "")
        again = f"  (×{entry.count})" if entry.count > 1 else ""
        row = [Text(clock(entry.at)), Text(entry.reason, style=style), Text(entry.message + again)]
        table.add_row(*row, *([] if now is None else [Text(age(max(0.0, now - entry.at)))]))
    return table


def recovery_bar(entry: PastRecovery, longest: float, columns: int) -> Text:
    """Returns the phases of a recovery as a bar; `longest` seconds take all the columns."""
    bar = Text()
    total = 0.0
    drawn = 0
    for part, _, colour in PHASES:
        total += getattr(entry, part)
        end = round(total / longest * columns)
        bar.append("█" * (end - drawn), style=colour)
        drawn = end
    return bar if drawn else Text("▏", style=PHASES[-1][2])


def _read_timeline(cluster: Cluster, job: str) -> tuple[TimelineEntry, ...]:
    found = cluster.job(job)
    return timeline(found, cluster.events(found))
