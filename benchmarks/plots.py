"""Draws the table as pictures, in Okabe and Ito's colours and marks that differ in shape too."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import LogLocator, MaxNLocator

from benchmarks.amounts import bytes_text, seconds_text
from benchmarks.figure import Figure, Sense

OURS, THEIRS, LIMIT, MISSED = "#0072B2", "#999999", "#000000", "#D55E00"
SECOND, THIRD = "#56B4E9", "#E69F00"
_STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 12,
    "svg.fonttype": "none",
    "svg.hashsalt": "tiercheck",
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
}
Data = dict[str, Any]


def draw(data: dict[str, Data], figures: list[Figure], folder: Path) -> dict[str, str]:
    """Every picture that there are numbers for, as SVG and PNG. Returns captions by file name."""
    plans: list[tuple[str, str, Callable[[], Sheet | None]]] = [
        (
            "overview",
            "Promised figures: better (right) or worse (left).",
            lambda: overview(figures),
        ),
        (
            "blocked",
            "Training blocked by one snapshot.",
            lambda: blocked(data.get("blocked", {})),
        ),
        (
            "every-step",
            "Steps with and without deltas.",
            lambda: every_step(data.get("every_step", {})),
        ),
        (
            "delta-sizes",
            "Deltas, in percent of a snapshot.",
            lambda: delta_sizes(data.get("delta_sizes", {})),
        ),
        ("restores", "How long a state takes to come back.", lambda: restores(data.get("restores", {}))),
        (
            "growth",
            "Time and memory, by state and workers.",
            lambda: growth(data.get("growth", {})),
        ),
        (
            "sharing",
            "Capture, by the data-parallel degree.",
            lambda: sharing(data.get("sharing", {})),
        ),
        (
            "resharding",
            "A restore on another mesh.",
            lambda: resharding(data.get("resharding", {})),
        ),
        (
            "reconcile",
            "What an event costs the operator.",
            lambda: reconcile(data.get("reconcile", {})),
        ),
        (
            "ettr",
            "Simulated ETTR.",
            lambda: ettr(data.get("ettr", {})),
        ),
        (
            "foretold",
            "Each failure, foretold and measured.",
            lambda: foretold(data.get("simulate_validation", {})),
        ),
    ]
    drawn = {}
    with mpl.rc_context(_STYLE):
        for name, caption, plan in plans:
            sheet = plan()
            if sheet is None:
                continue
            sheet.savefig(folder / f"{name}.svg", metadata={"Date": None})
            sheet.savefig(folder / f"{name}.png", dpi=150)
            plt.close(sheet)
            drawn[name] = caption
    return drawn


def overview(figures: list[Figure]) -> Sheet | None:
    """One mark per promise, on a scale on which 1 is just what was promised."""
    judged = [figure for figure in figures if figure.ratio is not None and figure.bound]
    if not judged:
        return None
    sheet, axes = plt.subplots(figsize=(10, 1.2 + 0.34 * len(judged)))
    for row, figure in enumerate(reversed(judged)):
        assert figure.ratio is not None
        assert figure.bound is not None
        better = (
            figure.bound / max(figure.ratio, 1e-9)
            if figure.sense is Sense.AT_MOST
            else figure.ratio / figure.bound
        )
        better = min(max(better, 1e-2), 1e3)
        colour = OURS if figure.reached else MISSED
        axes.plot([1, better], [row, row], color=colour, linewidth=2, alpha=0.5)
        axes.plot(better, row, marker="o" if figure.reached else "X", markersize=8, color=colour)
        axes.annotate(
            f"{figure.ratio_text} ({figure.bound_text})",
            (better, row),
            xytext=(10 if better >= 1 else -10, 0),
            textcoords="offset points",
            va="center",
            ha="left" if better >= 1 else "right",
            fontsize=9,
        )
    axes.axvline(1, color=LIMIT, linewidth=1)
    axes.set_yticks(range(len(judged)), [figure.name for figure in reversed(judged)], fontsize=9)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_times)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.25) / 12, max(high, 4) * 12)
    axes.set_title("Better than promised →", loc="left")
    axes.set_xlabel("times better than promised; dot: reached, cross: missed")
    axes.tick_params(axis="y", length=0)
    return sheet


def blocked(data: Data) -> Sheet | None:
    """Bars per system, one panel per size of state."""
    systems: dict[str, dict[str, list[Data]]] = data.get("systems", {})
    sizes = sorted({size for results in systems.values() for size in results}, key=int)
    if not sizes:
        return None
    names = [name for name in systems if not name.endswith("than the copy")]
    sheet, panels = plt.subplots(
        1, len(sizes), figsize=(5.6 * len(sizes) + 1.5, 4), sharey=True, squeeze=False
    )
    for axes, size in zip(panels[0], sizes, strict=True):
        copies = [result["copy_seconds"] for results in systems.values() for result in results.get(size, [])]
        copy = statistics.median(copies)
        for row, name in enumerate(reversed(names)):
            cycles = [
                cycle["blocked"] for result in systems[name].get(size, []) for cycle in result["cycles"]
            ]
            if not cycles:
                continue
            middle = statistics.median(cycles)
            axes.barh(row, middle, color=OURS if name.startswith("TierCheck") else THEIRS, height=0.6)
            axes.plot(cycles, [row] * len(cycles), "|", color=LIMIT, markersize=7, alpha=0.5)
            axes.annotate(
                seconds_text(middle),
                (max(cycles), row),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
            )
        axes.axvline(copy, color=MISSED, linestyle="--", linewidth=1.4)
        axes.annotate(
            f"plain copy {seconds_text(copy)}",
            (copy, len(names) - 0.5),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize=9,
            color=MISSED,
        )
        axes.set_yticks(range(len(names)), list(reversed(names)))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_seconds)
        low, high = axes.get_xlim()
        axes.set_xlim(low / 3, high * 3)
        axes.set_ylim(-0.6, len(names) - 0.1)
        axes.set_title(f"State of {bytes_text(int(size))}")
        axes.set_xlabel("blocked per snapshot: median, marks are single saves")
    return sheet


def every_step(data: Data) -> Sheet | None:
    """Steps in their order, and what of them was blocked."""
    if not data.get("plain"):
        return None
    sheet, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(3, 2))
    left.plot(data["plain"], "o", color=THEIRS, markersize=5, label="without TierCheck")
    left.plot(data["kept"], "D", color=OURS, markersize=5, label="a delta at every step")
    for values, colour in ((data["plain"], THEIRS), (data["kept"], OURS)):
        left.axhline(statistics.median(values), color=colour, linewidth=1)
    left.set_ylim(0, 1.25 * max(*data["plain"], *data["kept"]))
    left.yaxis.set_major_formatter(_seconds)
    left.set_title("Length of a step (line: median)")
    left.set_xlabel("step")
    left.legend(loc="lower right", ncols=2)
    step = statistics.median(data["plain"])
    right.plot([100 * value / step for value in data["blocked"]], "D", color=OURS, markersize=5)
    right.axhline(2, color=MISSED, linestyle="--", linewidth=1.4, label="promised at most, on average")
    right.legend(loc="upper right", fontsize=9)
    right.set_ylim(bottom=0, top=max(2.6, 1.25 * right.get_ylim()[1]))
    right.set_title("Blocked, % of a step")
    right.set_xlabel("step")
    return sheet


def delta_sizes(data: Data) -> Sheet | None:
    """Bars per kind of training."""
    sizes: dict[str, Data] = data.get("sizes", {})
    if not sizes:
        return None
    bounds = {"bf16": 100 / 6, "LoRA": 1.0}
    sheet, axes = plt.subplots(figsize=(9, 1.2 + 0.5 * len(sizes)))
    for row, (name, size) in enumerate(reversed(sizes.items())):
        share = 100 * size["delta"] / size["snapshot"]
        axes.barh(row, share, color=OURS, height=0.55)
        bound = next((bound for word, bound in bounds.items() if word in name), 0.0)
        if bound:
            axes.plot([bound, bound], [row - 0.4, row + 0.4], color=MISSED, linewidth=2)
        axes.annotate(
            f"{share:.3g} %", (max(share, bound), row), xytext=(6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(sizes)), [name.partition(", ")[2] for name in reversed(sizes)])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlim(right=100)
    axes.set_title("Delta, in percent of a snapshot (log; line: promised at most)")
    return sheet


def restores(data: Data) -> Sheet | None:
    """Stacked bars: what each part of a restore takes."""
    if not data.get("local"):
        return None
    sheet, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    local, peer = data["local"], data["peer"]
    _stack(
        left,
        1,
        [
            ("verified by the sidecar", local["verify"], OURS),
            ("loaded by the trainer", local["load"], SECOND),
        ],
    )
    _stack(left, 0, [("plain copy", local["copy"], THEIRS)])
    left.set_yticks([0, 1], ["plain copy", "TierCheck"])
    left.set_title("From the pod's own memory")
    _stack(
        right,
        1,
        [("fetched and verified", peer["fetch"], OURS), ("loaded by the trainer", peer["load"], SECOND)],
    )
    if data["torchft"]:
        best = min(
            data["torchft"][0], key=lambda key: statistics.median(each[key] for each in data["torchft"])
        )
        _stack(right, 0, [("torchft", [each[best] for each in data["torchft"]], THEIRS)])
    right.set_yticks([0, 1], ["torchft HTTP", "TierCheck"])
    right.set_title("From a peer")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(_seconds)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(right=axes.get_xlim()[1] * 1.25)
        axes.set_ylim(-0.6, 2.1)
        axes.legend(loc="upper left", ncols=2, fontsize=9)
    sheet.suptitle(f"A state of {bytes_text(data['state_bytes'])}", x=0.01, ha="left", fontsize=10.5)
    return sheet


def growth(data: Data) -> Sheet | None:
    """Three panels in log-log scales, each beside its line."""
    states, workers = data.get("states", []), data.get("workers", [])
    if not states:
        return None
    sheet, (one, two, three) = plt.subplots(1, 3, figsize=(13, 4))
    xs = [point["bytes"] for point in states]
    _line(one, (xs, [point["blocked"] for point in states]), "blocked, step shorter than the copy", OURS, "o")
    _line(one, (xs, [point["copy"] for point in states]), "plain copy", THEIRS, "s")
    one.xaxis.set_major_formatter(_bytes)
    one.yaxis.set_major_formatter(_seconds)
    one.set_title("Blocked, by state")
    _line(two, (xs, [point["budget"] for point in states]), "computed budget", MISSED, "^")
    _line(two, (xs, [point["used"] for point in states]), "memory used", OURS, "o")
    two.xaxis.set_major_formatter(_bytes)
    two.yaxis.set_major_formatter(_bytes)
    two.set_title("Memory volume, by state")
    counts = [point["workers"] for point in workers]
    _line(three, (counts, [point["seconds"] for point in workers]), "all copied to peers", OURS, "o")
    if workers:
        ideal = [workers[0]["seconds"] * count / counts[0] for count in counts]
        _line(three, (counts, ideal), "linear", THEIRS, "")
    three.yaxis.set_major_formatter(_seconds)
    three.set_title("Copies to peers, by workers")
    for axes, values in ((one, xs), (two, xs), (three, counts)):
        axes.minorticks_off()
        axes.set_xticks(values)
        axes.yaxis.set_major_locator(LogLocator(base=2) if axes is two else LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.tick_params(axis="x", rotation=35)
        axes.legend(loc="upper left", fontsize=9)
        axes.margins(y=0.25)
    three.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return sheet


def sharing(data: Data) -> Sheet | None:
    """Seconds and bytes of a rank's share, beside what an R-th of the whole would be."""
    degrees: dict[str, Data] = data.get("degrees", {})
    if not degrees:
        return None
    sheet, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8))
    counts = [int(degree) for degree in degrees]
    captures = [statistics.median(each["capture"]) for each in degrees.values()]
    _line(left, (counts, captures), "capture", OURS, "o")
    _line(
        left,
        (counts, [statistics.median(each["copy"]) for each in degrees.values()]),
        "plain copy of it",
        THEIRS,
        "s",
    )
    _line(left, (counts, [captures[0] / count for count in counts]), "ideal: 1/R", LIMIT, "")
    left.yaxis.set_major_formatter(_seconds)
    left.set_title("Capture per rank")
    sizes = [each["bytes"] for each in degrees.values()]
    _line(right, (counts, sizes), "captured", OURS, "o")
    _line(right, (counts, [sizes[0] / count for count in counts]), "ideal: 1/R", LIMIT, "")
    right.yaxis.set_major_formatter(_bytes)
    right.set_title("Bytes per rank")
    for axes in (left, right):
        axes.minorticks_off()
        axes.set_xticks(counts)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_locator(LogLocator(base=2))
        axes.set_xlabel("data-parallel degree R")
        axes.legend(loc="upper right", fontsize=9)
    return sheet


