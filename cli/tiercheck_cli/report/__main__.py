"""`python -m tiercheck_cli.report RUN.json OUTDIR`: draw a record again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from tiercheck_cli.report import RunRecord, faults_table, render, verdict_line
from tiercheck_cli.report.record import RecordError


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the record cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m tiercheck_cli.report", description=__doc__)
    parser.add_argument("record", type=Path, metavar="RUN.json", help="what a run left behind")
    parser.add_argument("folder", type=Path, metavar="OUTDIR", help="where the page and the pictures go")
    options = parser.parse_args(arguments)
    try:
        record = RunRecord.read(options.record)
    except (OSError, RecordError) as error:
        print(error, file=sys.stderr)
        return 2
    rendered = render(record, options.folder)
    console = Console()
    console.print(faults_table(record))
    console.print(verdict_line(record))
    console.print(f"report: {rendered.page}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
