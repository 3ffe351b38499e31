"""Trains in a loop that outlives the loss of another rank, and says at every step who it is.

KIND: ddp, fsdp, hsdp or tp. Outside a job it trains STEPS steps with torch alone: what the losses should be.
In a job it trains until it is hit for the LIVES-th time (1 if not given), and then TAIL steps; PACE is in
seconds per step. With SPREAD=1 it exchanges a value before its restore, which a rank that builds its model
alone cannot do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tiercheck import Checkpointer

WIDTH, TAIL = 256, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return given


def build(kind: str, world: int) -> nn.Module:
    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in list(model.children())[:2]:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shards = mesh["data"]
    elif kind == "hsdp":
        shards = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "shards"))
    else:
        shards = init_device_mesh("cpu", (world,))
    for block in model.children():
        fully_shard(block, mesh=shards)
    return fully_shard(model, mesh=shards)


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")  # in one piece: other threads write to the same log
    sys.stdout.flush()


def main() -> None:
    kind, total = os.environ["KIND"], int(os.environ["STEPS"]) or 10**9
    lives, last = int(os.environ.get("LIVES", "1")), 10**9
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if os.environ.get("SPREAD") == "1":
        dist.all_reduce(torch.ones(1))
    model = build(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + (rank // 2 if kind == "tp" else rank))
    checkpointer: Checkpointer | None = None
    steps: Iterable[Any] = range(total)
    if "TIERCHECK_ATTEMPT" in os.environ:
        checkpointer = Checkpointer(model, optimizer)
        steps = checkpointer.steps(total)
    first = next(model.parameters())
    for step in steps:
        with nullcontext() if checkpointer is None else step:
            loss = (model(torch.randn(8, WIDTH)) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer is not None:
                checkpointer.step(loss)
            attempt = int(os.environ.get("TIERCHECK_ATTEMPT", "0"))
            where = getattr(first, "_local_tensor", first).data_ptr()
            now, pid = time.time(), os.getpid()
            say(step=int(step), rank=rank, attempt=attempt, loss=float(loss).hex(), pid=pid, at=where, t=now)
            time.sleep(float(os.environ.get("PACE", "0")))
            if attempt > lives and last == 10**9:
                last = step + TAIL
            if step == last:
                break
    say(done=rank)
    if checkpointer is not None:
        checkpointer.close()


if __name__ == "__main__":
    main()
