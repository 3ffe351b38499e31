"""`explain`: why the last recovery took what it took, and what the next one would."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tiercheck.protocol import names
from tiercheck.protocol.directive import Tier
from tiercheck_cli.cluster import Cluster
from tiercheck_cli.events.recoveries import recoveries
from tiercheck_cli.explain.losses import losses
from tiercheck_cli.explain.screen import what_if_screen, why_screen
from tiercheck_cli.explain.what_if import WhatIf, answer, held_steps
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, layout_of, plan_layout
from tiercheck_cli.plan.command import JobFile, NodesFile, PerNode, Shape, job_and_nodes
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
    """Why the last restore took that version from there; with --if, what would happen if something died
    now."""
    found: dict[str, Any] | None = None
    pods: dict[str, int] = {}
    if job is not None:
        if file or nodes or made_up:
            raise CannotDo("give either a job of the cluster, or -f with --nodes; not both", USAGE)
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
    past = recoveries(found)
    if output is not Output.TABLE:
        status = found.get("status") or {}
        write(
            {
                "job": found["metadata"]["name"],
                "recovery": status.get("recovery"),
                "recoveries": list(past),
                "history": status.get("history") or [],
            },
            output,
        )
        return
    terminal = console()
    terminal.print(why_screen(found, past, time.time(), terminal.width))


def _what_if(
    asked: list[str], layout: JobLayout, job: dict[str, Any] | None, pods: dict[str, int], output: Output
) -> None:
    for sentence in layout.remarks:
        remark(sentence)
    state, past = held_steps(layout, job), recoveries(job) if job is not None else ()
    answers = [answer(loss, layout, state, past) for loss in losses(asked, layout, pods)]
    if output is not Output.TABLE:
        write({"job": layout.name, "answers": [_as_json(entry) for entry in answers]}, output)
        return
    console().print(what_if_screen(answers, layout))


def _as_json(entry: WhatIf) -> dict[str, Any]:
    farthest = entry.comeback.farthest
    return {
        "loss": entry.loss.name,
        "lostWorkers": sorted(entry.loss.workers),
        "step": entry.comeback.step,
        "lostSteps": entry.lost_steps,
        "lostSeconds": entry.lost_seconds,
        "ranks": {tier.value: count for tier, count in entry.ranks.items()},
        "remoteNeeded": farthest is Tier.REMOTE,
        "fromScratch": farthest is None,
        "seconds": round(entry.without_training.seconds, 3),
        "estimated": not entry.without_training.measured,
        "estimatedFrom": entry.without_training.source,
        "from": {str(worker): list(givers) for worker, givers in entry.from_whom.items()},
    }


def _workers_by_pod(cluster: Cluster, job: dict[str, Any]) -> dict[str, int]:
    found = {}
    for pod in cluster.pods(job):
        worker = (pod["metadata"].get("labels") or {}).get(names.LABEL_WORKER, "")
        if worker.isdigit():
            found[pod["metadata"]["name"]] = int(worker)
    return found