def resharding(data: Data) -> Sheet | None:
    """Bars per change of mesh: bytes by ranges and by whole shards; seconds of both, and in place beside
    DCP.
    """
    changes: dict[str, Data] = data.get("changes", {})
    if not changes:
        return None
    sheet, panels = plt.subplots(1, 3, figsize=(13, 1.6 + 0.6 * len(changes)), sharey=True)
    plans: list[tuple[str, str, list[tuple[str, str]], Callable[[float], str]]] = [
        ("Bytes read", "read", [("ranged", "ranges"), ("whole", "whole shards")], bytes_text),
        ("Brought and loaded", "seconds", [("ranged", "ranges"), ("whole", "whole shards")], seconds_text),
        ("Loaded in place", "seconds", [("in place", "TierCheck"), ("dcp", "torch DCP")], seconds_text),
    ]
    for axes, (title, what, ways, text) in zip(panels, plans, strict=True):
        for number, (way, label) in enumerate(ways):
            for row, each in enumerate(reversed(changes.values())):
                found = each[what][way]
                value = statistics.median(found) if isinstance(found, list) else found
                place = row + (0.2 if number == 0 else -0.2)
                colour = OURS if number == 0 else THEIRS
                axes.barh(place, value, color=colour, height=0.36, label=label if row == 0 else "_")
                axes.annotate(
                    text(value),
                    (value, place),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )
        axes.set_yticks(range(len(changes)), list(reversed(changes)))
        axes.xaxis.set_major_formatter(_bytes if what == "read" else _seconds)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.set_xlim(right=axes.get_xlim()[1] * 1.35)
        axes.set_ylim(-0.6, len(changes) + 0.3)
        axes.set_title(title)
        axes.legend(loc="upper right", fontsize=9, ncols=2)
    return sheet


