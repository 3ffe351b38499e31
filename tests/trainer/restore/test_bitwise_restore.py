"""Promise: after a restore or a kill, a run has the bits of one never interrupted, whatever it draws."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tests.lives import Lives, Said
from tests.trainer.deltas.replaying import Script, loop, mean_square, survives_from_a_snapshot
from tests.trainer.restore.exact_lives import (
    KILLED,
    LIVES,
    NEED_TORCHDATA,
    STEPS,
    averaged_weights,
    descend,
    net,
)
from tests.trainer.small_runs import MakeOptimizer, Run, adamw, same_bits, saved_run
from tests.trainer.torch_limits import needs_fsdp2_on_cpus
from tiercheck import Checkpointer
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.restore.load import DifferentState
from tiercheck.trainer.state import user_state

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "sgd-momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    "adam-amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "adamw-foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "adamw-fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "adamw-tensor-lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True),
    "adamw-two-groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 1e-3},
        ]
    ),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_run_continues_with_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    whole = Run(make, tmp_path / "whole")
    expected = whole.train(9)

    first = Run(make, tmp_path / "cut")
    losses = first.train(5)
    first.checkpointer.close()

    second = Run(
        make, tmp_path / "cut", seed=99
    )  # other parameters, other random numbers: all must be replaced
    assert second.checkpointer.restore() == 5
    losses += second.train(4)
    assert losses == expected
    same_bits(second.state(), whole.state())
    assert second.data == {"position": 9}
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_second_restore_in_a_process_fills_the_moments_where_they_are(tmp_path: Path) -> None:
    run = Run(adamw, tmp_path)
    run.train(2)
    saved = run.state()
    moments = {parameter: dict(state) for parameter, state in run.optimizer.state.items()}
    run.checkpointer.wait()
    for state in moments.values():
        for value in state.values():
            value.add_(1)
    run.checkpointer.close()
    with Checkpointer(run.model, run.optimizer, state={"data": run.data}, folder=tmp_path) as checkpointer:
        assert checkpointer.restore() == 2
    for parameter, state in moments.items():
        assert all(run.optimizer.state[parameter][key] is value for key, value in state.items())
    same_bits(run.state(), saved)


def test_moments_that_somebody_shares_are_not_filled_where_they_are(tmp_path: Path) -> None:
    run = Run(adamw, tmp_path)
    run.train(2)
    run.checkpointer.close()
    parameters = list(run.optimizer.state)
    expected = [run.optimizer.state[parameter]["exp_avg"].clone() for parameter in parameters]
    for parameter in parameters:
        shared = torch.zeros(2, *parameter.shape)
        run.optimizer.state[parameter]["exp_avg"] = shared[0]
        run.optimizer.state[parameter]["exp_avg_sq"] = parameter.detach()
    with Checkpointer(run.model, run.optimizer, state={"data": run.data}, folder=tmp_path) as checkpointer:
        assert checkpointer.restore() == 2
    for parameter, before in zip(parameters, expected, strict=True):
        state = run.optimizer.state[parameter]
        assert torch.equal(state["exp_avg"], before)
        assert state["exp_avg_sq"].data_ptr() != parameter.data_ptr()
        assert state["exp_avg"].untyped_storage().nbytes() == before.nbytes


def test_nothing_saved_is_a_fresh_start(tmp_path: Path) -> None:
    run = Run(adamw, tmp_path)
    before = run.state()
    assert run.checkpointer.restore() == 0
    same_bits(run.state(), before)


def test_several_optimizers_and_a_frozen_parameter(tmp_path: Path) -> None:
    def build() -> Script:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].requires_grad_(False)
        optimizers = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.5), adamw(model[2])
        return loop(model, *optimizers, loss_of=mean_square(2, 4))

    whole, again = survives_from_a_snapshot(build, tmp_path)
    same_bits(again.tensors(), whole.tensors())


def test_low_precision_parameters_and_channels_last_keep_their_bits_and_order(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(2, 2).to(torch.bfloat16))
        return model.to(memory_format=torch.channels_last)

    model = build()
    optimizer = adamw(model)
    with Checkpointer(model, optimizer, folder=tmp_path, every=1) as checkpointer:
        (
            model[0](torch.randn(1, 3, 4, 4)).sum() + model[1](torch.ones(1, 2, dtype=torch.bfloat16)).sum()
        ).backward()
        optimizer.step()
        checkpointer.step()
    again = build()
    optimizer_again = adamw(again)
    with Checkpointer(again, optimizer_again, folder=tmp_path) as checkpointer_again:
        assert checkpointer_again.restore() == 1
    same_bits(again.state_dict(), model.state_dict())
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        same_bits(optimizer_again.state[new], optimizer.state[old])
        assert optimizer_again.state[new]["exp_avg"].stride() == optimizer.state[old]["exp_avg"].stride()


def test_checkpoint_of_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    saved_run(tmp_path)
    other = nn.Linear(3, 3)
    before = other.weight.detach().clone()
    checkpointer = Checkpointer(other, adamw(other), folder=tmp_path)
    with pytest.raises(DifferentState, match="only in"):
        checkpointer.restore()
    assert torch.equal(other.weight, before)


def test_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    saved_run(tmp_path)
    other = Run(OPTIMIZERS["sgd"], tmp_path)
    with pytest.raises(DifferentState, match="AdamW"):
        other.checkpointer.restore()


def test_state_that_would_need_code_to_read_is_refused_before_training(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(model, adamw(model), state={"data": {"object": object()}}, folder=tmp_path)
    with pytest.raises(TypeError, match=r"state\['data'\]/object: a builtins\.object could not be read back"):
        checkpointer.restore()


def test_state_that_outgrows_its_place_is_still_saved(tmp_path: Path) -> None:
    run = Run(adamw, tmp_path)
    run.train(1)
    run.data["seen"] = list(range(100_000))  # more than the headroom
    run.train(1)
    run.checkpointer.close()
    again = Run(adamw, tmp_path)
    assert again.checkpointer.restore() == 2
    assert again.data["seen"] == list(range(100_000))


def test_missing_user_state_is_named(tmp_path: Path) -> None:
    saved_run(tmp_path)
    again = Run(adamw, tmp_path)
    again.checkpointer._trained.state = {"sampler": {}}
    with pytest.raises((KeyError, RestoreError), match="sampler"):
        again.checkpointer.restore()


EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"
UNTIL, EVERY = 40, 4
SMALL = f"--steps {UNTIL} --layers 1 --width 32 --batch 2 --context 16 --every {EVERY}".split()


def run(lives: Lives, folder: Path, kill_at: int | None = None) -> Said:
    """What rank 0 of two said."""
    words = [EXAMPLE, *SMALL, "--folder", folder]
    said, _ = lives.run(["torch.distributed.fsdp", "tiercheck"], words, ranks=2, kill_at=kill_at)
    return said


@needs_fsdp2_on_cpus
def test_killed_sharded_run_ends_with_the_same_losses_and_parameters(lives: Lives, tmp_path: Path) -> None:
    whole = run(lives, tmp_path / "whole")
    run(lives, tmp_path / "cut", kill_at=10)
    resumed = run(lives, tmp_path / "cut")
    first = resumed[0]["step"]
    # After the newest version of which every rank's copy was complete.
    assert first % EVERY == 1 < first < UNTIL
    losses = {line["step"]: line["loss_hex"] for line in whole if "step" in line}
    assert list(losses) == list(range(1, UNTIL + 1))
    assert {line["step"]: line["loss_hex"] for line in resumed if "step" in line} == {
        step: loss for step, loss in losses.items() if step >= first
    }
    assert resumed[-1]["digest"] == whole[-1]["digest"]


@pytest.mark.parametrize("name", LIVES)
def test_run_that_was_killed_twice_in_the_middle_of_an_update_has_the_same_losses(
    lives: Lives, tmp_path: Path, name: str
) -> None:
    """Each life begins with other seeds and other weights than the one before it."""
    if name in NEED_TORCHDATA and importlib.util.find_spec("torchdata") is None:
        pytest.skip("torchdata is not installed")

    def live(place: str, seed: int, killed: int | None) -> tuple[int, dict[int, str]]:
        argv = [Path(__file__).with_name("exact_lives.py"), name, tmp_path / place, seed, killed or 0]
        ((begun, *steps),) = lives.run([], argv, kill_at=killed)
        return begun["first"], {line["step"]: line["loss"] for line in steps}

    _, whole = live("whole", 1, None)
    assert [*whole] == list(range(1, STEPS + 1))
    cut = [live("cut", seed, killed) for seed, killed in enumerate((*KILLED, None), 1)]
    assert [first for first, _ in cut] == [0, *(step - 1 for step in KILLED)]
    assert {step: loss for _, losses in cut for step, loss in losses.items()} == whole


def test_averaged_weights_lie_in_the_slot_as_tensors_of_their_own(tmp_path: Path) -> None:
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
