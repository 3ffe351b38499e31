"""Promise: a loop over `batches` goes on at its next batch with equal losses, or is warned."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tiercheck import Checkpointer, ResumableSampler

DATA = TensorDataset(torch.arange(20.0)[:, None])
STEPS = 12
"""Of five in each epoch."""
Loader = Callable[[], tuple[Any, dict[str, Any]]]
Line = tuple[int, list[float], float]


def ordered() -> tuple[Any, dict[str, Any]]:
    order = ResumableSampler(len(DATA), 4, seed=0)
    return DataLoader(DATA, batch_sampler=order), {"order": order}


def stateful() -> tuple[Any, dict[str, Any]]:
    """Its iteration draws a seed from the random numbers that the model's dropout draws from."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(DATA, 4, shuffle=True)
    return loader, {"loader": loader}


def plain() -> tuple[Any, dict[str, Any]]:
    return DataLoader(DATA, 4, shuffle=True), {}


def life(folder: Path, make: Loader, steps: int, seed: int = 0) -> list[Line]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, state = make()
    lines = []
    with Checkpointer(model, optimizer, state=state, folder=folder, every=1) as checkpointer:
        for step, (x,) in checkpointer.batches(loader, STEPS):
            with step:
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpointer.step(loss)
                lines.append((checkpointer.step_number, x[:, 0].tolist(), loss.item()))
            checkpointer.wait()
            if len(lines) == steps:
                break
    return lines


@pytest.mark.parametrize("make", [ordered, stateful])
def test_loop_goes_on_in_the_middle_of_an_epoch_and_at_its_end(
    make: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torchdata")
    whole = life(tmp_path / "whole", make, STEPS)
    cut = [life(tmp_path / "cut", make, steps, seed) for seed, steps in enumerate((3, 2, STEPS))]
    assert [line for part in cut for line in part] == whole
    assert "Data: " not in caplog.text


def test_loader_without_a_position_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life(tmp_path, plain, 1)
    assert caplog.text.count("Data: `batches` begins this loader anew after a restore") == 1


def test_loop_of_each_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    """Where nothing was restored, the loader's seed is one more random number of the script's."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, 4, shuffle=True)
    orders = []
    with Checkpointer(model, optimizer, folder=tmp_path) as checkpointer:
        for total in (5, 10, 15):
            order = []
            for step, (x,) in checkpointer.batches(loader, total):
                with step:
                    optimizer.step()
                    checkpointer.step()
                order += x[:, 0].tolist()
            orders.append(order)
    assert len({*map(tuple, orders)}) == 3


def test_step_that_the_script_keeps_or_sends_is_a_plain_number(tmp_path: Path) -> None:
    """As that of a loop over `range` is: in `state`, in a checkpoint of its own, in a message to a rank."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[Any, Any] = {}
    for total in (2, 3):
        state = {"seen": seen}
        with Checkpointer(model, optimizer, state=state, folder=tmp_path, every=1) as checkpointer:
            for step in checkpointer.steps(total):
                with step:
                    optimizer.step()
                    seen |= {"last": step, step: [step]}
                    checkpointer.step()
                for same in (pickle.loads(pickle.dumps(step)), copy.deepcopy({"of": step})["of"]):
                    assert type(same) is int
                    assert same == step
        assert checkpointer.skipped == 0
        seen = {}
    with Checkpointer(model, optimizer, state={"seen": seen}, folder=tmp_path) as checkpointer:
        assert checkpointer.restore() == 3
    assert seen == {"last": 2, 0: [0], 1: [1], 2: [2]}
    assert {*map(type, (seen["last"], *seen, *seen[1]))} == {int, str}


def test_loader_without_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the loader has no batch"):
        life(tmp_path, lambda: ([], {}), 1)
