"""Draws the three pictures of a run, for the page and as PNG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercheck_cli.figures import new_figure, remove_frame, save_figure, svg_of
from tiercheck_cli.report import style
from tiercheck_cli.report.record import TIERS, RunRecord
from tiercheck_cli.report.series import (
    attempt_curves,
    fault_marks,
    progress_curves,
    reference_curve,
    watermark_curve,
)
from tiercheck_cli.report.words import TIER_WORDS, seconds, tier_note

_BADGE_ROOM = 0.022
"""Of the picture's width, between the numbers of two faults."""


def loss_svg(record: RunRecord) -> str:
    """Loss by step: the uninterrupted run as a wide pale band, the run as a thin line on it, the faults on
    both."""
    if not record.steps and not record.reference_losses:
        return "<p>No step was recorded.</p>"
    return _svg(_draw_loss, record, 3.75, "Loss by step, with the faults on it")


def progress_svg(record: RunRecord) -> str:
    """Step by time: every fault throws the run back a little and holds it up for a while."""
    if not record.steps:
        return "<p>No step was recorded.</p>"
    return _svg(_draw_progress, record, 3.75, "Step by time, with the faults on it")


def recovery_svg(record: RunRecord) -> str:
    """One bar per fault: noticed, state restored, first new step."""
    if not record.faults:
        return "<p>No fault was injected.</p>"
    return _svg(_draw_recovery, record, 0.7 + 0.54 * len(record.faults), "How long each recovery took")


def write_loss_png(record: RunRecord, path: Path) -> None:
    """Loss by step above, step by time below, for slides and for chats that show no HTML. Raises OSError."""
    with new_figure(11.0, 8.0) as figure:
        loss, progress = figure.subplots(2, 1)
        _draw_loss(loss, record)
        _draw_progress(progress, record)
        verdict = "bitwise equal" if record.bitwise_equal else "NOT EQUAL"
        loss.set_title(f"{record.title} · {verdict}", loc="left", pad=28, fontweight="bold")
        # Outside of the curves: the lower ones begin where a legend would lie.
        if loss.get_legend_handles_labels()[0]:
            loss.legend(loc="upper right", fontsize=9, framealpha=0.95, edgecolor="0.9")
        if progress.get_legend_handles_labels()[0]:
            progress.legend(
                loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, fontsize=9, frameon=False
            )
        save_figure(figure, path)


def write_recovery_png(record: RunRecord, path: Path) -> None:
    """Raises OSError."""
    with new_figure(11.0, 1.8 + 0.7 * max(1, len(record.faults))) as figure:
        axes = figure.subplots()
        _draw_recovery(axes, record)
        axes.set_title("How long each recovery took", loc="left", pad=28, fontweight="bold")
        if record.faults:
            axes.legend(
                frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2
            )
        save_figure(figure, path)


def _svg(draw: Callable[[Any, RunRecord], None], record: RunRecord, height: float, description: str) -> str:
    with new_figure(10.0, height) as figure:
        draw(figure.subplots(), record)
        content = svg_of(figure, description)
    for colour, variable in style.OF_PAGE.items():
        content = content.replace(f": {colour.lower()}", f": var(--{variable})")
    return content


def _draw_loss(axes: Any, record: RunRecord) -> None:
    marks = fault_marks(record)
    axes.plot(*_columns(reference_curve(record)), color=style.PALE, linewidth=6, label="uninterrupted run")
    for index, curve in enumerate(attempt_curves(record)):
        axes.plot(*_columns(curve), color=style.RUN, linewidth=1.4, label="_" if index else "this run")
    for mark in marks:
        label = "_" if mark.number > 1 else "trained again"
        axes.axvspan(
            mark.restored_step, mark.last_step, color=style.AGAIN, linewidth=0, zorder=0, label=label
        )
    axes.margins(x=0.01)
    _finish(axes, "step", "loss")
    _mark_faults(axes, [mark.last_step for mark in marks])


def _draw_progress(axes: Any, record: RunRecord) -> None:
    marks = fault_marks(record)
    for index, curve in enumerate(progress_curves(record)):
        axes.plot(*_columns(curve), color=style.RUN, linewidth=2, label="_" if index else "newest step")
    for tier in TIERS:
        stairs = watermark_curve(record, tier)
        if stairs:
            colour, label = style.TIERS[tier], f"complete in {TIER_WORDS[tier]}"
            axes.plot(
                *_columns(stairs), color=colour, linewidth=1.4, linestyle=style.DASHES[tier], label=label
            )
    for mark in marks:
        label = "_" if mark.number > 1 else "no training"
        axes.axvspan(mark.injected, mark.resumed, color=style.DOWN, linewidth=0, zorder=0, label=label)
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    _finish(axes, "seconds since the job was applied", "step")
    _mark_faults(axes, [mark.injected for mark in marks])


def _draw_recovery(axes: Any, record: RunRecord) -> None:
    longest = max((fault.total_seconds for fault in record.faults), default=1.0) or 1.0
    begins = [0.0] * len(record.faults)
    for phase, colour in style.PHASES:
        lengths = [float(getattr(fault, f"{phase}_seconds")) for fault in record.faults]
        axes.barh(
            range(len(lengths)),
            lengths,
            left=begins,
            color=colour,
            label=style.PHASE_WORDS[phase],
            height=0.6,
        )
        for row, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            # A label that does not fit into its bar would run into the next; the table has the number anyway.
            if length / longest > 0.06:
                axes.text(begin + length / 2, row, seconds(length), ha="center", va="center", fontsize=9)
        begins = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    for row, total in enumerate(begins):
        axes.text(
            total + longest * 0.01, row, seconds(total), va="center", fontweight="bold", color=style.RUN
        )
    names = [
        f"{number}  {fault.name}\n{tier_note(fault.tiers)}" for number, fault in enumerate(record.faults, 1)
    ]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1)
    _finish(axes, "seconds since the fault", "", grid="x")


def _finish(axes: Any, across: str, up: str, grid: str = "y") -> None:
    axes.set_xlabel(across, color=style.RUN)
    axes.set_ylabel(up, color=style.RUN)
    axes.tick_params(length=0, labelcolor=style.RUN)
    remove_frame(axes, grid)
    axes.spines[["bottom", "left"]].set_color(style.SOFT)
    axes.grid(axis=grid, color=style.RULE)


def _mark_faults(axes: Any, places: list[float]) -> None:
    """A thin line at each fault, with its number above the picture; numbers that would overlap move apart."""
    low, high = axes.get_xlim()
    shares = [(place - low) / (high - low) for place in places]
    for number, (x, share) in enumerate(zip(places, _apart(shares), strict=True), start=1):
        axes.axvline(x, color=style.FAULT, linewidth=1)
        axes.annotate(
            str(number), (x, 1.0), xycoords=("data", "axes fraction"), xytext=(share, 1.05),
            textcoords="axes fraction", ha="center", va="center", color=style.ON_FAULT, fontweight="bold",
            fontsize=9,
            bbox={"boxstyle": "circle,pad=0.25", "color": style.FAULT},
            arrowprops={"arrowstyle": "-", "color": style.FAULT, "shrinkA": 0, "shrinkB": 0},
            annotation_clip=False,
        )  # fmt: skip


def _apart(places: list[float]) -> list[float]:
    """The same places, moved right where two numbers would overlap, and back inside the picture."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + _BADGE_ROOM) if moved else place)
    limit = 1.0
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - _BADGE_ROOM
    return moved


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
