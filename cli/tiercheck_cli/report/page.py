"""The report of a run: one HTML page that needs nothing else, and its pictures once more as files.

The page can be mailed, archived and opened in ten years.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from tiercheck_cli.report import style
from tiercheck_cli.report.pictures import (
    loss_svg,
    progress_svg,
    recovery_svg,
    write_loss_png,
    write_recovery_png,
)
from tiercheck_cli.report.record import TIERS, FaultRecord, RunRecord
from tiercheck_cli.report.style import CSS
from tiercheck_cli.report.words import HEADINGS, TIER_WORDS, plural, rows, seconds


def page(record: RunRecord) -> str:
    """The whole page. Every value from the record is escaped."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_verdict(record)}: "
            f"{escape(record.title)}</title><style>{CSS}</style></head><body><main>",
            _head(record),
            _section("What failed, and what it cost", _FAULTS, f'<div class="card">{_faults(record)}</div>'),
            _section(
                "The loss, with the faults on it",
                _LOSS,
                _card(
                    _key(
                        ("var(--run)", "this run", False),
                        ("var(--pale)", "uninterrupted run", False),
                        ("var(--again)", "steps trained again", False),
                    ),
                    loss_svg(record),
                ),
            ),
            _section("Progress by the clock", _PROGRESS, _card(_progress_key(record), progress_svg(record))),
            _section("How long each recovery took", _RECOVERY, _card(_phase_key(), recovery_svg(record))),
            _section("Where each rank came back from", _RANKS, f'<div class="card">{_ranks(record)}</div>'),
            _section("How to read this page", "", _GUIDE),
            _section("The evidence", "", f'<div class="card">{_evidence(record)}</div>'),
            "</main></body></html>\n",
        ]
    )


_FAULTS = "Each fault was injected into the running job. Nobody helped: the operator brought the job back."
_LOSS = (
    "The thin line is this run, attempt after attempt, drawn on the pale line of a run that nothing happened "
    "to. "
    "Where the thin line leaves the pale one, the two runs differ. Shaded stretches were lost and trained "
    "again."
)
_PROGRESS = "A fault throws the run back to the newest complete version and holds it up for a while (grey)."
_RECOVERY = (
    "From the fault to the end of the first new step. Below each name: how many ranks came back "
    "from which tier."
)
_RANKS = "One column per fault. Own memory is the nearest source; the remote store is the farthest."
_GUIDE = """<dl class="guide">
<dt>Bitwise equal</dt><dd>Every loss has the same bits as in the uninterrupted run, and so have all parameters
at the end.
That is stronger than a curve that looks the same: one lost or repeated batch would show.</dd>
<dt>Detect</dt><dd>From the fault until the operator acted on it.</dd>
<dt>Restore</dt><dd>Until every rank held the same verified version: new pods where pods were lost, then the
copying.</dd>
<dt>Next step</dt><dd>Until the first new step had ended: starting Python, joining the process group, loading,
one step.</dd>
<dt>Steps lost</dt><dd>Steps that were done before the fault and had to be done again, at most one snapshot
interval and those
still on their way.</dd>
<dt>Resume</dt><dd>Proven: the steps trained again gave bit for bit what the ranks had written down before
the fault.</dd>
<dt>Own memory, peer memory, remote store</dt><dd>The three tiers. Own memory survives a crashed process, peer
memory the
loss of pods, nodes and racks, the remote store the loss of everything.</dd></dl>"""


def _section(title: str, lead: str, content: str) -> str:
    return f"<h2>{title}</h2>" + (f'<p class="soft">{lead}</p>' if lead else "") + content


def _card(key: str, chart: str) -> str:
    return f'<div class="card">{key}{chart}</div>'


def _head(record: RunRecord) -> str:
    kind = "" if record.bitwise_equal else " bad"
    racks = len(set(record.nodes.values()))
    where = (
        f"{plural(record.workers, 'worker')}, {plural(len(record.nodes), 'node')} in {plural(racks, 'rack')}"
    )
    figures = (
        ("faults injected", str(len(record.faults))),
        ("steps trained", str(len({step.step for step in record.steps}))),
        ("steps trained again", str(record.trained_again)),
        ("longest recovery", seconds(max((fault.total_seconds for fault in record.faults), default=0.0))),
        ("whole run", seconds(record.ended - record.started)),
    )
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return (
        f'<h1>{escape(record.title)}</h1><p class="soft">{escape(where)} · {escape(record.machine)} · '
        f"{_date(record.started)}</p>"
        f'<div class="card verdict{kind}"><strong>{_verdict(record)}</strong>{escape(record.sentence)}</div>'
        f'<dl class="figures">{cells}</dl>'
    )


