"""The three pictures of the page, as SVG that follows the reader's light or dark theme."""

from __future__ import annotations

from tiercheck_cli.report import colours
from tiercheck_cli.report.axes import Scale, badge, frame, line, picture, text
from tiercheck_cli.report.record import TIERS, RunRecord
from tiercheck_cli.report.series import (
    FaultMark,
    attempt_curves,
    fault_marks,
    progress_curves,
    reference_curve,
    watermark_curve,
)
from tiercheck_cli.report.words import seconds, tier_note

WIDTH = 960.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 944.0, 52.0, 46.0
_BADGE_ROOM = 21.0


def loss_chart(record: RunRecord) -> str:
    """Loss by step: the uninterrupted run as a wide pale band, the run as a thin line on it, the faults on both."""
    height = 360.0
    runs, reference = attempt_curves(record), reference_curve(record)
    losses = [loss for curve in [*runs, reference] for _, loss in curve]
    steps = [step for curve in [*runs, reference] for step, _ in curve]
    if not losses:
        return "<p>No step was recorded.</p>"
    room = (max(losses) - min(losses)) * 0.05 or 0.5
    across = Scale(0.0, max(steps), LEFT, RIGHT)
    up = Scale(min(losses) - room, max(losses) + room, height - BOTTOM, TOP)
    parts = [frame(across, up, "step", "loss")]
    marks = fault_marks(record)
    for mark in marks:
        begin, end = across(mark.restored_step), across(mark.last_step)
        parts.append(
            f'<rect x="{begin:.1f}" y="{up.end:.1f}" width="{max(end - begin, 1.5):.1f}" '
            f'height="{up.begin - up.end:.1f}" class="again"/>'
        )
    parts.append(line(reference, across, up, "reference"))
    parts.extend(line(curve, across, up, "run") for curve in runs)
    for mark, x in zip(marks, _apart([across(mark.last_step) for mark in marks]), strict=True):
        parts.append(_fault_line(mark, across(mark.last_step), x, up))
    return picture(WIDTH, height, "".join(parts), "Loss by step, with the faults on it")


def progress_chart(record: RunRecord) -> str:
    """Step by time: every fault throws the run back a little and holds it up for a while."""
    height = 360.0
    runs = progress_curves(record)
    points = [point for curve in runs for point in curve]
    if not points:
        return "<p>No step was recorded.</p>"
    across = Scale(0.0, max(record.ended - record.started, *(time for time, _ in points)), LEFT, RIGHT)
    up = Scale(0.0, max(step for _, step in points) * 1.04, height - BOTTOM, TOP)
    parts = [frame(across, up, "seconds since the job was applied", "step")]
    marks = fault_marks(record)
    for mark in marks:
        begin, end = across(mark.injected), across(mark.resumed)
        parts.append(
            f'<rect x="{begin:.1f}" y="{up.end:.1f}" width="{max(end - begin, 1.0):.1f}" '
            f'height="{up.begin - up.end:.1f}" class="down"/>'
        )
    for tier in TIERS:
        dashes = " ".join(str(length) for length in colours.DASHES[tier][1])
        style = f"stroke:var(--{tier});stroke-dasharray:{dashes}"
        parts.append(line(watermark_curve(record, tier), across, up, "watermark", style))
    parts.extend(line(curve, across, up, "run") for curve in runs)
    for mark, x in zip(marks, _apart([across(mark.injected) for mark in marks]), strict=True):
        parts.append(_fault_line(mark, across(mark.injected), x, up))
    return picture(WIDTH, height, "".join(parts), "Step by time, with the faults on it")


def recovery_chart(record: RunRecord) -> str:
    """One bar per fault: noticed, state restored, first new step."""
    if not record.faults:
        return "<p>No fault was injected.</p>"
    row, left = 52.0, 230.0
    top = 16.0
    height = top + row * len(record.faults) + BOTTOM
    longest = max(fault.total_seconds for fault in record.faults) or 1.0
    across = Scale(0.0, longest, left, RIGHT - 70)
    up = Scale(0.0, 1.0, height - BOTTOM, 4.0)
    parts = []
    for value in across.ticks(7):
        x = across(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up.begin:.1f}" y2="{up.end:.1f}" class="grid"/>')
        parts.append(text(x, up.begin + 18, f"{value:g}", "middle"))
    parts.append(text((left + RIGHT - 70) / 2, up.begin + 38, "seconds since the fault", "middle", "label"))
    for index, fault in enumerate(record.faults):
        y = top + row * index
        parts.append(badge(16, y + 12, str(index + 1)))
        parts.append(text(34, y + 9, fault.name, kind="bar-name"))
        parts.append(text(34, y + 26, tier_note(fault.tiers), kind="tick"))
        begin = 0.0
        lengths = (fault.detect_seconds, fault.restore_seconds, fault.start_seconds)
        for (phase, colour), length in zip(colours.PHASES, lengths, strict=True):
            x, width = across(begin), across(begin + length) - across(begin)
            title = f"{colours.PHASE_WORDS[phase]}: {seconds(length)}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="26" fill="{colour}">'
                f"<title>{title}</title></rect>"
            )
            # A label that does not fit into its bar would run into the next; the table has the number anyway.
            if width > 9 * len(seconds(length)):
                parts.append(text(x + width / 2, y + 17, seconds(length), "middle", "in-bar"))
            begin += length
        parts.append(text(across(begin) + 8, y + 17, seconds(fault.total_seconds), kind="bar-name"))
    return picture(WIDTH, height, "".join(parts), "How long each recovery took")


def _fault_line(mark: FaultMark, x: float, badge_x: float, up: Scale) -> str:
    top = up.end - 8
    return f'<path d="M{x:.1f},{up.begin:.1f} L{x:.1f},{up.end:.1f} L{badge_x:.1f},{top:.1f}" class="fault"/>' + badge(
        badge_x, top, str(mark.number)
    )


def _apart(places: list[float]) -> list[float]:
    """The same places, moved right where two badges would overlap, and back inside the picture."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + _BADGE_ROOM) if moved else place)
    limit = RIGHT
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - _BADGE_ROOM
    return moved
