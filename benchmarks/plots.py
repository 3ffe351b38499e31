"""Draws the table as pictures, in Okabe and Ito's colours and marks that differ in shape too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure as Sheet

from benchmarks.figure import Figure, Sense

OURS, LIMIT, MISSED = "#0072B2", "#000000", "#D55E00"
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
    """Draws every picture that there are numbers for, as SVG. Returns captions by file name."""
    drawn = {}
    with mpl.rc_context(_STYLE):
        for name, caption, sheet in (
            ("overview", "Promised figures: better (right) or worse (left).", overview(figures)),
            ("ettr", "Simulated ETTR.", ettr(data.get("ettr", {}))),
        ):
            if sheet is not None:
                sheet.savefig(folder / f"{name}.svg", metadata={"Date": None})
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
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.25) / 12, max(high, 4) * 12)
    axes.set_title("Better than promised →", loc="left")
    axes.set_xlabel("times better than promised; dot: reached, cross: missed")
    axes.tick_params(axis="y", length=0)
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
