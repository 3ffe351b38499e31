"""Runs one rank of a script whose ranks are not alike, or whose optimizer is spread over them.

`torchrun rank_scripts.py FOLDER KIND STEPS` prints what it ends with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from tiercheck import Checkpointer

WIDTH = 8
THAWED = 2
"""Steps after which a group is added."""


def experts(number: int) -> tuple[nn.Module, Optimizer, Callable[[int], Tensor]]:
    """Each rank has experts of its own under the same names; the rest is averaged by hand."""
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(50 + number)
    model = nn.ModuleDict({"shared": shared, "experts": nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def update(step: int) -> Tensor:
        loss: Tensor = model["experts"][0](shared(torch.randn(4, WIDTH))).square().mean()  # type: ignore[index]
        loss.backward()
        for parameter in shared.parameters():
            dist.all_reduce(parameter.grad)
        return loss

    return model, optimizer, update


def alike(number: int) -> tuple[nn.Module, Optimizer, Callable[[int], Tensor]]:
    """All is averaged by hand, but for the statistics of batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def update(step: int) -> Tensor:
        loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss

    return model, optimizer, update


def zero(number: int) -> tuple[nn.Module, Optimizer, Callable[[int], Tensor]]:
    """Layers are thawed on the way, and thawed once more by a script that was restored later."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = DistributedDataParallel(layers)
    optimizer = ZeroRedundancyOptimizer(layers[0].parameters(), AdamW, lr=1e-2)
    done = []

    def update(step: int) -> Tensor:
        if step >= THAWED and not done:
            done.append(optimizer.add_param_group({"params": layers[1:].parameters(), "lr": 1e-3}))
        loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        return loss

    return model, optimizer, update


def main(folder: Path, kind: str, steps: int) -> None:
    dist.init_process_group("gloo")
    number = dist.get_rank()
    model, optimizer, update = {"experts": experts, "alike": alike, "zero": zero}[kind](number)
    losses = {}
    with Checkpointer(model, optimizer, folder=folder / "checkpoints", every=1) as checkpointer:
        try:
            first = checkpointer.restore()
        except ValueError as error:
            print(json.dumps({"refused": str(error)}), flush=True)
            return
        for step in range(first, steps):
            torch.manual_seed(10 * step + number)
            optimizer.zero_grad()
            loss = update(step)
            optimizer.step()
            checkpointer.step(loss)
            checkpointer.wait()
            losses[step + 1] = float(loss.detach()).hex()
    dist.barrier()
    groups = [[group["lr"], len(group["params"])] for group in optimizer.param_groups]
    print(json.dumps({"first": first, "losses": losses, "groups": groups}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
