"""Containers that keep ending are held back as real kubelets hold them back."""

from __future__ import annotations

import pytest

from tiercheck_local.node.process import BackOff, go_duration


def test_first_end_costs_nothing_and_every_further_one_twice_the_last_up_to_five_minutes() -> None:
    container = BackOff()
    assert [container.after(life=1.0) for _ in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]


def test_life_of_more_than_ten_minutes_makes_the_next_end_the_first_again() -> None:
    container = BackOff()
    assert [container.after(life) for life in (1, 1, 599, 601, 1)] == [0, 10, 20, 0, 10]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "500ms"), (10, "10s"), (40, "40s"), (80, "1m20s"), (160, "2m40s"), (300, "5m0s")],
)
def test_waits_are_written_as_kubelets_write_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text
