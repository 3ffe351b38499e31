"""Trains DDP with several buckets; rank 0 says each step, each rank what its resume has proved.

    buckets_script.py FOLDER STEPS [forget]

`forget`: the layout of the buckets is not put back.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tiercheck import Checkpointer
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.replicas.arithmetic import BucketLayout

EVERY, WIDTH = 4, 64


def main(folder: Path, steps: int, forget: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    FolderBackend.resumed = lambda _, step, exact, *rest: say(resumed=exact.value, message=rest[1])  # type: ignore[method-assign]
    if forget:
        BucketLayout.put_back = lambda *_: None  # type: ignore[method-assign]
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = Checkpointer(model, optimizer, folder=folder, every=EVERY)
    for step in range(checkpointer.restore(), steps):
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(16, WIDTH, generator=drawn)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.step(loss)
        checkpointer.wait()
        dist.barrier()
        if rank == 0:
            say(step=step + 1)
    checkpointer.close()
    sys.stdout.flush()
    os._exit(0)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "forget" in sys.argv)
