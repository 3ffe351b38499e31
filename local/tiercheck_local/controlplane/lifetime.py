"""Processes that end with the one that started them, so that Ctrl-C or a crash leaves nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the starting thread ends. Raises OSError."""
    parent = os.getppid()
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)  # it ended before we asked


def _in_child() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


async def run_until_told(*work: Coroutine[Any, Any, Any]) -> bool:
    """Do all of `work`, which never ends by itself, until SIGTERM, SIGINT, or the end of standard input: then
    whoever started this process is gone. Returns whether it was that. Raises what `work` raises."""
    loop, stop, orphaned = asyncio.get_running_loop(), asyncio.Event(), False

    def read_lifeline() -> None:
        nonlocal orphaned
        if not os.read(sys.stdin.fileno(), 1):
            orphaned = True
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_reader(sys.stdin.fileno(), read_lifeline)
    tasks = [asyncio.create_task(each) for each in (*work, stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
    return orphaned


def start(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in `folder`, output in `log`. The calling thread must live as long as the process."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment) if environment is not None else None,
            cwd=folder,
            preexec_fn=_in_child,  # noqa: PLW1509 - it makes one system call and takes no lock
        )


def stop(process: subprocess.Popen[bytes], seconds: float = 10.0) -> None:
    """SIGTERM, then SIGKILL after `seconds`. Nothing happens if it has ended."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for error messages."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:])
