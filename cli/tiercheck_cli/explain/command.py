"""Implements `explain`: the reasons of the last recovery, and a forecast of the next one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from tiercheck.protocol import names
from tiercheck.protocol.directive import Tier
from tiercheck_cli.cluster import Cluster
from tiercheck_cli.events import PastRecovery, recoveries, recovery_bar
from tiercheck_cli.explain.what_if import (
    ProcessForecast,
    WhatIf,
    answer,
    forecast_processes,
    held_steps,
    hit,
    losses,
)
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, layout_of, plan_layout
from tiercheck_cli.plan.command import JobFile, NodesFile, PerNode, Shape, check_named, job_and_nodes
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
    facts,
    remark,
    right,
    short,
    show,
)
from tiercheck_operator.model.conditions import plural
from tiercheck_operator.model.spec import read_spec
from tiercheck_operator.model.status import parse_time


def explain(
    job: Annotated[str | None, typer.Argument(help="The job in the cluster.")] = None,
    *,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--if",
            help="What if this died now: node=NAME, rack=NAME (or any level), pod=NAME, worker=N, all, "
            "crash. "
            "Several: at once. A level alone, such as rack: each of its domains by itself.",
        ),
    ] = None,
    file: JobFile = None,
    nodes: NodesFile = None,
    made_up: Shape = None,
    workers_per_node: PerNode = None,
    output: OutputFormat = Output.TABLE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Explain the last restore's version and sources; with --if, what would happen if something died now."""
    found: dict[str, Any] | None = None
    pods: dict[str, int] = {}
    if job is not None:
        check_named(job, file, nodes, made_up)
        cluster = Cluster.connect(kubeconfig, context, namespace)
        found = cluster.job(job)
        if not what_if:
            _why(found, output)
            return
        layout = layout_of(cluster, found)
        if any(entry.startswith("pod=") for entry in what_if):
            pods = _workers_by_pod(cluster, found)
    else:
        described, listed = job_and_nodes(file, nodes, made_up)
        if not what_if:
            raise CannotDo(
                "of a job that is only a file there is nothing to explain but --if: say what dies", USAGE
            )
        layout = plan_layout(described, listed, workers_per_node)
    _what_if(what_if, layout, found, pods, output)


def _why(found: dict[str, Any], output: Output) -> None:
    past, status = recoveries(found), found.get("status") or {}
    answer = {
        "job": found["metadata"]["name"],
        "recovery": status.get("recovery"),
        "recoveries": list(past),
        "history": status.get("history") or [],
        "processes": {loss: _counts(entry) for loss, entry in _forecasts(found).items()},
    }
    show(output, lambda: answer, lambda width: why_screen(found, past, time.time(), width))


def _what_if(
    asked: list[str], layout: JobLayout, job: dict[str, Any] | None, pods: dict[str, int], output: Output
) -> None:
    for sentence in layout.remarks:
        remark(sentence)
    state = held_steps(layout, job)
    answers = [answer(loss, layout, state, job) for loss in losses(asked, layout, pods)]
    found = {"job": layout.name, "answers": [_as_json(entry) for entry in answers]}
    show(output, lambda: found, lambda _: what_if_screen(answers, layout))


def _as_json(entry: WhatIf) -> dict[str, Any]:
    farthest = entry.resume_point.farthest
    return {
        "loss": entry.loss.name,
        "lostWorkers": sorted(entry.loss.workers),
        "step": entry.resume_point.step,
        "lostSteps": entry.lost_steps,
        "lostSeconds": entry.lost_seconds,
        "ranks": {tier.value: count for tier, count in entry.ranks.items()},
        "remoteNeeded": farthest is Tier.REMOTE,
        "fromScratch": farthest is None,
        "processes": _counts(entry.processes),
        "seconds": round(entry.without_training.seconds, 3),
        "estimated": not entry.without_training.measured,
        "estimatedFrom": entry.without_training.source,
        "from": {str(worker): list(givers) for worker, givers in entry.peers.items()},
    }


def _counts(entry: ProcessForecast) -> dict[str, Any]:
    return {"stay": entry.stay, "restart": entry.restart, **({"why": entry.why} if entry.why else {})}


def _forecasts(job: Mapping[str, Any]) -> dict[str, ProcessForecast]:
    spec, size = read_spec(job["spec"]), (job.get("status") or {}).get("size") or {}
    workers = int(size.get("workers") or spec.workers)
    kinds = {"a process ends": 0, "a pod is lost": 1, "every pod is lost, or the size changes": workers}
    return {kind: forecast_processes(spec, workers, lost, job) for kind, lost in kinds.items()}


def _workers_by_pod(cluster: Cluster, job: dict[str, Any]) -> dict[str, int]:
    found = {}
    for pod in cluster.pods(job):
        worker = (pod["metadata"].get("labels") or {}).get(names.LABEL_WORKER, "")
        if worker.isdigit():
            found[pod["metadata"]["name"]] = int(worker)
    return found


_WHENCE = {
    Tier.LOCAL: "from their own pod's memory",
    Tier.PEER: "from the memory of other workers",
    Tier.REMOTE: "from the remote tier",
}
_BAR = 28
_PEERS_NAMED = 8
LOOP = "if its loop is checkpointer.steps"