def _verdict(record: RunRecord) -> str:
    return "Bitwise equal" if record.bitwise_equal else "Not equal"


def _faults(record: RunRecord) -> str:
    numeric = [index >= 3 for index in range(len(HEADINGS))]
    head = "".join(
        f'<th class="number">{escape(heading)}</th>' if number else f"<th>{escape(heading)}</th>"
        for heading, number in zip(HEADINGS, numeric, strict=True)
    )
    body = []
    for row, fault in zip(rows(record.faults), record.faults, strict=True):
        first = f'<td><span class="count">{escape(row.number)}</span></td>'
        target = f'<br><span class="soft">{escape(row.target)}</span>' if row.target else ""
        what = f'<td class="wide">{escape(row.what)}{target}</td>'
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in row.cells[3:])
        body.append(f"<tr>{first}{what}<td>{_chips(fault)}</td>{numbers}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _chips(fault: FaultRecord) -> str:
    chips = [
        f'<span class="chip" style="border-color:var(--{tier})">{escape(str(fault.tiers[tier]))} × '
        f"{words}</span>"
        for tier, words in TIER_WORDS.items()
        if fault.tiers.get(tier)
    ]
    return "".join(chips) or '<span class="chip">from scratch</span>'


def _ranks(record: RunRecord) -> str:
    head = "".join(
        f'<th><span class="count">{number}</span> {escape(fault.name)}</th>'
        for number, fault in enumerate(record.faults, start=1)
    )
    ranks = max((len(fault.rank_sources) for fault in record.faults), default=0)
    body = "".join(
        f"<tr><td>rank {rank}</td>"
        + "".join(
            f"<td>{escape(fault.rank_sources[rank]) if rank < len(fault.rank_sources) else '–'}</td>"
            for fault in record.faults
        )
        + "</tr>"
        for rank in range(ranks)
    )
    reasons = "".join(
        f"<tr><td><span class=count>{number}</span></td><td class=wide>{escape(fault.reason)}</td></tr>"
        for number, fault in enumerate(record.faults, start=1)
        if fault.reason
    )
    why = (
        f"<table><thead><tr><th colspan=2>Why that version</th></tr></thead>{reasons}</table>"
        if reasons
        else ""
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>{why}"


def _evidence(record: RunRecord) -> str:
    entries = [
        ("digest of the final parameters, this run", record.digests.get("run", "none")),
        ("digest of the final parameters, uninterrupted run", record.digests.get("reference", "none")),
        (
            "losses compared",
            f"{len(record.run_losses)} of this run, {len(record.reference_losses)} of the other",
        ),
        ("machine", record.machine),
        ("nodes", ", ".join(f"{node} ({rack})" for node, rack in sorted(record.nodes.items()))),
        ("from", f"{_date(record.started)} to {_date(record.ended)}"),
    ]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>" for name, value in entries
    )
    return f"<table>{cells}</table><p class=soft>All numbers of this page are in run.json beside it.</p>"


def _key(*entries: tuple[str, str, bool]) -> str:
    items = "".join(
        f'<li><span class="swatch{" dashed" if dashed else ""}" '
        f'style="{"border-color" if dashed else "background"}:{colour}"></span>{escape(name)}</li>'
        for colour, name, dashed in entries
    )
    return f'<ul class="key">{items}</ul>'


def _progress_key(record: RunRecord) -> str:
    sampled = {sample.tier for sample in record.samples}
    tiers = [(f"var(--{tier})", f"complete in {TIER_WORDS[tier]}", True) for tier in TIERS if tier in sampled]
    return _key(("var(--run)", "newest step", False), *tiers, ("var(--down)", "no training", False))


def _phase_key() -> str:
    return _key(*((colour, style.PHASE_WORDS[phase], False) for phase, colour in style.PHASES))


def _date(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


@dataclass(frozen=True)
class Rendered:
    """The files of one report."""

    record: Path
    page: Path
    loss: Path
    recovery: Path


def render(record: RunRecord, folder: Path) -> Rendered:
    """Write run.json, index.html, loss.png and recovery.png into `folder`, which is made if need be. Raises
    OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Rendered(folder / "run.json", folder / "index.html", folder / "loss.png", folder / "recovery.png")
    record.write(files.record)
    files.page.write_text(page(record), encoding="utf-8")
    write_loss_png(record, files.loss)
    write_recovery_png(record, files.recovery)
    return files
