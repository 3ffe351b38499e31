"""Runs one process of a run that changes its mesh again and again.

`torchrun mesh_changes.py FOLDER KIND:RANKS...`
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tests.trainer.restore.matrix_runs import Run
from tiercheck import Checkpointer

STEPS = 2


def stage(kind: str, folder: Path) -> None:
    run = Run(kind, "foreach AdamW", "")
    state = {"position": run.position}
    with Checkpointer(run.model, run.optimizers, folder=folder, every=STEPS, state=state) as checkpointer:
        run.seed(100 * checkpointer.restore())
        for _ in range(STEPS):
            run.optimizers[0].zero_grad()
            run.backward()
            run.update()
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
        # All ranks of the stage have come to its end: the next one may have others.
        deadline = time.monotonic() + 120
        while not all((folder / f"done-{index}-{rank}").exists() for rank in range(int(ranks))):
            assert time.monotonic() < deadline
            time.sleep(0.01)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2:])
