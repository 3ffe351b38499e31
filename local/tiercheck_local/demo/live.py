"""Live progress: one line that follows the job, and the story told above it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tiercheck_local.demo.training_log import TrainingLog

PRINT_EVERY = 15.0
"""Seconds between lines where there is no terminal to redraw."""


class Live:
    """`with Live(...) as live:` redraws on a terminal, and prints a line now and then elsewhere (CI,
    pipes)."""

    def __init__(self, console: Console, steps: int, log: TrainingLog) -> None:
        self._console = console
        self._log = log
        self._steps = steps
        self._printed = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, state="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, soft_wrap=True)

    def follow(self, status: Mapping[str, Any]) -> None:
        """Show where the job is now."""
        last = self._log.last
        state = describe(status, last.step if last else 0, last.loss if last else None)
        self._progress.update(self._task, completed=last.step if last else 0, state=state)
        if not self._console.is_terminal and time.monotonic() - self._printed > PRINT_EVERY:
            self._printed = time.monotonic()
            self._console.print(f"  {state}", highlight=False, soft_wrap=True)

    def count(self, description: str, step: int) -> None:
        """Show a plain count (the reference run)."""
        self._progress.update(
            self._task, description=description, completed=step, state=f"step {step}/{self._steps}"
        )


def describe(status: Mapping[str, Any], step: int, loss: float | None) -> str:
    """The job in one line: phase, step, loss, and what is safe where."""
    tiers = status.get("tiers") or {}
    safe = " ".join(
        f"{tier}:{tiers[tier]['step']}"
        for tier in ("local", "peer", "remote")
        if "step" in tiers.get(tier, {})
    )
    words = [str(status.get("phase") or "Pending"), f"step {step}"]
    if loss is not None:
        words.append(f"loss {loss:.3f}")
    words.append(f"safe {safe or 'nothing yet'}")
    words.append(f"attempt {status.get('attempt', 0)}")
    return " · ".join(words)
