"""Runs DLRover's flash checkpoint: a synchronous copy into a saver process's shared memory."""

from __future__ import annotations

import argparse
import atexit

from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

from benchmarks.peers.arguments import AfterStep, Settle, measure
from benchmarks.workload import Training


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    checkpointer = DdpCheckpointer(arguments.folder)
    atexit.register(
        checkpointer._engine._shm_handler.unlink
    )  # it would outlive us, as it should after a crash

    def after_step(number: int) -> None:
        if number % (2 * arguments.half) == 0:
            checkpointer.save_checkpoint(number, training.state_dict(), storage_type=StorageType.MEMORY)

    return after_step, lambda: None


if __name__ == "__main__":
    measure(setup)
