"""Gives a group new connections while a collective over the old ones does not end.

The first process of rank 1 takes no part in it, and keeps its connections. Another one replaces it.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from tiercheck.trainer.inprocess.groups import groups


def main(what: str, rank: int, *ports: int) -> None:
    groups()
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=2,
        init_method=None if groups().is_detached else f"tcp://127.0.0.1:{ports[0]}",
    )
    groups().end_of_setup()
    if what == "absent":
        print("absent", flush=True)
        time.sleep(600)
    under_way = dist.all_reduce(torch.ones(4), async_op=True) if what == "waits" else None
    groups().reconnect("127.0.0.1", ports[1], rank, 2)
    summed = torch.ones(1)
    dist.all_reduce(summed)
    print("renewed", int(summed), under_way is not None and under_way.is_completed(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
