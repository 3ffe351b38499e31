"""Waiting for a process to become ready, and saying what it said if it does not."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tiercheck_local.controlplane import lifetime
from tiercheck_local.controlplane.interface import ControlPlaneFailed


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str, seconds: float = 60.0
) -> None:
    """Raises ControlPlaneFailed if the process ends first or `seconds` pass. The process is then stopped."""
    deadline = time.monotonic() + seconds
    while not ready():
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            lifetime.stop(process)
            why = f"ended with {ended}" if ended is not None else f"was not ready after {seconds:.0f} s"
            raise ControlPlaneFailed(f"{what} {why}. Its log ends with:\n{lifetime.tail(log)}")
        time.sleep(0.02)
