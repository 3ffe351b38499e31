"""The outcome in the terminal: the same rows as on the page."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from tiercheck_cli.report.record import RunRecord
from tiercheck_cli.report.words import HEADINGS, rows


def faults_table(record: RunRecord) -> Table:
    """What failed, where the ranks came back from, and what it cost."""
    table = Table(title=record.title, title_justify="left", title_style="bold", show_lines=True)
    for index, heading in enumerate(HEADINGS):
        text = index in (1, 2)
        table.add_column(heading, justify="left" if text else "right", no_wrap=index >= 5, overflow="fold")
    for row in rows(record.faults):
        # Text, not markup: a name in square brackets must be shown, not interpreted.
        table.add_row(*(Text(cell) for cell in row.cells))
    return table


def verdict_line(record: RunRecord) -> Text:
    """The verdict on one line, green or red."""
    mark, style = ("EQUAL", "bold green") if record.bitwise_equal else ("DIFFERENT", "bold red")
    return Text.assemble((mark, style), "  ", record.sentence)
