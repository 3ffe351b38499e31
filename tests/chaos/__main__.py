"""Runs a chaos campaign on the laptop cluster, and exits with the number of broken promises.

`python -m tests.chaos`
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos import campaign, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--injections", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=1e9, help="no injection begins later")
    parser.add_argument(
        "--bound", type=float, default=campaign.Plan.bound, help="seconds in which all must be well again"
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--only", default="", help="nothing but this point or fault")
    parser.add_argument("--folder", type=Path, help="for logs; a new one if not given")
    parser.add_argument("--report", type=Path, help="folder to write chaos.md and its picture into")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="tiercheck-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs: {folder}", flush=True)
    plan = campaign.Plan(
        options.seed,
        options.injections,
        options.hours * 3600,
        workers=options.workers,
        bound=options.bound,
        only=options.only,
    )
    course = campaign.run(plan, folder, lambda line: print(line, flush=True))
    print(*report.table(course.strikes), "", *report.summary(course), sep="\n", flush=True)
    for broken in course.broken:
        print(f"BROKEN {broken}", flush=True)
    if options.report is not None:
        report.write(course, options.report)
    return min(100, len(course.broken))


if __name__ == "__main__":
    sys.exit(main())
