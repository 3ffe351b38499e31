"""TierCheck in the common loop: the real library, speaking to a real sidecar process."""

from __future__ import annotations

import argparse
import time

from benchmarks.peers.arguments import AfterStep, Settle, measure
from benchmarks.workload import Training
from tiercheck import Checkpointer


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    checkpointer = Checkpointer(training.model, training.optimizer, every=2 * arguments.half)
    checkpointer.restore()

    def after_step(_: int) -> None:
        checkpointer.step()

    skipped = 0

    def settle() -> bool:
        nonlocal skipped
        checkpointer.wait(60)
        before, skipped = skipped, checkpointer.skipped
        if before != skipped:
            time.sleep(0.1)  # the sidecar was still at the last ones, because steps are short
        return before == skipped

    return after_step, settle


if __name__ == "__main__":
    measure(setup)
