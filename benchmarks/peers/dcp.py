"""torch.distributed.checkpoint's own asynchronous save: by thread, by process, and by process from memory that is kept (DefaultStager).

What the stager could do more, page-locked memory and a thread of its own, it does for CUDA only, and refuses without.
"""

from __future__ import annotations

import argparse
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.peers.arguments import AfterStep, Settle, measure
from benchmarks.workload import Training


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    folder = Path(arguments.folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1, timeout=timedelta(seconds=120)
    )
    options: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    if arguments.mode == "stager":
        cuda = torch.cuda.is_available()
        options["async_stager"] = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=True, use_async_staging=cuda, use_non_blocking_copy=cuda
            )
        )
    else:
        options["async_checkpointer_type"] = AsyncCheckpointerType(arguments.mode)
    pending: list[Any] = []

    def settle() -> None:
        while pending:
            pending.pop().result()

    def after_step(number: int) -> None:
        if number % (2 * arguments.half):
            return
        settle()
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        saved = dcp.async_save(training.state_dict(), checkpoint_id=str(folder / "checkpoint"), **options)
        pending.append(saved.upload_completion if isinstance(saved, AsyncSaveResponse) else saved)

    return after_step, settle


if __name__ == "__main__":
    measure(setup)