def reconcile(data: Data) -> Sheet | None:
    """Processor time and calls by workers, processor time by jobs."""
    workers, jobs = data.get("workers", {}), data.get("jobs", {})
    if not workers or not jobs:
        return None
    sheet, (one, two, three) = plt.subplots(1, 3, figsize=(13, 4))
    counts, many = [int(count) for count in workers], [int(count) for count in jobs]
    _line(one, (counts, [point["heartbeat, CPU ms"] for point in workers.values()]), "heartbeat", OURS, "o")
    _line(one, (counts, [point["pod event, CPU ms"] for point in workers.values()]), "pod event", SECOND, "s")
    one.set_title("Processor time, ms, by workers")
    two.semilogx(counts, [point["recovery, API calls"] for point in workers.values()], marker="o", color=OURS)
    two.set_ylim(bottom=0)
    two.set_title("API calls of a recovery, by workers")
    three.semilogx(many, [point["event, CPU ms"] for point in jobs.values()], marker="o", color=OURS)
    three.set_ylim(bottom=0)
    three.set_title("Processor time of an event, ms, by jobs")
    for axes, values in ((one, counts), (two, counts), (three, many)):
        axes.minorticks_off()
        axes.set_xticks(values)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    one.legend(loc="upper left", fontsize=9)
    return sheet


