"""torch.distributed.checkpoint's own asynchronous save, by thread or by process."""

from __future__ import annotations

import argparse
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.peers.arguments import AfterStep, Settle, measure
from benchmarks.workload import Training


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    folder = Path(arguments.folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1, timeout=timedelta(seconds=120)
    )
    kind = AsyncCheckpointerType(arguments.mode)
    pending: list[Any] = []

    def settle() -> None:
        while pending:
            pending.pop().result()

    def after_step(number: int) -> None:
        if number % (2 * arguments.half):
            return
        settle()
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        pending.append(
            dcp.async_save(
                training.state_dict(), checkpoint_id=str(folder / "checkpoint"), async_checkpointer_type=kind
            )
        )

    return after_step, settle


if __name__ == "__main__":
    measure(setup)
