"""Runs torch's next checkpointing: staged into kept memory, written by a process.

It is torch.distributed.checkpoint._experimental.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._experimental import CheckpointerConfig, RankInfo, make_async_checkpointer
from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

from benchmarks.peers.arguments import AfterStep, Settle, measure, one_at_a_time, staging
from benchmarks.workload import Training


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    config = CheckpointerConfig(staging_config=CheckpointStagerConfig(**staging()))
    checkpointer = make_async_checkpointer(config, RankInfo(0, 1))

    def save(folder: Path) -> Any:
        futures = checkpointer.save(str(folder), training.state_dict())
        assert futures is not None
        return futures[1]

    return one_at_a_time(arguments, save)


if __name__ == "__main__":
    measure(setup)