def ettr(data: Data) -> Sheet | None:
    """By nodes and whose failures, peers as stars."""
    curves, nodes = data.get("curves"), data.get("nodes")
    if not curves or not nodes:
        return None
    sheet, sizes = plt.subplots(figsize=(8, 5.2))
    for (name, each), colour in zip(curves.items(), (OURS, SECOND, THIRD, MISSED), strict=True):
        sizes.semilogx(nodes, each["at this size"], marker="o", color=colour, label=f"failures as {name}")
        sizes.semilogx(nodes, each["measured"], linestyle="--", color=colour, linewidth=1)
        sizes.semilogx(nodes, each["store"], linestyle=":", color=colour, linewidth=1)
    for peer in data.get("peers", ()):
        left = peer["nodes"] > 500
        sizes.plot(peer["nodes"], peer["theirs"], "*", color=LIMIT, markersize=11)
        sizes.annotate(
            f"{peer['name']} {peer['theirs']:.2f} (ours {peer['ours']:.3f})", (peer["nodes"], peer["theirs"]),
            xytext=(-8 if left else -40, -9), textcoords="offset points", va="top", fontsize=8.5,
            ha="right" if left else "left",
        )  # fmt: skip
    sizes.minorticks_off()
    sizes.set_xticks(nodes, [f"{count:,}" for count in nodes])
    sizes.set_ylim(0.3, 1.01)
    sizes.set_xlabel(
        "nodes of 8 GPUs. Dashed: collectives start at once, small states.\n"
        "Dotted: everything from a store, every half hour (Daly)"
    )
    sizes.set_title("ETTR, simulated with recoveries measured on real kubelets")
    sizes.legend(loc="lower left", fontsize=9)
    return sheet


