"""Broken promises are found in made-up records, and a short campaign breaks none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import campaign, report
from tests.chaos.promises import LifeChecker, Mark
from tests.chaos.record import Said


def test_what_the_attempt_before_had_said_is_not_held_against_the_next_one() -> None:
    said = Said()
    assert said.of(1, {"peer": {"step": 12, "time": "a"}}) == {"peer": 12}
    assert said.of(2, {"peer": {"step": 12, "time": "a"}}) == {}
    assert said.of(2, {"peer": {"step": 11, "time": "b"}}) == {"peer": 11}


def test_mark_that_falls_within_an_attempt_is_a_broken_promise_and_silence_is_none() -> None:
    def verdict(step: int | None) -> dict[str, object]:
        mark = None if step is None else Mark(step, 1)
        return {
            "by": "status",
            "attempt": 1,
            "placement": "p",
            "snapshot": None,
            "local": mark,
            "peer": mark,
            "remote": None,
        }

    checker = LifeChecker()
    checker.read(
        [
            (0.0, "begins", {"workers": 1, "copies": 1, "keep": 3, "prove": 0}),
            (1.0, "attempt", {"number": 1, "version": None, "heard": ()}),
        ]
    )
    checker.read(
        [(2.0, "verdict", verdict(7)), (3.0, "verdict", verdict(None)), (4.0, "verdict", verdict(7))]
    )
    assert not checker.broken
    checker.read([(5.0, "verdict", verdict(6))])
    assert [each.promise for each in checker.broken] == ["watermarks never fall"] * 2


def test_version_that_newer_ones_have_taken_the_place_of_may_be_told_by_an_operator_that_was_stopped() -> (
    None
):
    checker = LifeChecker()
    begin = {"workers": 1, "copies": 1, "keep": 1, "prove": 0}
    checker.read([(0.0, "begins", begin), (1.0, "attempt", {"number": 1, "version": None, "heard": ()})])
    checker.manifests["manifests/000000000009-1.json"] = []
    told = {"by": "status", "attempt": 1, "placement": "p", "snapshot": None, "local": None, "peer": None}
    checker.read([(2.0, "verdict", {**told, "remote": Mark(6, 1)})])
    assert not checker.broken
    checker.read([(3.0, "verdict", {**told, "remote": Mark(12, 1)})])
    assert [each.promise for each in checker.broken] == ["complete is complete"]


@pytest.mark.cluster
@pytest.mark.extended
def test_job_comes_through_ten_strikes_bit_for_bit(tmp_path: Path) -> None:
    told: list[str] = []
    plan = campaign.Plan(
        seed=3, injections=10, seconds=1e9, workers=2, pace=0.05, rest=(0.0, 0.2), stopped=3.0
    )
    course = campaign.run(plan, tmp_path, told.append)
    assert not course.broken, "\n".join(told)
    assert len(course.strikes) >= 8, "\n".join(told)
    assert course.compared > 2 * course.steps
    report.write(course, tmp_path)
    assert "0 promises broken" in (tmp_path / "chaos.md").read_text()
