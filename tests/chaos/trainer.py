"""Trains what the chaos campaign strikes: tiny, coupled over all ranks, and the same bits always.

Trains until the file STOP exists; then all ranks end after the same step. PACE: seconds per step. Each line
tells what a rank is in before it is
saved: who comes back to a step, and was not told of it, could compare nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from tiercheck import Checkpointer

PACE = float(os.environ.get("PACE", "0.1"))


def build(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1234 + rank)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    data = torch.randn(8, 32)  # from the checkpointed RNG: a wrong restore shows at once
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters and moments: 8 bytes in hex."""
    seen = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
        for value in optimizer.state.get(parameter, {}).values():
            seen.update(value.detach().numpy().tobytes())
    return seen.hexdigest()


def undisturbed(rank: int, steps: int) -> Iterator[tuple[str, str]]:
    """Loss and digest after each step of a rank that nothing ever happened to. Ranks mix no gradients."""
    torch.set_num_threads(1)
    model, optimizer = build(rank)
    for _ in range(steps):
        loss = train_one_step(model, optimizer)
        yield loss.hex(), digest(model, optimizer)


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line | {"at": time.time()}) + "\n")
    sys.stdout.flush()


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt, stop = int(os.environ["TIERCHECK_ATTEMPT"]), Path(os.environ["STOP"])
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    model, optimizer = build(rank)
    with Checkpointer(model, optimizer) as checkpointer:
        step = checkpointer.restore()
        say(start=step, attempt=attempt, rank=rank, state=digest(model, optimizer))
        over = False
        while not over:
            loss, step = train_one_step(model, optimizer), step + 1
            say(step=step, attempt=attempt, rank=rank, loss=loss.hex(), state=digest(model, optimizer))
            checkpointer.step(loss=loss)
            together = torch.tensor([float(stop.exists())])
            if world > 1:
                dist.all_reduce(together)
            over = bool(together)
            time.sleep(PACE)
    say(ended=step, attempt=attempt, rank=rank)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
