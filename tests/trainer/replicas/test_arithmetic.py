"""Promise: what makes a resumed run round otherwise, and is in no version, is told once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tiercheck import Checkpointer


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def train(folder: Path, steps: int, zero: str = "at the beginning") -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Checkpointer(model, optimizer, folder=folder, every=1) as checkpointer:
        for _ in range(checkpointer.restore(), steps):
            if zero.startswith("at the beginning"):
                optimizer.zero_grad(set_to_none="in place" not in zero)
            for _ in range(2):
                model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            if zero == "at the end":
                optimizer.zero_grad()
            checkpointer.step()


def told(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(kind)]


def test_another_number_of_threads_and_another_precision_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    train(tmp_path, 2)
    torch.set_num_threads(threads + 1)
    torch.set_float32_matmul_precision("high")
    train(tmp_path, 5)
    (text,) = told(caplog, "Arithmetic")
    assert f"torch.get_num_threads is {threads + 1}, was {threads}" in text
    assert "torch.get_float32_matmul_precision is high, was highest" in text


def test_a_run_that_is_resumed_as_it_was_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 2)
    train(tmp_path, 5)
    assert not told(caplog, "")


@pytest.mark.parametrize("zero", ["at the beginning", "at the beginning, in place", "at the end", "never"])
def test_gradients_that_are_kept_from_step_to_step_are_told_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, zero: str
) -> None:
    train(tmp_path, 5, zero)
    assert len(told(caplog, "Gradients")) == (zero == "never")
