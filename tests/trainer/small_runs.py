"""Makes a small but not simple run: dropout, batch norm, tied weights, a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck import Checkpointer

MakeOptimizer = Callable[[nn.Module], Optimizer]


class Tied(nn.Module):
    """The first and the last layer share their weight; batch norm has buffers that move in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Run:
    """Everything that a training script owns."""

    def __init__(self, make_optimizer: MakeOptimizer, folder: Path, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.model = Tied()
        self.optimizer = make_optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.data = {"position": 0}
        self.checkpointer = Checkpointer(
            self.model,
            self.optimizer,
            state={"scheduler": self.scheduler, "data": self.data},
            folder=folder,
            **{"every": 1, **options},
        )

    def update(self) -> float:
        """One optimizer step, without its end."""
        shift = self.data["position"] + random.random() + float(numpy.random.rand())
        self.data["position"] += 1
        loss = (self.model(torch.randn(16, 8)) - shift).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def train(self, steps: int) -> list[str]:
        """Losses, exactly as bits."""
        losses = []
        for _ in range(steps):
            loss = self.update()
            self.checkpointer.step(loss)
            losses.append(loss.hex())
        return losses

    def state(self) -> dict[str, Tensor]:
        """A copy of all tensors, by the names they have in a slot."""
        tensors = {f"model/{name}": value.clone() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer0/{name}/{key}"] = value.clone()
        return tensors


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def saved_run(folder: Path, steps: int = 1) -> Run:
    """A run that has saved so many steps, and is over."""
    run = Run(adamw, folder)
    run.train(steps)
    run.checkpointer.close()
    return run


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name
