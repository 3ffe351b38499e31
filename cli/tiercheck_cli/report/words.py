"""Numbers and outcomes as people read them, the same in the terminal, on the page and in the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from tiercheck_cli.events.recoveries import EXACT_WORDS
from tiercheck_cli.report.record import FaultRecord, RunRecord

HEADINGS = (
    "",
    "What failed",
    "Came back from",
    "Restored step",
    "Steps lost",
    "Resume",
    "Detect",
    "Restore",
    "Next step",
    "Total",
)
TIER_WORDS = {
    "local": "own memory",
    "peer": "peer memory",
    "parity": "parity of peers",
    "remote": "remote store",
}
"""Where ranks come back from, nearest first. Parity lies in the peer tier."""


@dataclass(frozen=True)
class Row:
    """One fault, each cell as text; the order of `cells` is that of HEADINGS."""

    number: str
    what: str
    target: str
    sources: str
    restored_step: str
    lost_steps: str
    resume: str
    detect: str
    restore: str
    start: str
    total: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.number,
            f"{self.what}: {self.target}" if self.target else self.what,
            self.sources,
            self.restored_step,
            self.lost_steps,
            self.resume,
            self.detect,
            self.restore,
            self.start,
            self.total,
        )


def rows(faults: Sequence[FaultRecord]) -> list[Row]:
    """One row per fault, in the given order."""
    return [
        Row(
            number=str(number),
            what=fault.what,
            target=fault.target,
            sources=tier_counts(fault.tiers),
            restored_step=str(fault.restored_step),
            lost_steps=str(fault.lost_steps),
            resume=EXACT_WORDS.get(fault.exact, "-"),
            detect=seconds(fault.detect_seconds),
            restore=seconds(fault.restore_seconds),
            start=seconds(fault.start_seconds),
            total=seconds(fault.total_seconds),
        )
        for number, fault in enumerate(faults, start=1)
    ]


def seconds(value: float) -> str:
    """A duration with as many digits as say something: 40 ms, 1.8 s, 12 s, 3 min 5 s."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def tier_counts(tiers: dict[str, int]) -> str:
    """How many ranks came from where, nearest first; "from scratch" if none came from anywhere."""
    named = [f"{tiers[tier]} × {TIER_WORDS[tier]}" for tier in TIER_WORDS if tiers.get(tier)]
    return ", ".join(named) or "from scratch"


def tier_note(tiers: dict[str, int]) -> str:
    """The same, short: "3 local, 1 peer"."""
    return ", ".join(f"{tiers[tier]} {tier}" for tier in TIER_WORDS if tiers.get(tier)) or "from scratch"


def plural(count: int, noun: str) -> str:
    """`3 steps`, `1 step`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_HEADINGS = (
    "#",
    "What failed",
    "Back from",
    "To\nstep",
    "Steps\nlost",
    "Resume",
    "Detect",
    "Restore",
    "Next\nstep",
    "Total",
)


def faults_table(record: RunRecord) -> Table:
    """What failed, where the ranks came back from, and what it cost."""
    # Text, not markup: a name in square brackets must be shown, not interpreted.
    lines = [
        (
            Text(row.number),
            Text.assemble((row.what, "bold"), f"\n{row.target}" if row.target else ""),
            Text(tier_note(fault.tiers).replace(", ", "\n")),
            *(Text(cell) for cell in row.cells[3:]),
        )
        for row, fault in zip(rows(record.faults), record.faults, strict=True)
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_lines=True)
    for index, heading in enumerate(_HEADINGS):
        width = max((part.cell_len for line in lines for part in line[index].split("\n")), default=0)
        if index == 1:
            table.add_column(heading, ratio=1, min_width=10)
        else:
            table.add_column(heading, justify="left" if index == 2 else "right", min_width=width)
    for line in lines:
        table.add_row(*line)
    return table


def verdict_line(record: RunRecord) -> Text:
    """The verdict on one line, green or red."""
    mark, style = ("EQUAL", "bold green") if record.bitwise_equal else ("DIFFERENT", "bold red")
    return Text.assemble((mark, style), "  ", record.sentence)
