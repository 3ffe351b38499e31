"""torch's next checkpointing (torch.distributed.checkpoint._experimental): staged into memory that is kept, written by a process."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._experimental import CheckpointerConfig, RankInfo, make_async_checkpointer
from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

from benchmarks.peers.arguments import AfterStep, Settle, measure
from benchmarks.workload import Training


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    folder, cuda = Path(arguments.folder) / "checkpoint", torch.cuda.is_available()
    staging = CheckpointStagerConfig(
        use_pinned_memory=cuda, use_shared_memory=True, use_async_staging=cuda, use_non_blocking_copy=cuda
    )
    checkpointer = make_async_checkpointer(CheckpointerConfig(staging_config=staging), RankInfo(0, 1))
    pending: list[Any] = []

    def settle() -> None:
        while pending:
            pending.pop().result()

    def after_step(number: int) -> None:
        if number % (2 * arguments.half):
            return
        settle()
        shutil.rmtree(folder, ignore_errors=True)
        futures = checkpointer.save(str(folder), training.state_dict())
        assert futures is not None
        pending.append(futures[1])

    return after_step, settle


if __name__ == "__main__":
    measure(setup)
