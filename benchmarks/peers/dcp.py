"""Runs torch.distributed.checkpoint's own asynchronous save: by thread, process and kept memory.

`experimental`: its next one, staged into kept memory and written by a process.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._experimental import CheckpointerConfig, RankInfo, make_async_checkpointer
from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.peers.arguments import AfterStep, Settle, measure, one_at_a_time, staging
from benchmarks.workload import Training


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    if arguments.mode == "experimental":
        config = CheckpointerConfig(staging_config=CheckpointStagerConfig(**staging()))
        checkpointer = make_async_checkpointer(config, RankInfo(0, 1))

        def save_experimentally(folder: Path) -> Any:
            futures = checkpointer.save(str(folder), training.state_dict())
            assert futures is not None
            return futures[1]

        return one_at_a_time(arguments, save_experimentally)
    folder = Path(arguments.folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1, timeout=timedelta(seconds=120)
    )
    options: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    if arguments.mode == "stager":
        options["async_stager"] = DefaultStager(StagingOptions(**staging()))
    else:
        options["async_checkpointer_type"] = AsyncCheckpointerType(arguments.mode)

    def save(folder: Path) -> Any:
        saved = dcp.async_save(training.state_dict(), checkpoint_id=str(folder), **options)
        return saved.upload_completion if isinstance(saved, AsyncSaveResponse) else saved

    return one_at_a_time(arguments, save)


if __name__ == "__main__":
    measure(setup)
