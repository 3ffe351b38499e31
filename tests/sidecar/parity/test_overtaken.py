"""Blocks that are being made are given up when nobody will need them, and not before."""

from __future__ import annotations

from typing import Any

import pytest

from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Branch, History, Kind, Version
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.parity.block import is_expendable

HISTORY = History((Branch(1, 0), Branch(2, 20)))


def v(step: int) -> Version:
    return Version(step, 1 if step <= 20 else 2)


def verdict(**more: Any) -> TierVerdict:
    return TierVerdict(2, Watermarks(), **more)


@pytest.mark.parametrize("kind", Kind)
def test_without_a_word_in_this_attempt_only_other_histories_are_given_up(kind: Kind) -> None:
    for word in (None, TierVerdict(1, Watermarks(), floor=v(19), copy=v(19))):
        assert not is_expendable(v(3), kind, HISTORY, word)
        assert is_expendable(Version(21, 1), kind, HISTORY, word)


def test_snapshot_gives_way_to_the_one_that_is_named_after_it() -> None:
    assert is_expendable(v(24), Kind.SNAPSHOT, HISTORY, verdict(copy=v(28)))
    assert not is_expendable(v(28), Kind.SNAPSHOT, HISTORY, verdict(copy=v(28)))
    assert not is_expendable(v(32), Kind.SNAPSHOT, HISTORY, verdict(copy=v(28))), (
        "its member has heard newer news"
    )
    assert not is_expendable(v(24), Kind.DELTA, HISTORY, verdict(copy=v(28)))


def test_named_snapshot_is_made_even_when_deltas_have_carried_the_floor_past_it() -> None:
    assert not is_expendable(v(28), Kind.SNAPSHOT, HISTORY, verdict(copy=v(28), floor=v(32)))
    assert is_expendable(v(28), Kind.SNAPSHOT, HISTORY, verdict(copy=None, floor=v(32)))


def test_abandoned_snapshot_is_given_up_and_the_delta_of_its_step_is_not() -> None:
    assert is_expendable(v(24), Kind.SNAPSHOT, HISTORY, verdict(abandoned=(v(24),)))
    assert not is_expendable(v(24), Kind.DELTA, HISTORY, verdict(abandoned=(v(24),)))


@pytest.mark.parametrize("kind", Kind)
def test_what_is_older_than_the_floor_is_given_up(kind: Kind) -> None:
    assert is_expendable(v(24), kind, HISTORY, verdict(floor=v(25)))
    assert not is_expendable(v(25), kind, HISTORY, verdict(floor=v(25)))