def foretold(data: Data) -> Sheet | None:
    """Each held-out failure as a dot, against what the parts of the others foretell."""
    points = data.get("points")
    if not points:
        return None
    sheet, axes = plt.subplots(figsize=(6.5, 6))
    marks = "osD^vPX"
    for mark, fault in zip(marks, dict.fromkeys(each["fault"] for each in points), strict=False):
        alike = [each for each in points if each["fault"] == fault]
        axes.plot(
            [each["measured"] for each in alike], [each["foretold"] for each in alike], mark, label=fault,
            alpha=0.75, markersize=7,
        )  # fmt: skip
    most = 1.05 * max(max(each["measured"], each["foretold"]) for each in points)
    axes.plot([0, most], [0, most], color=LIMIT, linewidth=1)
    axes.fill_between([0, most], [0, 0.8 * most], [0, 1.2 * most], color=THEIRS, alpha=0.25, linewidth=0)
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
    axes.set_xlabel("seconds without new steps, measured")
    axes.set_ylabel("foretold")
    axes.set_title("Failures that gave no part; grey: within 20 %")
    axes.legend(loc="upper left", fontsize=9)
    return sheet


def _line(axes: Axes, points: tuple[list[float], list[float]], label: str, colour: str, mark: str) -> None:
    axes.loglog(
        *points, marker=mark, color=colour, label=label, linestyle="-" if mark else ":", linewidth=1.6
    )


def _stack(axes: Axes, row: int, parts: list[tuple[str, list[float], str]]) -> None:
    begin = 0.0
    for label, values, colour in parts:
        middle = statistics.median(values)
        axes.barh(row, middle, left=begin, color=colour, height=0.5, label=label if len(parts) > 1 else "_")
        begin += middle
    axes.annotate(seconds_text(begin), (begin, row), xytext=(6, 0), textcoords="offset points", va="center")


def _seconds(value: float, _: object = None) -> str:
    return seconds_text(value) if value else "0"


def _times(value: float, _: object = None) -> str:
    return f"{value:g}x"


def _bytes(value: float, _: object = None) -> str:
    return bytes_text(value)
