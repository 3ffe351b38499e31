"""Draws the four journeys of docs/understand/how-it-works.md.

python docs/images/journeys.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

BLUE, ORANGE, GREEN, RED, GREY, INK = "#0072B2", "#D98200", "#008060", "#C8452B", "#8A8F98", "#1C2430"
"""Trainer, sidecar, storage, failure, waiting: near Okabe and Ito's, for the colour-blind."""
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 13,
    "svg.fonttype": "path",  # the same letters wherever it is shown
    "svg.hashsalt": "tiercheck",
}
_WIDTH = 100.0


def main(folder: Path) -> None:
    """Writes all drawings as SVG."""
    for name, drawing in (("save", save), ("copies", copies), ("recover", recover), ("restore", restore)):
        with mpl.rc_context(_STYLE):
            sheet = drawing()
            sheet.savefig(folder / f"journey-{name}.svg", metadata={"Date": None})
            plt.close(sheet)


def save() -> Figure:
    """Training goes on while the copy is made."""
    sheet, axes = _sheet("Save: the copy is made behind the next step", 42)
    for y, name in ((29, "training\nthread"), (17, "saver\nthread"), (5, "sidecar")):
        _lane(axes, y, 8, name)
    for x, width, text, colour in (
        (15, 9, "update", BLUE),
        (25, 8, "step(n)", INK),
        (34, 27, "forward and backward n + 1", BLUE),
        (66, 10, "update", BLUE),
        (77, 11, "step(n+1)", INK),
    ):
        _box(axes, (x, 30, width, 6), text, colour)
    _box(axes, (61.6, 30, 3.8, 6), "wait", GREY, size=9)
    _box(axes, (34, 18, 29, 6), "copy parameters and optimizer", BLUE)
    _box(axes, (66, 18, 22, 6), "compare, state word", BLUE)
    _box(axes, (66, 6, 13, 6), "digests", ORANGE)
    _box(axes, (83, 6, 13, 6), "seal", ORANGE)
    _arrow(axes, (29, 30), (34, 22), "at once: buffers, data position", (47.5, 27))
    _arrow(axes, (63.5, 24), (63.5, 30))
    _arrow(axes, (72.5, 18), (72.5, 12))
    _arrow(axes, (79, 9), (83, 9))
    for x, width, text in ((34, 32, "slot begins with 0: torn"), (66, 15, "complete"), (83, 13, "trusted")):
        axes.text(
            x + width / 2 - 1, 2.4, text, ha="center", va="center", fontsize=11.5, color=INK, style="italic"
        )
    return sheet


def copies() -> Figure:
    """One snapshot at a time goes to holders, one to the store; deltas go at once."""
    sheet, axes = _sheet("Replicate and offload: what is named travels, what is verified counts", 62)
    _box(axes, (2, 38, 24, 13), "sidecar of worker 2\nsealed slots", ORANGE)
    _box(axes, (40, 38, 22, 13), "coordinator\n(sidecar 0)", INK)
    _box(axes, (74, 38, 24, 13), "store\nS3 or a folder", GREEN)
    _box(axes, (2, 19, 24, 11), "holder, other rack\na copy", ORANGE)
    _box(axes, (40, 19, 22, 11), "parity holder\none block for all", ORANGE)
    _arrow(axes, (26, 48), (40, 48), "1 what I have", (33, 50.6))
    _arrow(axes, (40, 42), (26, 42), "2 verdict", (33, 39.6))
    _arrow(axes, (10, 38), (10, 30), "3 chunks,\ntags", (5.2, 34))
    _arrow(axes, (18, 30), (18, 38), "4 verified", (24, 34))
    _arrow(axes, (26, 39.5), (40, 27), "3", (32, 31.6))
    _route(axes, [(14, 51), (14, 54), (86, 54), (86, 51)], "5 parts of 16 MiB", (50, 55.9))
    _route(axes, [(62, 44.5), (74, 44.5)], "6 manifest\nlast", (68, 48.6))
    _ruler(axes, 6.5)
    return sheet


def _ruler(axes: Axes, y: float) -> None:
    """Watermarks on a line of steps."""
    axes.plot([8, 96], [y, y], color=INK, linewidth=1.6)
    for number in range(12):
        x = 8 + 8 * number
        axes.plot([x, x], [y - 0.8, y + 0.8], color=INK, linewidth=1.2)
        axes.text(x, y - 2.8, str(89 + number), ha="center", va="center", fontsize=11, color=INK)
    for x, text, colour in (
        (16, "remote", GREEN),
        (56, "snapshot", INK),
        (80, "peer", ORANGE),
        (96, "local", BLUE),
    ):
        axes.plot(x, y + 2.2, marker="v", color=colour, markersize=10)
        axes.text(x, y + 5.4, text, ha="center", va="center", color=colour, weight="bold")
    axes.text(2, y + 0.2, "step", ha="left", va="center", fontsize=11, color=INK)


