"""Keeps the trainings of one process apart, so that each finds its own versions and no other's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tiercheck.trainer.state.training import name_of

_ended: Counter[tuple[str, str]] = Counter()
"""Trainings of this process that came to their end, by folder and name."""


def name_run(folder: Path | str | None, run: str | None) -> str | None:
    """The name of the training that begins: `run`, with its number from the second one on."""
    ended = _ended[str(folder), name_of(run)]
    return f"{name_of(run)}.{ended + 1}" if ended else run


def end_run(folder: Path | str | None, run: str | None) -> None:
    """The training that had this `run` has come to its end: the next one in this process is another."""
    _ended[str(folder), name_of(run)] += 1
