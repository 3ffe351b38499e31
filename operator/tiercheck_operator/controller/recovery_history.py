"""The job's newest recoveries, for people and dashboards: short, so that a status never outgrows its object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LENGTH = 10
"""Recoveries that are remembered."""
_SENTENCE = 160
"""Characters of `message` and `reason` in the history; status.lastRecovery has all of them."""


def add_summary(history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """`history` with one more, newest first."""
    short = {key: _shortened(value) if key in ("message", "reason") else value for key, value in summary.items()}
    return (short, *history)[:LENGTH]


def _shortened(sentence: object) -> str:
    text = str(sentence or "")
    return text if len(text) <= _SENTENCE else text[: _SENTENCE - 1] + "\N{HORIZONTAL ELLIPSIS}"
