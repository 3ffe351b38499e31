"""`plan`: who keeps whose copies, of a job in the cluster or of one that is only a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, Nodes, layout_of, made_up_nodes, plan_layout, read_job, read_nodes
from tiercheck_cli.plan.picture import draw
from tiercheck_cli.plan.screen import screen
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

_FILES = "Without a cluster"
JobFile = Annotated[str | None, typer.Option("-f", "--file", help="The job as YAML.", rich_help_panel=_FILES)]
NodesFile = Annotated[
    str | None,
    typer.Option(
        "--nodes", "--cluster",
        help="kubectl get nodes -o json, or a cluster as in examples/clusters.", rich_help_panel=_FILES,
    ),
]  # fmt: skip
Shape = Annotated[
    str | None,
    typer.Option(
        "--made-up", help="Invent nodes: 25x40 racks x nodes, 2x25x40 with zones.", rich_help_panel=_FILES
    ),
]
PerNode = Annotated[
    int | None,
    typer.Option(
        "--workers-per-node", min=1, rich_help_panel=_FILES, help="Default: by accelerators, else one."
    ),
]


def plan(
    job: Annotated[str | None, typer.Argument(help="The job in the cluster.")] = None,
    *,
    file: JobFile = None,
    nodes: NodesFile = None,
    made_up: Shape = None,
    workers_per_node: PerNode = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it: FILE.svg.")] = None,
    output: OutputFormat = Output.TABLE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Who keeps whose copies, by failure domain, and what that survives."""
    if job is not None:
        check_named(job, file, nodes, made_up)
        cluster = Cluster.connect(kubeconfig, context, namespace)
        layout = layout_of(cluster, cluster.job(job))
    else:
        found, listed = job_and_nodes(file, nodes, made_up)
        layout = plan_layout(found, listed, workers_per_node)
    if picture is not None:
        draw(picture, layout)
        remark(f"drawn: {picture}")
    if output is not Output.TABLE:
        write(as_json(layout), output)
        return
    terminal = console()
    terminal.print(screen(layout, terminal.width))


def check_named(job: str, *of_a_file: object) -> None:
    """Raises CannotDo if options `of_a_file` stand beside the name of a job, or the name is a file's."""
    if any(of_a_file):
        raise CannotDo("give either a job of the cluster, or -f with --nodes; not both", USAGE)
    if Path(job).suffix in (".yaml", ".yml", ".json") and Path(job).is_file():
        raise CannotDo(f"{job} is a file, and no job of the cluster: -f {job} reads it", USAGE)


def job_and_nodes(file: str | None, nodes: str | None, made_up: str | None) -> tuple[dict[str, Any], Nodes]:
    """What a plan without a cluster is made of. Raises CannotDo."""
    if file is None:
        raise CannotDo(
            "give the name of a job in the cluster, or a job's file with -f and nodes with --nodes", USAGE
        )
    if (nodes is None) == (made_up is None):
        raise CannotDo(
            "say on which nodes: --nodes FILE (kubectl get nodes -o json), or --made-up 25x40", USAGE
        )
    if file == nodes == "-":
        raise CannotDo("only one of -f and --nodes can be standard input", USAGE)
    return read_job(file), read_nodes(nodes) if nodes is not None else made_up_nodes(made_up or "")


def as_json(layout: JobLayout) -> dict[str, Any]:
    """For programs; names are stable."""
    placement = layout.placement
    return {
        "job": layout.name,
        "attempt": layout.attempt,
        "spread": {"wanted": layout.spread, "achieved": placement.achieved_level},
        "tolerates": list(placement.tolerates),
        "unprotectedWorkers": list(placement.unprotected),
        "workers": [
            {
                "worker": site.worker,
                "node": site.node,
                "domains": {
                    level: layout.topology.domain(site.node, level) for level in layout.topology.level_names
                },
                "holders": list(placement.holders[site.worker]),
            }
            for site in layout.sites
        ],
        "groups": [
            {"members": list(group.members), "holders": list(group.holders)} for group in placement.groups
        ],
        "remarks": list(layout.remarks),
    }
