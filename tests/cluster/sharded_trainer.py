"""Trains a model sharded by FSDP2, and tells its whole state at every step and restore.

It tells which samples it drew, too.

The first LIVES attempts (1 if not given) train until they are hit, later ones some steps beyond where they
came back to. While the file GATE exists the first attempt stands still 10 steps after a multiple of 20.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tiercheck import Checkpointer, ResumableSampler

TAIL = 12
SAMPLES, BATCH = 2**20, 12


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of parameters and optimizer state, gathered."""
    seen = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        tensors = {"": parameter, **optimizer.state.get(parameter, {})}
        for kind, value in sorted(tensors.items()):
            if isinstance(value, torch.Tensor):
                full = value.full_tensor() if isinstance(value, DTensor) else value
                seen.update(f"{name} {kind}".encode())
                seen.update(full.detach().contiguous().numpy().tobytes())
    return seen.hexdigest()


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 130), nn.Tanh(), nn.Linear(130, 5))


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def sample(index: int) -> torch.Tensor:
    return torch.randn(9, generator=torch.Generator().manual_seed(index))


def main() -> None:
    world, attempt = int(os.environ["WORLD_SIZE"]), int(os.environ["TIERCHECK_ATTEMPT"])
    gate = Path(os.environ.get("GATE", "/nonexistent"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7 * attempt)  # a restore has to bring everything
    model = make_model()
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = ResumableSampler(SAMPLES, BATCH, shuffle=False)
    with Checkpointer(model, optimizer, state={"order": order}) as checkpointer:
        start = checkpointer.restore()
        if start:
            say(
                restored=start,
                attempt=attempt,
                world=world,
                whole=whole(model, optimizer),
                samples=order.position,
            )
        last = start + TAIL if attempt > int(os.environ.get("LIVES", "1")) else 10**9
        for step, drawn in zip(range(start + 1, last + 1), order.follow(order), strict=False):
            data = torch.stack([sample(index) for index in drawn])
            loss = (model(data) - 1.0).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # Before it is saved: who comes back to it, and was not told of it, could compare nothing.
            say(
                step=step,
                attempt=attempt,
                world=world,
                loss=float(loss),
                whole=whole(model, optimizer),
                drawn=drawn,
            )
            checkpointer.step(loss=float(loss))
            time.sleep(0.05)
            while attempt == 1 and step % 20 == 10 and gate.exists():
                time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
