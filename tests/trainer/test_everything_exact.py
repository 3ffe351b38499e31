"""Promise: whatever a script draws from, averages or schedules by, a run that is cut goes on bit for bit.

Each loop is run whole in one life, and again in two: the second has other seeds and other weights until it restores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tiercheck import Checkpointer, ResumableSampler

Life = tuple[Callable[[], float], Checkpointer]
Build = Callable[[Path], Life]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def losses_of(build: Build, folder: Path, until: int, seed: int) -> dict[int, str]:
    """The losses of one life, by step, as bits. It ends without a word: what is not handed over by then is lost."""
    seed_all(seed)
    update, checkpointer = build(folder)
    losses = {}
    for step in range(checkpointer.restore() + 1, until + 1):
        loss = update()
        checkpointer.step(loss)
        losses[step] = loss.hex()
    checkpointer.close()
    return losses


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))


def generators_of_the_users_own(folder: Path) -> Life:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = torch.Generator().manual_seed(torch.initial_seed() % 1000)
    kinds = [numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64]
    augment = {kind.__name__: numpy.random.Generator(kind(torch.initial_seed() % 1000)) for kind in kinds}
    legacy = numpy.random.RandomState(torch.initial_seed() % 1000)

    def update() -> float:
        x = torch.randn(16, 8, generator=own) + random.random() + float(numpy.random.rand())
        x += sum(float(each.standard_normal()) for each in augment.values()) + float(legacy.rand())
        return descend(model(x).square().mean(), optimizer)

    state = {"own": own, "legacy": legacy, **augment}
    return update, Checkpointer(model, optimizer, state=state, folder=folder, every=1)


def descend(loss: Tensor, *optimizers: torch.optim.Optimizer) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def schedules(folder: Path) -> Life:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def update() -> float:
        loss = descend((model(torch.randn(16, 8)) - 1).square().mean(), optimizer)
        scheduler.step()
        plateau.step(loss)
        return loss

    state = {"scheduler": scheduler, "plateau": plateau}
    return update, Checkpointer(model, optimizer, state=state, folder=folder, every=1)


def gradient_scaler_and_accumulation(folder: Path) -> Life:
    """Two micro-batches for each update; some updates overflow, and are skipped by the scaler."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    order = ResumableSampler(64, 8, seed=3)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(9))
    batches = endless(order)
    counted = {"updates": 0}

    def update() -> float:
        optimizer.zero_grad()
        total = 0.0
        for _ in range(2):
            loss = (model(data[next(batches)]) - 1).square().mean() / 2
            scaler.scale(loss).backward()
            total += loss.item()
        counted["updates"] += 1
        if counted["updates"] in (4, 8):
            next(iter(model.parameters())).grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        return total

    state = {"scaler": scaler, "order": order, "counted": counted}
    return update, Checkpointer(model, optimizer, state=state, folder=folder, every=1)


def endless(order: ResumableSampler) -> Iterator[Any]:
    while True:
        yield from order.follow(order)


def averaged_weights(folder: Path) -> Life:
    """The average is trained against, so that it would be seen if one bit of it was lost."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    teacher = nn.Linear(8, 1)

    def update() -> float:
        x = torch.randn(16, 8)
        target = (average(x) + teacher(x)).detach()
        loss = descend((model(x) - target - 1).square().mean(), optimizer)
        average.update_parameters(model)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.9).add_(0.1 * loss)
        return loss

    state = {"average": average, "teacher": teacher}
    return update, Checkpointer(model, optimizer, state=state, folder=folder, every=1)


def two_optimizers_and_frozen_parts(folder: Path) -> Life:
    make, judge = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1)), net()
    judge[0].weight.requires_grad_(False)
    first = torch.optim.Adam(make.parameters(), lr=1e-2)
    second = torch.optim.RMSprop([p for p in judge.parameters() if p.requires_grad], lr=1e-2)

    def update() -> float:
        fake = make(torch.randn(16, 4))
        real = torch.randn(16, 8)
        judged = descend((judge(real) - 1).square().mean() + judge(fake.detach()).square().mean(), second)
        return judged + descend((judge(fake) - 1).square().mean(), first)

    both = nn.ModuleDict({"make": make, "judge": judge})
    return update, Checkpointer(both, [first, second], folder=folder, every=1)


@pytest.mark.parametrize(
    "build",
    [
        generators_of_the_users_own,
        schedules,
        gradient_scaler_and_accumulation,
        averaged_weights,
        two_optimizers_and_frozen_parts,
    ],
    ids=lambda build: build.__name__,
)
@pytest.mark.parametrize("cut", [1, 5])
def test_cut_run_has_the_same_losses(tmp_path: Path, build: Build, cut: int) -> None:
    whole = losses_of(build, tmp_path / "whole", 9, seed=1)
    begun = losses_of(build, tmp_path / "cut", cut, seed=1)
    ended = losses_of(build, tmp_path / "cut", 9, seed=2)
    assert [*begun, *ended] == [*whole]
    assert {**begun, **ended} == whole


def test_averaged_weights_lie_in_the_slot_as_tensors_of_their_own(tmp_path: Path) -> None:
    from safetensors import safe_open

    losses_of(averaged_weights, tmp_path, 2, seed=1)
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
        descend(model(torch.randn(4, 8)).square().mean(), optimizer)
        checkpointer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        Checkpointer(model, optimizer, state={"average": average}, folder=tmp_path) as again,
        pytest.raises(ValueError, match=r"state/average/.* is only in the model"),
    ):
        again.restore()
    assert all(map(torch.equal, before, model.parameters()))


def test_every_cuda_device_draws_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, of which this process uses the second, then the first: the one it uses now is what it was."""
    from tiercheck.trainer import user_state

    states = [torch.tensor([1]), torch.tensor([2])]
    current = 1
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(cuda, "get_rng_state", lambda device=None: states[current if device is None else device])
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
