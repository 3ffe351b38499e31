"""Implements `plan`: prints or draws which workers hold which copies, for a job in a cluster or file.

Pictures are the same for the same content.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, Nodes, layout_of, made_up_nodes, plan_layout, read_job, read_nodes
from tiercheck_cli.plan.screen import Links, colour, links, screen
from tiercheck_cli.terminal import (
    Context,
    Kubeconfig,
    Namespace,
    Output,
    OutputFormat,
    remark,
    show,
)
from tiercheck_operator.model.conditions import plural

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
    """Show which workers hold which copies, by failure domain, and what that survives."""
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
    show(output, lambda: as_json(layout), lambda width: screen(layout, width))


def check_named(job: str, *of_a_file: object) -> None:
    """Raises CannotDo if options `of_a_file` are given beside the name of a job, or the name is a file's."""
    if any(of_a_file):
        raise CannotDo("give either a job of the cluster, or -f with --nodes; not both", USAGE)
    if Path(job).suffix in (".yaml", ".yml", ".json") and Path(job).is_file():
        raise CannotDo(f"{job} is a file, and no job of the cluster: -f {job} reads it", USAGE)


def job_and_nodes(file: str | None, nodes: str | None, made_up: str | None) -> tuple[dict[str, Any], Nodes]:
    """Reads the job and the nodes for a plan without a cluster. Raises CannotDo."""
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
    """Returns the plan for programs; names are stable."""
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


_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tiercheck",
    "text.parse_math": False,  # a name with dollars in it is a name
    "font.size": 10.0,
}


@contextmanager
def new_figure(width: float, height: float, layout: Any = "constrained") -> Iterator[Any]:
    """Yields a sheet of that many inches, to be drawn on and written within the `with`."""
    # Imported here: it takes half a second, and most commands draw nothing.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout=layout)


def svg_of(figure: Any, description: str) -> str:
    """Returns the <svg> element alone, for a page; `description` is its label for screen readers."""
    sink = StringIO()
    figure.savefig(
        sink, format="svg", facecolor="white", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    content = sink.getvalue()
    return f'<svg role="img" aria-label="{escape(description)}"{content[content.index("<svg") + 4 :]}'


def remove_frame(axes: Any, grid: str) -> None:
    """Leaves the lower and left edge, and pale lines across `grid` ("x" or "y")."""
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


_SIZE, _CENTRE, _RADIUS = 860.0, 430.0, 290.0
_MIDDLE = (_CENTRE, _CENTRE + 15)
_GAP = 0.035
"""Radians. The largest gap between two domains."""
_DOTS = 400
"""The largest number of workers for which each is drawn."""
_NUMBERS = 64
"""The largest number of workers for which each has its number beside it."""
_LABELS = 64
_RED, _GREEN, _INK, _SOFT = "#c24e00", "#0a7a52", "#1c1f23", "#5d646d"


def draw(path: Path, layout: JobLayout) -> None:
    """Writes the plan as SVG. Raises CannotDo."""
    if path.suffix != ".svg":
        raise CannotDo(f"{path} must end with .svg", USAGE)
    try:
        path.write_text(svg(layout))
    except OSError as error:
        raise CannotDo(f"{path} cannot be written: {error.strerror}") from error


def svg(layout: JobLayout) -> str:
    """Returns the picture, which is the same for the same placement."""
    drawn = links(layout)
    spots = _spots(drawn)
    placement = layout.placement
    survives = "; ".join(placement.tolerates)
    head = (
        f"{layout.name}: {plural(len(layout.sites), 'worker')} in {plural(len(drawn.domains), drawn.level)}"
    )
    foot = f"survives the loss of {survives}" if survives else "survives no loss of a pod"
    what = "block of its group" if drawn.group else "copy"
    with new_figure(_SIZE / 100, _SIZE / 100, layout=None) as figure:
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _SIZE), ylim=(_SIZE, 0))
        axes.set_axis_off()
        _write(axes, 24, 38, head, 20, weight="bold")
        _write(axes, 24, 62, foot, 14, fill=_GREEN if survives else _RED)
        if placement.unprotected and (any(placement.holders) or placement.groups):
            unprotected = f"{plural(len(placement.unprotected), 'worker')} unprotected (ringed)"
            _write(axes, 24, 84, unprotected, 14, fill=_RED)
        legend = f"a curve leads from a worker to each keeper of its {what}; colours are its {drawn.level}"
        _write(axes, 24, _SIZE - 20, legend, 12, fill=_SOFT)
        if len(spots) <= _DOTS:
            _add_chords(axes, drawn, spots)
        else:
            _add_bundles(axes, drawn, spots)
        _add_rim(axes, drawn, spots)
        content = svg_of(figure, f"{head}; {foot}")
    # A browser shows the title of the dot under the pointer.
    return re.sub(r'<g id="worker (\d+)">', r"\g<0><title>worker \1</title>", content)


