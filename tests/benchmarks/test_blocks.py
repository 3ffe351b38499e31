"""A step's length is the mean of many in a row, which hides no wait and leaves out no snapshot."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.gpu_acceptance.steps import longer, mean_step


class Device:
    """Work is given to it at once, takes long, and is done when somebody waits for it."""

    def __init__(self) -> None:
        self.now = self.owed = 0.0
        self.waits = 0

    def settle(self) -> None:
        self.waits += 1
        self.now, self.owed = self.now + self.owed, 0.0

    def clock(self) -> float:
        return self.now


def test_device_is_waited_for_at_the_ends_of_a_block_and_never_within() -> None:
    device = Device()
    device.owed = 100.0  # of those before

    def step() -> None:
        device.owed += 1.0

    assert mean_step(step, 24, device.settle, device.clock) == 1.0
    assert device.waits == 2


def test_what_one_step_in_three_costs_is_in_the_mean() -> None:
    device, number = Device(), itertools.count(1)

    def step() -> None:
        device.now += 1.0 + (0.3 if next(number) % 3 == 0 else 0.0)  # a median would be 1.0

    assert mean_step(step, 24, device.settle, device.clock) == pytest.approx(1.1)


def test_blocks_are_compared_in_pairs() -> None:
    assert longer([1.0, 2.0, 4.0], [1.1, 2.1, 8.0]) == pytest.approx(0.1)
