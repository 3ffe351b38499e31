"""Promise: a killed run goes on bit for bit, whatever its script draws or averages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.lives import Lives
from tests.trainer.restore.exact_lives import (
    KILLED,
    LIVES,
    NEED_TORCHDATA,
    STEPS,
    averaged_weights,
    descend,
    net,
)
from tiercheck import Checkpointer

SCRIPT = Path(__file__).parent / "exact_lives.py"


@pytest.mark.parametrize("name", LIVES)
def test_run_that_was_killed_twice_in_the_middle_of_an_update_has_the_same_losses(
    lives: Lives, tmp_path: Path, name: str
) -> None:
    """Each life begins with other seeds and other weights than the one before it."""
    if name in NEED_TORCHDATA and importlib.util.find_spec("torchdata") is None:
        pytest.skip("torchdata is not installed")

    def live(place: str, seed: int, killed: int | None) -> tuple[int, dict[int, str]]:
        argv = [SCRIPT, name, tmp_path / place, seed, killed or 0]
        ((begun, *steps),) = lives.run([], argv, kill_at=killed)
        return begun["first"], {line["step"]: line["loss"] for line in steps}

    _, whole = live("whole", 1, None)
    assert [*whole] == list(range(1, STEPS + 1))
    cut = [live("cut", seed, killed) for seed, killed in enumerate((*KILLED, None), 1)]
    assert [first for first, _ in cut] == [0, *(step - 1 for step in KILLED)]
    assert {step: loss for _, losses in cut for step, loss in losses.items()} == whole


def test_averaged_weights_lie_in_the_slot_as_tensors_of_their_own(tmp_path: Path) -> None:
    from safetensors import safe_open

    update, checkpointer = averaged_weights(tmp_path)
    with checkpointer:
        checkpointer.restore()
        checkpointer.step(update(lambda: None))
    newest = max(tmp_path.rglob("*.safetensors"))
    with safe_open(newest, "pt") as slot:
        names = {name for name in slot.keys() if name.startswith("state/")}  # noqa: SIM118
    assert "state/average/module.0.weight" in names
    assert "state/average/n_averaged" in names
    assert "state/teacher/weight" in names


def test_version_without_the_averaged_weights_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, average = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, optimizer, folder=tmp_path, every=1) as checkpointer:
        checkpointer.restore()
        descend(lambda: None, model(torch.randn(4, 8)).square().mean(), optimizer)
        checkpointer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        Checkpointer(model, optimizer, state={"average": average}, folder=tmp_path) as again,
        pytest.raises(ValueError, match=r"state/average/.* is only in the model"),
    ):
        again.restore()
    assert all(map(torch.equal, before, model.parameters()))


def test_every_cuda_device_draws_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, of which this process uses the second, then the first: the one it uses now is what it
    was.
    """
    from tiercheck.trainer.state import user_state

    states = [torch.tensor([1]), torch.tensor([2])]
    current = 1
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(
        cuda, "get_rng_state", lambda device=None: states[current if device is None else device]
    )
    monkeypatch.setattr(cuda, "get_rng_state_all", lambda: list(states))

    def put(state: Tensor, device: int | None = None) -> None:
        states[current if device is None else device] = state

    monkeypatch.setattr(cuda, "set_rng_state", put)
    taken = user_state.unpack(user_state.pack({}, {}))["random"]
    states[:] = [torch.tensor([7]), torch.tensor([8])]
    user_state.set_random_state(taken)
    assert [int(state) for state in states] == [1, 2]
    states[:], current = [torch.tensor([7])], 0
    user_state.set_random_state(taken)
    assert [int(state) for state in states] == [2]
