"""A callback that keeps something of its own and does not show it is in the log, once."""

from __future__ import annotations

import pytest
import torch

from tiercheck.integrations.callbacks import CallbackWatch


class Average:
    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.count = 0


class Constant:
    def __init__(self) -> None:
        self.rate, self.logger = 0.1, object()


def test_callback_whose_attributes_change_is_named_once_with_what_to_give_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, average, constant = CallbackWatch("state_dict"), Average(), Constant()
    for step in range(4):
        watch.look([average, constant])
        average.count = step
    assert caplog.text.count("Callback: ") == 1
    assert "Average.count changes, and is in no version: give the callback state_dict" in caplog.text


@pytest.mark.parametrize("change", ["filled", "replaced", "in place"])
def test_tensors_that_a_callback_keeps_are_looked_at(caplog: pytest.LogCaptureFixture, change: str) -> None:
    watch, average = CallbackWatch("state_dict"), Average()
    average.shadow = {} if change == "filled" else {"weight": torch.zeros(2)}
    watch.look([average])
    if change == "in place":
        average.shadow["weight"] += 1
    else:
        average.shadow = {"weight": torch.ones(2)}
    watch.look([average])
    assert "Average.shadow changes" in caplog.text
