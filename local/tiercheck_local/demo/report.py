"""Shows the record of a run: a table for the terminal, and a page with the table and one figure.

The page loads nothing from anywhere, so it can be mailed and archived.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tiercheck_cli.events import EXACT_WORDS, count_ranks
from tiercheck_cli.plan.command import new_figure, remove_frame, svg_of
from tiercheck_cli.terminal import PHASES, short
from tiercheck_local.demo.record import FaultRecord, RunRecord
from tiercheck_operator.model.conditions import plural

HEADINGS = (
    "#", "What failed", "Back from", "To\nstep", "Steps\nlost", "Resume", "Detect", "Restore", "Next\nstep",
    "Total",
)  # fmt: skip
_FAULT, _RUN, _REFERENCE, _AGAIN = "#D55E00", "#1c1f23", "#bfbfbf", "#f8e7c0"

_STYLE = """
:root { color-scheme: light; }
body { max-width: 1000px; margin: 0 auto; padding: 32px 20px; font: 16px/1.5 system-ui, sans-serif; }
.verdict { border-left: 6px solid #0a7a52; padding: 8px 16px; font-size: 1.1rem; }
.bad { border-color: #b3261e; }
.wide { overflow-x: auto; } .wide svg { min-width: 640px; }
caption { text-align: left; padding-bottom: 8px; }
@media (max-width: 700px) {
  .wide::before { content: "\2194  scrolls"; color: #5d646d; font-size: .9rem; }
  .rows thead { display: none; } .rows td { display: flex; gap: 12px; border: 0; padding: 2px 0; }
  .rows td::before { content: attr(data-of); flex: 0 0 6.5em; color: #5d646d; }
  .rows tr { display: block; padding: 8px 0; border-bottom: 1px solid #e2e0db; }
}
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: 6px 10px; border-bottom: 1px solid #e2e0db; text-align: left; vertical-align: top; }
svg { width: 100%; height: auto; }
dt { font-weight: 650; margin-top: 8px; } dd { margin: 0; color: #5d646d; }
code { overflow-wrap: anywhere; }
"""
_GUIDE = {
    "Bitwise equal": "Every loss has the same bits as in the uninterrupted run, and so have all parameters "
    "at the end. One lost or repeated batch would show.",
    "Back from": "How many ranks came back from which tier: local (own memory) survives a crashed process; "
    "peer, and parity rebuilt from what peers hold, the loss of pods, nodes and racks; remote (the store) "
    "the loss of everything. New: processes that were started anew; the others were never ended.",
    "Steps lost": "Steps that were done before the failure and had to be done again.",
    "Resume": "Proven: the steps trained again gave bit for bit what the ranks had written down before.",
    "Detect, restore, next step": "From the failure until the operator acted; until every rank held the same "
    "verified version, in new pods where pods were lost; until the first new step had ended.",
}


def write_report(records: Sequence[RunRecord], folder: Path) -> Path:
    """Writes run.json and index.html to `folder`, made if missing; returns the latter. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [dataclasses.asdict(record) for record in records]
    (folder / "run.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(page(records), encoding="utf-8")
    return folder / "index.html"


def rows(faults: Sequence[FaultRecord]) -> list[tuple[str, ...]]:
    """Returns the cells of each fault, in the order of HEADINGS."""
    return [
        (
            str(number),
            f"{fault.what}\n{fault.target}".rstrip(),
            f"{count_ranks(fault.tiers)}, {fault.restarted} new".replace(", ", "\n"),
            str(fault.restored_step),
            str(fault.lost_steps),
            EXACT_WORDS.get(fault.exact, "-"),
            *map(short, (fault.detect_seconds, fault.restore_seconds)),
            *map(short, (fault.start_seconds, fault.total_seconds)),
        )
        for number, fault in enumerate(faults, start=1)
    ]


def faults_table(record: RunRecord) -> Table:
    """Returns a table of what failed, where the ranks were restored from, and what it cost."""
    # Text, not markup: a name in square brackets must be shown, not interpreted.
    lines = [[Text(cell) for cell in row] for row in rows(record.faults)]
    table = Table(
        title=record.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_lines=True,
    )
    for index, heading in enumerate(HEADINGS):
        if index == 1:
            table.add_column(heading, ratio=1, min_width=10)
        else:
            width = max((part.cell_len for line in lines for part in line[index].split("\n")), default=0)
            table.add_column(heading, justify="left" if heading == "Back from" else "right", min_width=width)
    for line in lines:
        table.add_row(*line)
    return table


def verdict_line(record: RunRecord) -> Text:
    """Returns the verdict on one line, green or red."""
    mark, style = ("EQUAL", "bold green") if record.verdict.equal else ("DIFFERENT", "bold red")
    return Text.assemble((mark, style), "  ", record.verdict.sentence)


def page(records: Sequence[RunRecord]) -> str:
    """Returns the whole page. Every value from the records is escaped."""
    first = records[0]
    equal = "Bitwise equal" if all(record.verdict.equal for record in records) else "Not equal"
    title = f"TierCheck demo: one job, {plural(len(first.faults), 'failure')}"
    racks = len(set(first.nodes.values()))
    started = datetime.fromtimestamp(first.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = (
        f"{plural(len(first.nodes), 'node')} in {plural(racks, 'rack')}, {first.machine}, {started}, "
        f"{short(records[-1].ended - first.started)} in all"
    )
    guide = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in _GUIDE.items())
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{equal}: {title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1><p>{_html(where)}</p>
{"".join(map(_section, records))}
<h2>How to read this page</h2><dl>{guide}</dl><p>All numbers are in run.json beside this page.</p>
</body></html>
"""


def _section(record: RunRecord) -> str:
    verdict, kind = ("Bitwise equal", "") if record.verdict.equal else ("Not equal", " bad")
    head = "".join(f'<th scope="col">{_html(heading)}</th>' for heading in HEADINGS)
    names = [heading.replace("\n", " ") for heading in HEADINGS]
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-of="{escape(name)}"><span>{_html(cell)}</span></td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in rows(record.faults)
    )
    digests = "".join(
        f"<dt>{whose}</dt><dd><code>{escape(found.value if found else 'none')}</code></dd>"
        for whose, found in (("This run", record.digest), ("Uninterrupted run", record.reference_digest))
    )
    return f"""<h2>{_html(record.title)}</h2>
<p class="verdict{kind}"><b>{verdict}</b><br>{_html(record.verdict.sentence)}</p>
<table class="rows"><caption>Each failure was injected into the running job. The operator
brought the job back.</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
<div class="wide" role="region" aria-label="The figure" tabindex="0">{figure(record)}</div>
<h3>Digests of the final parameters</h3><dl>{digests}</dl>"""


def _html(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def figure(record: RunRecord) -> str:
    """Returns the figure as SVG: the loss with the faults on it above, each recovery's parts below."""
    below = 0.8 + 0.5 * len(record.faults)
    with new_figure(10.0, 4.0 + below) as drawn:
        loss, recoveries = drawn.subplots(2, 1, height_ratios=(4.0, below))
        _draw_loss(loss, record)
        _draw_recoveries(recoveries, record.faults)
        return svg_of(drawn, "Loss by step with the faults on it, and how long each recovery took")


def _draw_loss(axes: Any, record: RunRecord) -> None:
    """Draws the run's attempts as thin lines on the wide pale one of the uninterrupted run."""
    reference = sorted((step.step, step.loss) for step in record.reference)
    axes.plot(*_columns(reference), color=_REFERENCE, linewidth=6, label="uninterrupted run")
    attempts: dict[int, list[tuple[int, float]]] = {}
    for step in record.steps:
        attempts.setdefault(step.attempt, []).append((step.step, step.loss))
    for index, points in enumerate(attempts.values()):
        axes.plot(*_columns(points), color=_RUN, linewidth=1.4, label="_" if index else "this run")
    for number, fault in enumerate(record.faults, start=1):
        last = fault.restored_step + fault.lost_steps
        label = "_" if number > 1 else "trained again"
        axes.axvspan(fault.restored_step, last, color=_AGAIN, linewidth=0, zorder=0, label=label)
        axes.axvline(last, color=_FAULT, linewidth=1)
        axes.annotate(
            f"{number} {fault.name}", (last, 1.02), xycoords=("data", "axes fraction"), ha="center",
            color=_FAULT,
        )  # fmt: skip
    axes.margins(x=0.01)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(loc="lower left", framealpha=1.0, edgecolor="0.9")
    remove_frame(axes, "y")


def _draw_recoveries(axes: Any, faults: Sequence[FaultRecord]) -> None:
    begins = [0.0] * len(faults)
    for phase, words, colour in PHASES:
        lengths = [float(getattr(fault, f"{phase}_seconds")) for fault in faults]
        axes.barh(range(len(faults)), lengths, 0.6, left=begins, color=colour, label=words)
        begins = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    for row, total in enumerate(begins):
        axes.annotate(short(total), (total, row), (4, 0), textcoords="offset points", va="center")
    names = [f"{number}  {fault.name}" for number, fault in enumerate(faults, 1)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the failure")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False)
    remove_frame(axes, "x")


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]
