"""What the cluster tests train: a tiny model whose every step couples all ranks, so that survivors notice a loss.

Deterministic: the same step gives the same bits on any attempt. The pace is set by PACE seconds per step, so that a
test can place a fault in the middle of a run without depending on the machine's speed. FAIL_AT=n exits at step n,
STALL_AT=n stops moving at step n of the first attempt, ALONE=1 leaves the ranks uncoupled.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from tiercheck import Checkpointer

STEPS = int(os.environ.get("STEPS", "40"))
PACE = float(os.environ.get("PACE", "0.05"))


def build(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1234 + int(os.environ.get("SEED_RANK", rank)))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, together: bool) -> float:
    data = torch.randn(8, 32)  # from the checkpointed RNG: a wrong restore shows in the digest
    loss = (model(data) - 1.0).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    if together:
        dist.all_reduce(mean)
    return float(mean)


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    together = world > 1 and os.environ.get("ALONE") != "1"
    if together:
        dist.init_process_group("gloo")
    model, optimizer = build(rank)
    with Checkpointer(model, optimizer, every=None if together_in_cluster() else STEPS + 1) as checkpointer:
        start = checkpointer.restore()
        print(json.dumps({"start": start, "attempt": checkpointer_attempt()}), flush=True)
        for step in range(start + 1, STEPS + 1):
            loss = train_one_step(model, optimizer, rank, together)
            checkpointer.step(loss=loss)
            print(json.dumps({"step": step, "attempt": checkpointer_attempt(), "rank": rank, "loss": loss}), flush=True)
            if os.environ.get("FAIL_AT") == str(step):
                sys.exit(7)
            while os.environ.get("STALL_AT") == str(step) and checkpointer_attempt() == 1:
                time.sleep(PACE)
            time.sleep(PACE)
    print(json.dumps({"digest": digest(model), "rank": rank, "steps": STEPS}), flush=True)
    if together:
        dist.destroy_process_group()


def together_in_cluster() -> bool:
    return "TIERCHECK_RUN_DIR" in os.environ


def checkpointer_attempt() -> int:
    return int(os.environ.get("TIERCHECK_ATTEMPT", "0"))


if __name__ == "__main__":
    main()
