"""The same pictures as PNG files, for slides and for chats that show no HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiercheck_cli.report import colours
from tiercheck_cli.report.record import TIERS, RunRecord
from tiercheck_cli.report.series import attempt_curves, fault_marks, progress_curves, reference_curve, watermark_curve
from tiercheck_cli.report.words import TIER_WORDS, seconds

_DPI = 150


def draw_loss(record: RunRecord, path: Path) -> None:
    """Loss by step above, step by time below, the faults on both. Raises OSError."""
    figure = _figure(11.0, 8.0)
    loss, progress = figure.subplots(2, 1)
    marks = fault_marks(record)

    loss.plot(*_columns(reference_curve(record)), color="0.75", linewidth=6, label="uninterrupted run")
    for index, curve in enumerate(attempt_curves(record)):
        label = "this run" if index == 0 else None
        loss.plot(*_columns(curve), color=colours.RUN, linewidth=1.4, label=label)
    for mark in marks:
        label = "trained again" if mark.number == 1 else None
        loss.axvspan(mark.restored_step, mark.last_step, color="#E69F00", alpha=0.25, linewidth=0, label=label)
    _mark(loss, [(mark.last_step, mark.number) for mark in marks])
    loss.set(xlabel="step", ylabel="loss")
    verdict = "bitwise equal" if record.bitwise_equal else "NOT EQUAL"
    loss.set_title(f"{record.title} · {verdict}", loc="left", pad=22, fontweight="bold")

    for index, curve in enumerate(progress_curves(record)):
        label = "newest step" if index == 0 else None
        progress.plot(*_columns(curve), color=colours.RUN, linewidth=2, label=label)
    for tier in TIERS:
        stairs = watermark_curve(record, tier)
        if stairs:
            colour, label = colours.TIERS[tier], f"complete in {TIER_WORDS[tier]}"
            progress.plot(*_columns(stairs), color=colour, linewidth=1.4, linestyle=colours.DASHES[tier], label=label)
    for mark in marks:
        label = "no training" if mark.number == 1 else None
        progress.axvspan(mark.injected, mark.resumed, color="0.5", alpha=0.25, linewidth=0, label=label)
    _mark(progress, [(mark.injected, mark.number) for mark in marks])
    progress.set(xlabel="seconds since the job was applied", ylabel="step")
    for axes in (loss, progress):
        axes.margins(x=0.01)
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    progress.set_xlim(left=0)
    # Outside of the curves: the lower ones begin where a legend would lie.
    if loss.get_legend_handles_labels()[0]:
        loss.legend(loc="upper right", fontsize=9, framealpha=0.95, edgecolor="0.9")
    if progress.get_legend_handles_labels()[0]:
        progress.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, fontsize=9, frameon=False)
    _save(figure, path)


def draw_recovery(record: RunRecord, path: Path) -> None:
    """One bar per fault: noticed, state restored, first new step. Raises OSError."""
    figure = _figure(11.0, 1.8 + 0.7 * max(1, len(record.faults)))
    axes = figure.subplots()
    labels = [f"{number}  {fault.name}" for number, fault in enumerate(record.faults, start=1)]
    longest = max((fault.total_seconds for fault in record.faults), default=1.0) or 1.0
    begins = [0.0] * len(record.faults)
    for phase, colour in colours.PHASES:
        lengths = [float(getattr(fault, f"{phase}_seconds")) for fault in record.faults]
        axes.barh(range(len(lengths)), lengths, left=begins, color=colour, label=colours.PHASE_WORDS[phase], height=0.6)
        for row, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            if length / longest > 0.06:
                axes.text(begin + length / 2, row, seconds(length), ha="center", va="center", fontsize=9)
        begins = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    for row, total in enumerate(begins):
        axes.text(total + longest * 0.01, row, seconds(total), va="center", fontsize=10, fontweight="bold")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1)
    axes.set_xlabel("seconds since the fault")
    axes.set_title("How long each recovery took", loc="left", pad=28, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    if labels:
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    # Imported here: it takes half a second, and the page and the table do without.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=_DPI, facecolor="white")


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _mark(axes: Any, places: list[tuple[float, int]]) -> None:
    """A thin line at each fault, with its number above the picture."""
    for x, number in places:
        axes.axvline(x, color=colours.FAULT, linewidth=1)
        axes.annotate(
            str(number), (x, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            ha="center", color=colours.FAULT, fontweight="bold", fontsize=10,
        )  # fmt: skip