def why_screen(job: Mapping[str, Any], past: Sequence[PastRecovery], now: float, width: int) -> Group:
    """Shows the newest recovery, and the attempts that led to the current step. `past`: newest first."""
    status, metadata = job.get("status") or {}, job["metadata"]
    name = f"{metadata['namespace']}/{metadata['name']}"
    parts: list[RenderableType] = []
    under_way = status.get("recovery")
    if under_way:
        parts += [_under_way(under_way, name, now), Text()]
    if not past:
        parts.append(Text(f"{name} has not had to come back from anything yet."))
    else:
        parts += [*_recovery(past[0], name, now, width)]
    if status.get("phase") == "Running":
        grid = facts()
        for kind, entry in _forecasts(job).items():
            grid.add_row(f"  {kind}", Text(str(entry)))
        parts += [Text(), Text("processes, if something failed now", style="dim"), grid]
    history = status.get("history") or []
    if history:
        parts += [Text(), _history(history, status, width)]
    return Group(*parts)


def _under_way(recovery: Mapping[str, Any], name: str, now: float) -> Group:
    since = parse_time(recovery.get("failedAt"))
    lines = [
        Text.assemble(
            (name, "bold"), " is on its way back now", f", for {short(now - since)}" if since else ""
        )
    ]
    lines.append(Text(f"  what failed   {recovery.get('message') or recovery.get('cause')}"))
    if recovery.get("reason"):
        lines.append(Text(f"  comes back to {recovery['reason']}"))
    return Group(*lines)


def _recovery(entry: PastRecovery, name: str, now: float, width: int) -> list[RenderableType]:
    ago = f", {age(now - entry.ended)} ago" if entry.ended is not None else ""
    when = f" ({clock(entry.ended)} UTC{ago})" if entry.ended is not None else ""
    grid = facts()
    head, *rest = (part.strip() for part in entry.reason.split(";"))
    grid.add_row("  what failed", Text.assemble((entry.cause, "bold yellow"), f"  {entry.message}"))
    grid.add_row("  back to", Text.assemble((head or f"step {entry.step}", "bold")))
    for clause in rest:
        grid.add_row("", Text(f"· {clause}"))
    for sentence in _how(entry):
        grid.add_row("", Text(f"· {sentence}"))
    grid.add_row(
        "  cost",
        Text(f"{plural(entry.lost_steps, 'step')} trained again, {short(entry.total)} without training"),
    )
    return [
        Text.assemble(
            (name, "bold"), f": why attempt {entry.attempt} began at step {entry.step:,}", (when, "dim")
        ),
        Text(),
        grid,
        Text(),
        _where_from(entry),
        Text(),
        *_time_line(entry, min(width, 100) - 4),
    ]


def _how(entry: PastRecovery) -> list[str]:
    sentences = []
    if entry.in_process or entry.restarted:
        why = f" ({entry.restarted_message})" if entry.restarted_message else ""
        sentences.append(f"{entry.in_process} processes stayed, {entry.restarted} were started anew{why}")
    if entry.rebuilt:
        sentences.append(f"{plural(entry.rebuilt, 'rank')} of those from peers had to be rebuilt from parity")
    if entry.deltas:
        sentences.append(f"up to {plural(entry.deltas, 'delta')} were replayed on the newest snapshot")
    if not any(entry.tiers.values()):
        sentences.append("nothing was left to come back to: training began from scratch")
    elif not entry.tiers.get("remote"):
        sentences.append("the remote tier was not needed")
    return sentences


def _where_from(entry: PastRecovery) -> Table:
    total = sum(entry.tiers.values()) or 1
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for tier in Tier:
        count = entry.tiers.get(tier) or 0
        if count:
            bar = "█" * max(1, round(count / total * _BAR))
            table.add_row(f"  {plural(count, 'rank')}", Text(bar, style=TIER_COLOURS[tier]), _WHENCE[tier])
    return table


def _time_line(entry: PastRecovery, columns: int) -> list[Text]:
    """Returns the phases to scale, with their names and durations below."""
    labels = Text("  ")
    for part, words, colour in PHASES:
        labels.append(f"{words} {short(getattr(entry, part))}   ", style=colour)
    return [Text("  ").append(recovery_bar(entry, entry.total or 1.0, columns)), labels]


def _history(history: Sequence[Mapping[str, Any]], status: Mapping[str, Any], width: int) -> Group:
    """Shows which attempt owns which steps, on the axis of steps."""
    newest = int((status.get("progress") or {}).get("step") or 0)
    starts = [int(branch["baseStep"]) for branch in history]
    ends = [*starts[1:], max(newest, starts[-1])]
    columns = min(width, 100) - 4
    bar, drawn = Text("  "), 0
    shades = ("#0072B2", "#56B4E9")
    for index, end in enumerate(ends):
        at = round(end / (ends[-1] or 1) * columns)
        wide = max(0, at - drawn)
        label = str(history[index]["attempt"])
        text = f"{label:^{wide}}" if wide >= len(label) + 2 else " " * wide
        bar.append(text, style=f"#ffffff on {shades[index % 2]}")
        drawn = max(drawn, at)
    last = list(zip(history, starts, ends, strict=True))[-4:]
    spans = "  ".join(f"attempt {branch['attempt']}: {start:,} → {end:,}" for branch, start, end in last)
    earlier = f"{len(history) - len(last)} earlier  " if len(history) > len(last) else ""
    return Group(
        Text("steps, and the attempts whose work they are", style="dim"),
        bar,
        Text(f"  {earlier}{spans}", style="dim"),
    )


