"""Runs real sidecar processes on loopback addresses, so that what is measured is what runs in a pod."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import shared_memory
from tests.sidecar.world import World
from tiercheck.protocol import names
from tiercheck.protocol.directive import DeltaMode, Policy

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float = 120.0) -> T:
    """The first true value of `condition`. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"in vain for {seconds:.0f} s: {what}")
        time.sleep(0.02)
    return value


class Job(World):
    """One rank per worker. Use it as a context; leaving it ends all processes and removes all files.

    `limit`: bytes of each worker's memory volume.
    """

    def __init__(
        self, workers: int = 1, *, limit: int, every: int | None = 1, delta: DeltaMode = DeltaMode.NONE
    ) -> None:
        memory = Path(tempfile.mkdtemp(prefix="tiercheck-bench-", dir=shared_memory()))
        super().__init__(Path(tempfile.mkdtemp(prefix="tcb-")), memory, workers, limit=limit)
        self.policy = Policy(snapshot_every=every, remote_every=1_000_000, remote_keep=1, delta=delta)

    def __enter__(self) -> Job:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)

    def lose(self, *workers: int) -> None:
        """The pods are gone, and their memory with them; new, empty ones take their places."""
        super().lose(*workers)
        self.start(*workers)

    def trainer_env(self, rank: int) -> dict[str, str]:
        """What the launcher would set for the training command."""
        return {
            names.ENV_RUN_DIR: str(self.run_dir(rank)),
            names.ENV_ATTEMPT: str(self.attempt),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
        }

    def memory_used(self, worker: int) -> int:
        """Bytes of its memory volume that are really taken."""
        return sum(
            512 * path.stat().st_blocks for path in self.memory_dir(worker).rglob("*") if path.is_file()
        )
