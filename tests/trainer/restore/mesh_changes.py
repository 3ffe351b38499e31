"""Runs one process of a run that changes its mesh again and again.

`torchrun mesh_changes.py FOLDER KIND:RANKS...`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer.sharded_script import make_model, make_optimizer, trainer, wrap
from tiercheck import Checkpointer

STEPS = 2


def stage(kind: str, folder: Path) -> None:
    model = wrap(kind, make_model())
    optimizer = make_optimizer(kind, model)
    forward_backward = trainer(kind, model)
    position = {"samples": 0}
    with Checkpointer(
        model, optimizer, folder=folder, every=STEPS, state={"position": position}
    ) as checkpointer:
        first = checkpointer.restore()
        torch.manual_seed(first if "tensor" in kind else 100 * first + dist.get_rank())
        for _ in range(STEPS):
            optimizer.zero_grad()
            forward_backward()
            optimizer.step()
            position["samples"] += 1
            checkpointer.step()


def main(number: int, folder: Path, stages: list[str]) -> None:
    for index, text in enumerate(stages):
        kind, _, ranks = text.partition(":")
        if number < int(ranks):
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store-{index}", rank=number, world_size=int(ranks)
            )
            stage(kind, folder / "checkpoints")
            dist.destroy_process_group()
        (folder / f"done-{index}-{number}").touch()
        _wait_for(folder, index, int(ranks))


def _wait_for(folder: Path, index: int, ranks: int) -> None:
    """Until all ranks of the stage have come to its end: the next one may have others."""
    import time

    deadline = time.monotonic() + 120
    while not all((folder / f"done-{index}-{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2:])
