"""The outcome in the terminal: the rows of the page, short enough for 80 columns."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from tiercheck_cli.report.record import RunRecord
from tiercheck_cli.report.words import rows, tier_note

_HEADINGS = ("#", "What failed", "Back from", "To\nstep", "Steps\nlost", "Detect", "Restore", "Next\nstep", "Total")


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
            table.add_column(heading, ratio=1, min_width=16)
        else:
            table.add_column(heading, justify="left" if index == 2 else "right", min_width=width)
    for line in lines:
        table.add_row(*line)
    return table


def verdict_line(record: RunRecord) -> Text:
    """The verdict on one line, green or red."""
    mark, style = ("EQUAL", "bold green") if record.bitwise_equal else ("DIFFERENT", "bold red")
    return Text.assemble((mark, style), "  ", record.sentence)
