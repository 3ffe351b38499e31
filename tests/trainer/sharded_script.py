"""A training script of several ranks, for tests: `python sharded_script.py KIND STEPS`. Prints what a test compares.

KIND: fsdp, ddp, hybrid (replicated FSDP on half of the ranks each), tensor (tensor parallel), fsdp-tensor (both), pipeline.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tiercheck import Checkpointer
from tiercheck.trainer.capture import local_shard, take_inventory
from tiercheck.trainer.state_hash import fingerprints


def wrap(kind: str, model: nn.Module) -> nn.Module:
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def main(kind: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = wrap(kind, nn.Sequential(nn.Linear(9, 33), nn.ReLU(), nn.Linear(33, 7), nn.ReLU(), nn.Linear(7, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said: dict[str, Any] = {"losses": []}
    torch.manual_seed(rank)
    with Checkpointer(model, optimizer) as checkpointer:
        first = checkpointer.restore()
        if first:
            said["restored"] = digest(model, optimizer)
        for step in range(first + 1, steps + 1):
            loss = model(torch.randn(6, 9)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            checkpointer.step(loss.item())
            said["losses"].append(loss.item().hex())
            if step == 9:
                said["at"] = digest(model, optimizer)
                checkpointer.wait()
        checkpointer.wait()
        said["deltas"], said["skipped"] = checkpointer.deltas, checkpointer.deltas_skipped
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    return fingerprints([local_shard(entry.tensor) for entry in take_inventory(model, [optimizer]).entries])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
