"""Ends processes that outlive their command, each by its pid and start time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Processes:
    """Pids lie in `folder`/pids, output in `folder`/log: whoever opens the folder next can go on."""

    def __init__(self, folder: Path) -> None:
        self._pids, self._logs = folder / "pids", folder / "log"
        self._pids.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str], *, inner: bool = False) -> int:
        """The pid; with `inner` that of the child, for commands such as `nsenter -p` that fork what they
        start."""
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        pid = wait_for(lambda: _child(process.pid), 10, f"{name} to start") if inner else process.pid
        (self._pids / name).write_text(f"{pid} {_started(pid)} {process.pid}")
        return pid

    def pid(self, name: str) -> int | None:
        """None: it does not run."""
        try:
            pid, started, _ = (self._pids / name).read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if _started(int(pid)) == started and started else None

    def kill(self, name: str, number: int = signal.SIGKILL, seconds: float = 20.0) -> None:
        """Until it is gone, if the signal is one that ends."""
        pid = self.pid(name)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if number != signal.SIGSTOP:
            self.wake_parent(name)
        if number in (signal.SIGKILL, signal.SIGTERM):
            wait_for(lambda: self.pid(name) is None, seconds, f"{name} to end")

    def wake_parent(self, name: str) -> None:
        """nsenter stops with its child, and must be there to reap it: else its PID namespace never ends."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self._pids / name).read_text().split()[2]), signal.SIGCONT)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._pids.iterdir())

    def end_of_log(self, name: str, size: int = 2000) -> str:
        with contextlib.suppress(OSError):
            return (self._logs / f"{name}.log").read_text(errors="replace")[-size:]
        return ""


def wait_for(condition: Callable[[], T], seconds: float, what: str) -> T:
    """What `condition` gives once it is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.1)


def run(command: Sequence[str], *, text: str | None = None, check: bool = True) -> str:
    """Its output. Raises RuntimeError with what it said."""
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def _started(pid: int) -> str:
    """Ticks since boot; empty if it does not run, or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _child(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return 0