def _spots(drawn: Links) -> dict[int, float]:
    gap = min(_GAP, math.pi / max(1, len(drawn.domains)))
    workers = sum(len(domain.workers) for domain in drawn.domains)
    unit = (2 * math.pi - gap * len(drawn.domains)) / workers
    angle, found = -math.pi / 2, {}
    for domain in drawn.domains:
        for worker in domain.workers:
            found[worker] = angle + unit / 2
            angle += unit
        angle += gap
    return found


def _add_chords(axes: Any, drawn: Links, spots: dict[int, float]) -> None:
    where = drawn.domain_of
    width, opacity = (1.6, 0.75) if len(spots) <= _NUMBERS else (1.0, 0.4)
    for owner, kept in drawn.keepers.items():
        for keeper in kept:
            _add_curve(axes, spots[owner], spots[keeper], colour(where[owner]), width=width, opacity=opacity)


def _add_bundles(axes: Any, drawn: Links, spots: dict[int, float]) -> None:
    counts = drawn.between()
    most = max(counts.values(), default=1)
    middle = [_mean([spots[worker] for worker in domain.workers]) for domain in drawn.domains]
    for (owner, keeper), count in sorted(counts.items()):
        stroke = colour(owner) if owner != keeper else _RED
        _add_curve(axes, middle[owner], middle[keeper], stroke, width=0.6 + 5 * count / most, opacity=0.55)


def _add_rim(axes: Any, drawn: Links, spots: dict[int, float]) -> None:
    from matplotlib.patches import Arc, Circle

    every = -(-len(drawn.domains) // _LABELS)
    unique = len({domain.name for domain in drawn.domains}) == len(drawn.domains)
    size = 6.0 if len(spots) <= _NUMBERS else 2.5
    for index, domain in enumerate(drawn.domains):
        angles = [spots[worker] for worker in domain.workers]
        wide, shade = 2 * (_RADIUS + 16), colour(index)
        begin, end = math.degrees(angles[0] - 0.006), math.degrees(angles[-1] + 0.006)
        arc = Arc(_MIDDLE, wide, wide, theta1=begin, theta2=end, color=shade, linewidth=_points(7))
        axes.add_patch(arc)
        if index % every == 0:
            name = domain.name if unique or not domain.parent else f"{domain.parent}/{domain.name}"
            _add_label(axes, _mean(angles), _RADIUS + 30, name)
        for worker in domain.workers if len(spots) <= _DOTS else ():
            ring = {"edgecolor": _RED, "linewidth": _points(3) if worker in drawn.unprotected else 0}
            spot, name = _at(spots[worker], _RADIUS), f"worker {worker}"
            axes.add_patch(Circle(spot, size, facecolor=shade, zorder=3, gid=name, **ring))
            if len(spots) <= _NUMBERS:
                x, y = _at(spots[worker], _RADIUS - 17)
                _write(axes, x, y + 4, str(worker), 11, anchor="center")


def _add_curve(axes: Any, start: float, end: float, stroke: str, *, width: float, opacity: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    curve = Curve(
        [_at(start, _RADIUS - 8), (_CENTRE, _CENTRE), _at(end, _RADIUS - 8)],
        [Curve.MOVETO, Curve.CURVE3, Curve.CURVE3],
    )
    axes.add_patch(PathPatch(curve, fill=False, edgecolor=stroke, linewidth=_points(width), alpha=opacity))


def _add_label(axes: Any, angle: float, radius: float, content: str) -> None:
    x, y = _at(angle, radius)
    anchor = "center" if abs(math.cos(angle)) < 0.2 else "left" if math.cos(angle) > 0 else "right"
    _write(axes, x, y + 4 + 6 * math.sin(angle), content, 12, anchor=anchor)


def _write(
    axes: Any, x: float, y: float, content: str, size: float, *, anchor: str = "left", fill: str = _INK,
    weight: str = "normal",
) -> None:  # fmt: skip
    axes.text(x, y, content, fontsize=_points(size), ha=anchor, va="baseline", color=fill, fontweight=weight)


def _points(pixels: float) -> float:
    """Converts hundredths of an inch, the layout's unit, to points, Matplotlib's unit of lines and text."""
    return pixels * 0.72


def _at(angle: float, radius: float) -> tuple[float, float]:
    return _MIDDLE[0] + radius * math.cos(angle), _MIDDLE[1] + radius * math.sin(angle)


def _mean(angles: Sequence[float]) -> float:
    return (angles[0] + angles[-1]) / 2
