"""Trains without cluster, checkpoints and failures, for the curve that the demo must match."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tiercheck_local.addresses import free_ports
from tiercheck_local.controlplane import lifetime
from tiercheck_local.demo.training_log import Digest, Step, TrainingLog


class ReferenceFailed(RuntimeError):
    """A rank of the uninterrupted run failed; the message carries the end of its output."""


def run_uninterrupted(
    command: Sequence[str], ranks: int, deadline: float, on_step: Callable[[Step], None] = lambda step: None
) -> tuple[list[Step], Digest | None]:
    """All steps and the final digest of `command` on `ranks` processes.

    `deadline` is in seconds. Raises ReferenceFailed.
    """
    with tempfile.TemporaryDirectory(prefix="tiercheck-reference-") as folder:
        logs = Path(folder)
        (port,) = free_ports(1)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                directory = logs / f"rank-{rank}"
                directory.mkdir()
                # In a folder of its own: whatever the command saves is found by nobody.
                environment = _environment(rank, ranks, port)
                processes.append(
                    lifetime.start(command, directory / "out.log", environment, folder=directory)
                )
            log = TrainingLog(logs, "rank-0/out.log")
            _follow(processes, log, deadline, on_step, logs)
            return log.steps, log.digest
        finally:
            for process in processes:
                lifetime.stop(process)


def _follow(
    processes: Sequence[subprocess.Popen[bytes]],
    log: TrainingLog,
    deadline: float,
    on_step: Callable[[Step], None],
    logs: Path,
) -> None:
    end = time.monotonic() + deadline
    while not all(process.poll() == 0 for process in processes):
        for step in log.poll():
            on_step(step)
        failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
        if failed is not None or time.monotonic() > end:
            why = "it took too long"
            if failed is not None:
                why = f"rank {failed} exited with {processes[failed].returncode}"
            tail = lifetime.tail(logs / f"rank-{failed or 0}" / "out.log")
            raise ReferenceFailed(f"the uninterrupted run failed: {why}\n{tail}")
        time.sleep(0.2)
    for step in log.poll():
        on_step(step)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TIERCHECK_")}
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
