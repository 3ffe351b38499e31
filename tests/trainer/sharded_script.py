"""Trains on several ranks, and prints what a test compares, a line per KIND.

`python sharded_script.py STEPS KIND...`

One KIND is trained after the other, each with the sidecar in a folder RANK/KIND below TIERCHECK_RUN_DIR:
starting torch takes longer than any of them. KIND: ddp, zero (ZeroRedundancyOptimizer), fsdp, hybrid (FSDP on
each half of the ranks, replicated between them), tensor (tensor parallel), fsdp-tensor (both), pipeline (a
stage per rank).
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tiercheck import Checkpointer
from tiercheck.trainer.proof.state_hash import fingerprints
from tiercheck.trainer.state.capture import take_inventory
from tiercheck.trainer.tensors.leaves import local_shard

WIDE = 1301
"""Wide enough for replicas to store shares of a layer, and no multiple of anything."""


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(9, 34),
        nn.ReLU(),
        nn.Linear(34, WIDE),
        nn.ReLU(),
        nn.Linear(WIDE, 30),
        nn.ReLU(),
        nn.Linear(30, 5),
    )


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split(model: nn.Sequential, mesh: Any) -> nn.Sequential:

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)  # type: ignore[return-value]


def wrap(kind: str, model: nn.Sequential) -> nn.Module:
    world = dist.get_world_size()
    if kind == "fsdp":
        return shard(model, init_device_mesh("cpu", (world,)))
    if kind == "hybrid":
        return shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    if kind == "tensor":
        return split(model, init_device_mesh("cpu", (world,)))
    if kind == "fsdp-tensor":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        return shard(split(model, mesh["tensor"]), mesh["data"])
    if kind == "pipeline":
        layers, half = list(model.named_children()), len(model) // 2
        return nn.Sequential(OrderedDict(layers[:half] if dist.get_rank() == 0 else layers[half:]))
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.01)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer(kind: str, model: nn.Module) -> Callable[[], Tensor]:
    """One forward and backward pass; the loss."""
    if kind == "pipeline":
        return lambda: through_stages(model)

    def whole() -> Tensor:
        loss = model(torch.randn(6, 9)).square().mean()
        loss.backward()
        return loss

    return whole


def through_stages(stage: nn.Module) -> Tensor:
    batch = torch.randn(6, 9)
    if dist.get_rank() == 0:
        out = stage(batch)
        dist.send(out.detach(), 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, 1)
        out.backward(gradient)
        loss = torch.zeros(())
    else:
        arrived = torch.empty(6, WIDE)
        dist.recv(arrived, 0)
        arrived.requires_grad_()
        loss = stage(arrived).square().mean()
        loss.backward()
        assert arrived.grad is not None
        dist.send(arrived.grad, 0)
    return loss


def train(kind: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrap(kind, make_model())
    optimizer = make_optimizer(kind, model)
    said: dict[str, Any] = {"losses": []}
    # Ranks that split a layer see the same batch; all others see their own.
    torch.manual_seed(0 if "tensor" in kind else dist.get_rank())
    forward_backward = trainer(kind, model)
    with Checkpointer(model, optimizer) as checkpointer:
        first = checkpointer.restore()
        if first:
            said["restored"] = digest(model, optimizer)
        for step in range(first + 1, steps + 1):
            optimizer.zero_grad()
            loss = forward_backward()
            if kind != "pipeline":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            checkpointer.step(loss.item())
            said["losses"].append(loss.item().hex())
            if step == 9:
                said["at"] = digest(model, optimizer)
                checkpointer.wait()
        checkpointer.wait()
        said["deltas"], said["skipped"] = checkpointer.deltas, checkpointer.deltas_skipped
    return said


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    inner = getattr(optimizer, "optim", optimizer)
    return fingerprints([local_shard(entry.tensor) for entry in take_inventory(model, [inner]).entries])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = Path(os.environ["TIERCHECK_RUN_DIR"], os.environ["RANK"])
    for each in sys.argv[2:]:
        os.environ["TIERCHECK_RUN_DIR"] = str(folder / each)
        print(json.dumps(train(each, int(sys.argv[1]))), flush=True)
    dist.destroy_process_group()
