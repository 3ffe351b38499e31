"""DLRover's flash checkpoint: a synchronous copy into shared memory of a saver process, its fastest way."""

from __future__ import annotations

import argparse

from benchmarks.peers.arguments import AfterStep, Settle, measure
from benchmarks.workload import Training
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    checkpointer = DdpCheckpointer(arguments.folder)

    def after_step(number: int) -> None:
        if number % (2 * arguments.half) == 0:
            checkpointer.save_checkpoint(number, training.state_dict(), storage_type=StorageType.MEMORY)

    return after_step, lambda: None


if __name__ == "__main__":
    measure(setup)