def recover() -> Figure:
    """A node dies; all go back to one version, and survivors keep their pods."""
    sheet, axes = _sheet("Recover: one write to the status stands between failure and restart", 55)
    for y, name in ((39, "operator"), (27, "survivors"), (15, "lost\nworker"), (3, "new pod")):
        _lane(axes, y, 8, name)
    for x, width, text in (
        (29, 12, "notice"),
        (43, 13, "new pod"),
        (58, 13, "attempt 8"),
        (84.5, 13.5, "release"),
    ):
        _box(axes, (x, 40, width, 6), text, INK)
    _box(axes, (15, 28, 12, 6), "train", BLUE)
    _box(axes, (28, 28, 28.5, 6), "steps stand still", GREY)
    _box(axes, (58, 28, 16, 6), "own memory", ORANGE)
    _box(axes, (75, 28, 8, 6), "wait", GREY, size=11)
    _box(axes, (84.5, 28, 13.5, 6), "train", BLUE)
    _box(axes, (15, 16, 12, 6), "train", BLUE)
    axes.text(29.5, 19, "✕", ha="center", va="center", fontsize=22, color=RED, weight="bold")
    axes.text(33, 19, "node dies", ha="left", va="center", color=RED)
    axes.text(59, 19, "lives after all? fenced", ha="left", va="center", color=RED)
    _box(axes, (44, 4, 12.5, 6), "start", GREY)
    _box(axes, (58, 4, 25, 6), "a holder's copy", ORANGE)
    _box(axes, (84.5, 4, 13.5, 6), "train", BLUE)
    _arrow(axes, (49.5, 40), (49.5, 10), behind=True)
    for x, y, colour, text, side in (
        (57.25, 49.3, RED, "status: attempt 7 is refused from here on", "center"),
        (83.75, 49.3, GREEN, "all are ready", "left"),
    ):
        axes.plot([x, x], [2, 48], color=colour, linewidth=1.6, linestyle=(0, (4, 3)), zorder=0)
        axes.text(x, y, text, ha=side, va="center", color=colour, fontsize=11.5)
    return sheet


def restore() -> Figure:
    """Nearest source first, every byte verified, no rank begins alone."""
    sheet, axes = _sheet("Restore: nearest source first, and nothing unverified is loaded", 50)
    _box(axes, (2, 33, 17, 9), "plan for\none version", INK)
    for place, (text, colour) in enumerate(
        (("1 own memory", ORANGE), ("2 holders' copies", ORANGE), ("3 parity", ORANGE), ("4 store", GREEN))
    ):
        _box(axes, (26, 36.5 - 8.5 * place, 21, 6.5), text, colour)
        _arrow(axes, (47, 39.75 - 8.5 * place), (54, 26), colour=GREY)
    _arrow(axes, (19, 38), (26, 39.5))
    _box(axes, (54, 20, 15, 12), "verify\neach chunk", INK)
    _route(
        axes,
        [(61.5, 20), (61.5, 4), (10.5, 4), (10.5, 33)],
        "bad: plan again without that source",
        (36, 6.2),
        RED,
    )
    for y, text, colour in (
        (35, "slots are full:\nready", ORANGE),
        (24.3, "all ranks ready:\nrelease", INK),
        (13.6, "load snapshot,\nreplay deltas", BLUE),
        (2.9, "compare, train", BLUE),
    ):
        _box(axes, (78, y, 20, 8), text, colour)
    _arrow(axes, (69, 29), (78, 37))
    for y in (35, 24.3, 13.6):
        _arrow(axes, (88, y), (88, y - 2.7))
    return sheet


def _sheet(title: str, height: float) -> tuple[Figure, Axes]:
    """Axes of 100 units' width; one unit is as high as it is wide."""
    sheet = plt.figure(figsize=(10.4, 10.4 * height / _WIDTH), facecolor="white")
    axes = sheet.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(0, height))
    axes.axis("off")
    axes.text(2, height - 2.6, title, ha="left", va="center", fontsize=15, weight="bold", color=INK)
    return sheet, axes


def _lane(axes: Axes, y: float, height: float, name: str) -> None:
    axes.add_patch(Rectangle((1, y), 98, height, facecolor="#F1F3F6", edgecolor="none", zorder=-1))
    axes.text(7.5, y + height / 2, name, ha="center", va="center", weight="bold", color=INK)


def _box(
    axes: Axes, place: tuple[float, float, float, float], text: str, colour: str, size: float = 13
) -> None:
    x, y, width, height = place
    shape = FancyBboxPatch(
        (x + 0.8, y + 0.8),
        width - 1.6,
        height - 1.6,
        boxstyle="round,pad=0.8,rounding_size=1",
        facecolor=colour,
        edgecolor="none",
    )
    axes.add_patch(shape)
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        color="white",
        fontsize=size,
        linespacing=1.3,
    )


def _arrow(
    axes: Axes,
    begin: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    at: tuple[float, float] = (0, 0),
    *,
    colour: str = INK,
    behind: bool = False,
) -> None:
    """From `begin` to `end`; `behind` what it crosses."""
    style = {"arrowstyle": "-|>", "mutation_scale": 16, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(begin, end, color=colour, zorder=0 if behind else 2, **style))
    if text:
        axes.text(*at, text, ha="center", va="center", fontsize=11.5, color=INK, linespacing=1.25)


def _route(
    axes: Axes, corners: list[tuple[float, float]], text: str, at: tuple[float, float], colour: str = INK
) -> None:
    """An arrow around corners."""
    xs, ys = zip(*corners[:-1], strict=True)
    axes.plot(xs, ys, color=colour, linewidth=1.6, solid_capstyle="butt")
    _arrow(axes, corners[-2], corners[-1], colour=colour)
    axes.text(*at, text, ha="center", va="center", fontsize=11.5, color=colour, linespacing=1.25)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
