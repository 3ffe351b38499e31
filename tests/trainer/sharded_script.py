"""Trains on several ranks, and prints what a test compares, a line per KIND.

`python sharded_script.py STEPS KIND...`

One KIND of `matrix_runs` is trained after the other, each with the sidecar in a folder RANK/KIND below
TIERCHECK_RUN_DIR: starting torch takes longer than any of them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from tests.trainer.restore.matrix_runs import Run
from tiercheck import Checkpointer
from tiercheck.trainer.proof.state_hash import fingerprints
from tiercheck.trainer.replicas.replicas import Partitions
from tiercheck.trainer.state.capture import take_inventory
from tiercheck.trainer.tensors.tensor_parts import local_shard


def train(kind: str, steps: int) -> dict[str, Any]:
    run = Run(kind, "foreach AdamW", "")
    said: dict[str, Any] = {"losses": []}
    with Checkpointer(run.model, run.optimizers) as checkpointer:
        first = checkpointer.restore()
        if first:
            said["restored"] = digest(run)
        for step in range(first + 1, steps + 1):
            for optimizer in run.optimizers:
                optimizer.zero_grad()
            loss = run.backward()
            if kind != "pipeline":
                nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
            run.update()
            checkpointer.step(loss)
            said["losses"].append(loss.hex())
            if step == 9:
                said["at"] = digest(run)
                checkpointer.wait()
        checkpointer.wait()
        said["deltas"], said["skipped"] = checkpointer.deltas, checkpointer.deltas_skipped
    return said


def digest(run: Run) -> list[str]:
    inventory = take_inventory(run.model, Partitions(run.optimizers).inner)
    return fingerprints([local_shard(entry.tensor) for entry in inventory.entries])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = Path(os.environ["TIERCHECK_RUN_DIR"], os.environ["RANK"])
    for each in sys.argv[2:]:
        os.environ["TIERCHECK_RUN_DIR"] = str(folder / each)
        print(json.dumps(train(each, int(sys.argv[1]))), flush=True)
    dist.destroy_process_group()
