"""The checker finds a true history that was doctored in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from tests.simulation.checker import Entry, check
from tests.simulation.runs import history_of
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Kind, Version

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


@pytest.mark.parametrize("tier", ["local", "peer"])
def test_snapshot_that_counts_and_is_not_there_is_found(tier: str) -> None:
    def ahead(at: float, what: str, fields: dict[str, object]) -> Entry:
        if what == "counted" and not done:
            held = cast(tuple[tuple[Tier, int, Kind, Version], ...], fields["held"])
            done.extend(each for each in held if each[0].value == tier)
            more = [(*each[:3], replace(each[3], step=each[3].step + 7)) for each in done]
            fields = {**fields, "held": (*held, *more)}
        return at, what, fields

    done: list[tuple[Tier, int, Kind, Version]] = []
    assert "what counts is there" in broken_by(ahead)
    assert done


def test_snapshot_that_is_freed_while_it_counts_is_found() -> None:
    """By its own memory's loop, before any version that rests on it was announced."""

    def early(at: float, what: str, fields: dict[str, object]) -> Entry:
        if what == "counted":
            held = cast(tuple[tuple[Tier, int, Kind, Version], ...], fields["held"])
            counts[str(fields["pod"])] = held[-1:] if held[-1:] and held[-1][0].value == "local" else ()
        if what == "verdict" and not done and any(counts.values()):
            pod, held = next((pod, held) for pod, held in counts.items() if held)
            done.append(pod)
            return at, "freed", {"pod": pod, "what": held, "by": "reclaim"}
        return at, what, fields

    counts: dict[str, tuple[tuple[Tier, int, Kind, Version], ...]] = {}
    done: list[str] = []
    assert "what counts is there" in broken_by(early)


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
