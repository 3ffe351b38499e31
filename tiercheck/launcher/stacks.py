"""Where a hung process stands: what it says itself when asked, because it is about to be stopped and will not be asked again."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tiercheck.launcher.command import descendants, parents

ASK = signal.SIGUSR2
"""The trainer library answers it with the stack of every Python thread (`tiercheck.trainer.stacks`)."""


def dump_stacks() -> list[int]:
    """Ask every process below this one that catches the signal: any other would end by it. Their pids."""
    asked = [pid for pid in sorted(descendants(os.getpid(), parents())) if _catches(pid)]
    print(f"tiercheck: no step for long; asking processes {asked} for their stacks", file=sys.stderr, flush=True)
    for pid in asked:
        try:
            os.kill(pid, ASK)
        except ProcessLookupError:
            continue
    return asked


def _catches(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (ASK - 1) & 1)
