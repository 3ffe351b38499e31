"""Gives the groups of one rank of three new connections again and again.

It begins alone, as a replacement does, and so it makes its model each time, as a function does that is called
again.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tiercheck.trainer.inprocess.groups import groups

FIRST, TIMES = 3, 24
PATIENCE = 10.0


def held(most: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Threads and descriptors of this process; once they are within `most`, as peers and gloo's threads close
    some a moment later, or after a while if they never are."""
    end = time.monotonic() + PATIENCE
    while True:
        found = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        if most == (0, 0) or (found[0] <= most[0] and found[1] <= most[1]) or time.monotonic() > end:
            return found
        time.sleep(0.01)


def build() -> tuple[nn.Module, dist.ProcessGroup, DeviceMesh]:
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 2])
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    with torch.no_grad():
        for parameter in replicated.parameters():
            parameter.fill_(0.1)
    return replicated, pair, init_device_mesh("cpu", (3,))


def main() -> None:
    rank, ports = int(os.environ["RANK"]), [int(port) for port in sys.argv[1:]]
    torch.set_num_threads(1)
    groups().enter_function()
    replicated, pair, mesh = build()

    def step() -> list[float]:
        x, of_pair = torch.full((2, 8), rank + 1.0), torch.full((1,), rank + 1.0)
        replicated(x).square().sum().backward()
        if rank != 1:
            dist.all_reduce(of_pair, group=pair)
        summed = functional.all_reduce(of_pair, "sum", mesh)
        gathered: list[int | None] = [None] * 3
        dist.all_gather_object(gathered, rank)
        assert gathered == [0, 1, 2]
        ours = next(replicated.parameters()).grad
        assert ours is not None
        found = [float(of_pair), float(summed), float(ours.sum())]
        replicated.zero_grad()
        return found

    counts, computed = [], []
    for port in ports:
        groups().end_of_setup()
        groups().reconnect("127.0.0.1", port, rank, 3)
        computed.append(step())
        counts.append(held(max(counts[:FIRST]) if len(counts) >= FIRST else (0, 0)))
        assert dist.distributed_c10d._get_default_group()._get_backend_name() == "gloo"
        assert not groups().refusal()
        groups().disconnect()
        groups().reopen()
        before = dist.group.WORLD, pair
        groups().detach()
        replicated, pair, mesh = build()
        assert (dist.group.WORLD, pair) == before
    assert all(each == computed[0] for each in computed), computed
    first, last = (max(some) for some in (counts[:FIRST], counts[-FIRST:]))
    print(first, last)
    assert last <= first, "threads and descriptors of the old connections stay"


if __name__ == "__main__":
    main()
