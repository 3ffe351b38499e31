"""TierCheck in the common loop: the real library, speaking to a real sidecar process."""

from __future__ import annotations

import argparse

from benchmarks.peers.arguments import AfterStep, Settle, measure
from benchmarks.workload import Training
from tiercheck import Checkpointer


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    checkpointer = Checkpointer(training.model, training.optimizer, every=2 * arguments.half)
    checkpointer.restore()

    def after_step(_: int) -> None:
        checkpointer.step()

    def settle() -> None:
        checkpointer.wait(60)
        if checkpointer.skipped:  # a snapshot that is not taken blocks nobody, and must not count
            raise RuntimeError(f"{checkpointer.skipped} snapshots were skipped, {checkpointer.captured} taken")

    return after_step, settle


if __name__ == "__main__":
    measure(setup)
