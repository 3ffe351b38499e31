"""Builds a model as a replacement does, in a job of four ranks of which nobody else is there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tiercheck  # noqa: F401  (notices how groups are made)
from tiercheck.trainer.inprocess.groups import NotAlone, groups


def exchange(case: str) -> None:
    match case:
        case "broadcast":
            dist.broadcast(torch.ones(1), 0)
        case "objects":
            dist.broadcast_object_list([None], 0)
        case "gather":
            dist.all_gather_object([None] * 4, 1)


def main() -> None:
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=mesh["data"])
    parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh["tensor"], {"0": ColwiseParallel()})
    dist.barrier()
    print("built", groups().exchanged)
    for case in ("broadcast", "objects", "gather"):
        groups().exchanged = ""
        try:
            exchange(case)
        except NotAlone as refused:
            print(refused)


if __name__ == "__main__":
    main()
