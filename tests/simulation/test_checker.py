"""The checker finds a true history that was doctored in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.simulation.checker import Entry, check
from tests.simulation.runs import history_of
from tiercheck.protocol.version import Version

CRASH_OF_A_JOB_WITH_ALL_TIERS = 10_000_561
"""Seed of a small schedule with a copy and a bucket, in which one command crashes."""


@pytest.mark.parametrize("mark", ["local", "peer", "snapshot", "remote"])
def test_mark_that_is_ahead_of_what_there_is_is_found(mark: str) -> None:
    """Seven steps, in the first verdict that has it: whichever mark it is."""

    def ahead(at: float, what: str, fields: dict[str, object]) -> Entry:
        known = fields.get(mark) if what == "verdict" else None
        if isinstance(known, Version) and not done:
            done.append(known)
            fields = {**fields, mark: replace(known, step=known.step + 7)}
        return at, what, fields

    done: list[Version] = []
    assert "complete is complete" in broken_by(ahead)
    assert done


def test_attempt_number_that_is_given_twice_is_found() -> None:
    """With a version of that number itself, which leads back to itself."""

    def again(at: float, what: str, fields: dict[str, object]) -> Entry:
        if what == "attempt" and fields["number"] == 2:
            assert isinstance(fields["version"], Version)
            assert fields["version"].attempt == 1
            fields = {**fields, "number": 1}
        return at, what, fields

    assert "one history" in broken_by(again)


def broken_by(change: Callable[[float, str, dict[str, object]], Entry]) -> set[str]:
    """The promises that the changed history breaks; as it was, it breaks none."""
    history = history_of(CRASH_OF_A_JOB_WITH_ALL_TIERS)
    assert not check(history)
    return {each.promise for each in check([change(*entry) for entry in history])}
