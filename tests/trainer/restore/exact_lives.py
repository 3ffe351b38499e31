"""Runs one life of a loop with everything that a script draws from, averages or schedules by.

`python exact_lives.py NAME FOLDER SEED KILLED` prints losses, as bits.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tiercheck import Checkpointer, ResumableSampler

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler
except ImportError:
    StatefulDataLoader = None

Between = Callable[[], None]
"""Called in the middle of an update, where it is worst to be killed."""
Life = tuple[Callable[[Between], float], Checkpointer]
STEPS, KILLED = 9, (3, 7)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))


def descend(between: Between, loss: Tensor, *optimizers: torch.optim.Optimizer) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    between()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def generators(folder: Path) -> Life:
    """Those of torch, Python and numpy, and the user's own."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = torch.Generator().manual_seed(torch.initial_seed() % 1000)
    kinds = [numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64]
    augment = {kind.__name__: numpy.random.Generator(kind(torch.initial_seed() % 1000)) for kind in kinds}
    legacy = numpy.random.RandomState(torch.initial_seed() % 1000)

    def update(between: Between) -> float:
        x = torch.randn(16, 8, generator=own) + random.random() + float(numpy.random.rand()) + torch.rand(())
        x += sum(float(each.standard_normal()) for each in augment.values()) + float(legacy.rand())
        return descend(between, model(x).square().mean(), optimizer)

    state = {"own": own, "legacy": legacy, **augment}
    return update, Checkpointer(model, optimizer, state=state, folder=folder, every=1)


def schedules(folder: Path) -> Life:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def update(between: Between) -> float:
        loss = descend(between, (model(torch.randn(16, 8)) - 1).square().mean(), optimizer)
        scheduler.step()
        plateau.step(loss)
        return loss

    state = {"scheduler": scheduler, "plateau": plateau}
    return update, Checkpointer(model, optimizer, state=state, folder=folder, every=1)


def gradient_scaler_and_accumulation(folder: Path) -> Life:
    """Two micro-batches for each update, and killed between them; some updates overflow, and are skipped by
    the scaler."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    order = ResumableSampler(64, 8, seed=3)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(9))
    batches = endless(order)
    counted = {"updates": 0}

    def update(between: Between) -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(2):
            loss = (model(data[next(batches)]) - 1).square().mean() / 2
            scaler.scale(loss).backward()
            total += loss.item()
            if not micro:
                between()
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

    def update(between: Between) -> float:
        x = torch.randn(16, 8)
        target = (average(x) + teacher(x)).detach()
        loss = descend(between, (model(x) - target - 1).square().mean(), optimizer)
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

    def update(between: Between) -> float:
        fake = make(torch.randn(16, 4))
        real = torch.randn(16, 8)
        loss = (judge(real) - 1).square().mean() + judge(fake.detach()).square().mean()
        judged = descend(lambda: None, loss, second)
        return judged + descend(between, (judge(fake) - 1).square().mean(), first)

    both = nn.ModuleDict({"make": make, "judge": judge})
    return update, Checkpointer(both, [first, second], folder=folder, every=1)


def loader_with_a_resumable_sampler(folder: Path, workers: int = 2) -> Life:
    """Its workers fetch ahead of the training; epochs of six batches."""
    order = ResumableSampler(24, 4, seed=1)
    return _with(
        DataLoader(_samples(), batch_sampler=order, num_workers=workers),
        order.follow,
        {"order": order},
        folder,
    )


def stateful_data_loader(folder: Path, workers: int = 0) -> Life:
    """torchdata's; with generators of its own for order and workers, as docs/start/training-scripts.md has
    it."""
    order = RandomSampler(_samples(), generator=torch.Generator().manual_seed(1))
    loader = StatefulDataLoader(
        _samples(), batch_size=4, sampler=order, generator=torch.Generator(), num_workers=workers
    )
    return _with(loader, iter, {"loader": loader}, folder)


def stateful_data_loader_with_workers(folder: Path) -> Life:
    return stateful_data_loader(folder, workers=2)


def _samples() -> TensorDataset:
    return TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(9)))


def _with(loader: Any, epoch: Callable[[Any], Iterator[Any]], state: dict[str, Any], folder: Path) -> Life:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def forever() -> Iterator[Tensor]:
        while True:
            for (x,) in epoch(loader):
                yield x

    batches = forever()

    def update(between: Between) -> float:
        return descend(between, (model(next(batches)) - torch.rand(())).square().mean(), optimizer)

    return update, Checkpointer(model, optimizer, state=state, folder=folder, every=1)


LIVES: dict[str, Callable[[Path], Life]] = {
    build.__name__: build
    for build in (
        generators, schedules, gradient_scaler_and_accumulation, averaged_weights,
        two_optimizers_and_frozen_parts,
        loader_with_a_resumable_sampler, stateful_data_loader, stateful_data_loader_with_workers,
    )
}  # fmt: skip
NEED_TORCHDATA = {"stateful_data_loader", "stateful_data_loader_with_workers"}


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main(name: str, folder: Path, seed: int, killed: int) -> None:
    """First what step it begins after; then each step and its loss. `killed`: the step in whose middle it
    ends by SIGKILL."""
    seed_all(seed)
    update, checkpointer = LIVES[name](folder)
    first = checkpointer.restore()
    say(first=first)
    for step in range(first + 1, STEPS + 1):

        def between(step: int = step) -> None:
            if step == killed:
                checkpointer.wait()  # so that it is known which version is the newest
                os.kill(os.getpid(), signal.SIGKILL)

        loss = update(between)
        checkpointer.step(loss)
        say(step=step, loss=loss.hex())
    checkpointer.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
