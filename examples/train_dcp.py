"""Trains and saves with torch.distributed.checkpoint, plus four lines that TierCheck adds.

    python examples/train_dcp.py --folder /tmp/dcp --steps 100
    torchrun --nproc-per-node 2 examples/train_dcp.py --folder /tmp/dcp --steps 200

Stop it in any way and start it again, on as many ranks as you like: it continues (`--pace 0.1` leaves time to
stop it). The same script, unchanged, runs in a TierCheckJob; there what it saves goes to the memory of its
pod and its peers, as often as the job says. Rank 0 prints one JSON line per step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tiercheck.dcp import Storage


def train(folder: str, steps: int, every: int | None, pace: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    with Storage(folder) as storage:  # TierCheck
        if storage.start:
            loaded = state()
            storage.load(loaded)  # instead of dcp.load(loaded, checkpoint_id=...)
            set_state_dict(
                model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
            )
        for step in range(storage.start + 1, steps + 1):
            generator = torch.Generator().manual_seed(
                step
            )  # the data of a step depends on nothing but its number
            batch = torch.randn(8, 16, generator=generator)
            optimizer.zero_grad()
            loss = (model(batch) - batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            if step % every == 0 if every else storage.due(step):
                storage.async_save(state(), step)  # instead of dcp.async_save(state(), checkpoint_id=...)
            storage.end_step(step, loss.item())  # TierCheck
            if storage.rank == 0:
                print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
            time.sleep(pace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="checkpoints", help="where versions go, outside a cluster")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--every", type=int, help="steps between saves; default: as the job says, 50 outside a cluster"
    )
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait after each step")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(arguments.folder, arguments.steps, arguments.every, arguments.pace)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
