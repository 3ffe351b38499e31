"""The matrix as a table: one row per fault, with what the job said of it and what the logs say."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HEAD = (
    "| what failed | what the job told | came back from | steps trained again (told) | detect | ours | "
    "next step | "
    "pods replaced | longest pause |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Row:
    """Seconds are of wall clock; None: there was nothing to measure."""

    fault: str
    told: str
    """Causes, in the order of the Events; or the condition, where training went on."""
    tiers: str
    again: int | None
    """Steps that the trainers' log shows twice."""
    lost_told: int | None
    detect: float | None
    ours: float | None
    """From the fault to the release of the trainers, without Python's and torch's start."""
    next_step: float | None
    replaced: int
    pause: float | None
    """The longest time between two steps."""
    bound: float | None = None
    """Seconds that `ours` may take on an idle cluster."""


class Report:
    """Rows are written down at once, so that a run that is broken off leaves what it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Row] = []
        self.verdicts: list[str] = []
        """Sentences below the table."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"\n{_line(row)}", flush=True)
        with open(self._path.with_suffix(".jsonl"), "a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def write(self, root: Path) -> None:
        self._path.write_text(
            "\n".join([_machine(root), "", HEAD, *map(_line, self.rows), "", *self.verdicts, ""])
        )


def _line(row: Row) -> str:
    again = "–" if row.again is None else f"{row.again} ({row.lost_told})"
    ours = _seconds(row.ours)
    if row.bound is not None and row.ours is not None and row.ours > row.bound:
        ours += f" **(over {row.bound:.0f})**"
    cells = (
        row.fault, row.told, row.tiers or "–", again, _seconds(row.detect), ours, _seconds(row.next_step),
        str(row.replaced), _seconds(row.pause),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _machine(root: Path) -> str:
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip() or 'unknown'}, {os.cpu_count()} "
        "cores for all nodes and the control "
        f"plane, Linux {platform.release()}, load at the end {load}."
    )