def what_if_screen(answers: Sequence[WhatIf], layout: JobLayout) -> Group:
    """Shows one answer in full, several as a table."""
    if len(answers) == 1:
        return _full(answers[0], layout)
    table = columns(
        "IF LOST NOW",
        "HIT",
        right("BACK TO"),
        right("LOST"),
        "FARTHEST TIER",
        right("STAY"),
        right("WITHOUT TRAINING"),
    )
    for entry in answers:
        time, farthest = entry.without_training, entry.resume_point.farthest
        none = Text("none", style="bold red")
        table.add_row(
            Text(entry.loss.name),
            Text(plural(len(entry.loss.workers), "worker")),
            _back(entry),
            Text(f"{entry.lost_steps:,}" if farthest else "all"),
            Text(farthest.value, style=TIER_COLOURS[farthest]) if farthest else none,
            Text(f"{entry.processes.stay:,}"),
            Text(("" if time.measured else "about ") + short(time.seconds)),
        )
    parts: list[RenderableType] = [Text.assemble((layout.name, "bold"), _moment(answers[0])), Text(), table]
    guessed = next(
        (entry.without_training.source for entry in answers if not entry.without_training.measured), ""
    )
    anew = next((f"all start anew: {entry.processes.why}" for entry in answers if entry.processes.why), "")
    condition = LOOP if answers[0].state.planned and not anew else anew
    if condition:
        parts.append(Text(f"stay: {condition}", style="dim"))
    if guessed:
        parts.append(Text(f"about: {guessed}", style="dim"))
    return Group(*parts)


def _full(entry: WhatIf, layout: JobLayout) -> Group:
    planned, farthest = entry.state.planned, entry.resume_point.farthest
    lost = plural(entry.lost_steps, "step")
    grid = facts()
    again = f" ({short(entry.lost_seconds)} of training)" if entry.lost_seconds else ""
    if farthest is None:
        beginning = "the beginning: nothing that is left holds every rank's state"
        grid.add_row("  back to", Text(beginning, style="bold red"))
        hint = "a remote tier (spec.tiers.remote), more copies, or copies farther apart would change that"
        grid.add_row("", Text(hint))
        grid.add_row("  lost", Text("all that was trained" if planned else f"{lost}{again}"))
    else:
        step = "" if planned else f"step {entry.resume_point.step:,}, "
        grid.add_row("  back to", Text.assemble((step, "bold"), f"{lost} lost{again}"))
        for tier, count in entry.ranks.items():
            line = Text.assemble((plural(count, "rank"), TIER_COLOURS[tier]), f" {_WHENCE[tier]}")
            if tier is Tier.PEER:
                line.append(_peers(entry, layout), style="dim")
            grid.add_row("  from" if tier is next(iter(entry.ranks)) else "", line)
        needed = farthest is Tier.REMOTE
        grid.add_row(
            "  remote tier",
            Text("needed", style="bold yellow") if needed else Text("not needed", style="green"),
        )
    unless = f" ({LOOP})" if planned and entry.processes.stay else ""
    grid.add_row("  processes", Text.assemble(str(entry.processes), (unless, "dim")))
    time = entry.without_training
    grid.add_row(
        "  time",
        Text.assemble(f"about {short(time.seconds)} without training", (f"  ({time.source})", "dim")),
    )
    head = Text.assemble(
        (layout.name, "bold"), f"{_moment(entry)}, if ", (entry.loss.name, "bold yellow"),
        f" {'crashed' if not entry.loss.workers else 'died'} now", (f"  ({hit(entry.loss, layout)})", "dim"),
    )  # fmt: skip
    return Group(head, Text(), grid)


def _peers(entry: WhatIf, layout: JobLayout) -> str:
    shown = list(entry.peers.items())[:_PEERS_NAMED]
    coded = bool(layout.placement.groups)
    named = ", ".join(
        f"worker {worker} rebuilt from {len(givers)} workers"
        if coded
        else f"worker {worker} from {' or '.join(map(str, givers))}"
        for worker, givers in shown
        if givers
    )
    more = len(entry.peers) - len(shown)
    return f": {named}{f' and {more} more' if more > 0 else ''}" if named else ""


def _moment(entry: WhatIf) -> str:
    return " in the midst of training" if entry.state.planned else f" at step {entry.state.newest:,}"


def _back(entry: WhatIf) -> Text:
    if entry.resume_point.farthest is None:
        return Text("scratch", style="bold red")
    return Text("-" if entry.state.planned else f"{entry.resume_point.step:,}")
