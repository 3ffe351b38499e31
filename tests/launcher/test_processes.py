"""What still lives is seen, or the next attempt would begin beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tiercheck.launcher import command

_LEADER_GONE = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit(2): ends this thread alone
"""


def test_process_whose_first_thread_is_gone_while_another_lives_is_seen() -> None:
    """As when a thread is stuck in a driver: its leader is a zombie, and its memory, also the GPU's, is still
    in use."""
    with subprocess.Popen(
        [sys.executable, "-c", _LEADER_GONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while _state(process.pid) != "Z":
            time.sleep(0.01)
        assert command.parents()[process.pid] == os.getpid()
        process.stdin.close()
        while len(os.listdir(f"/proc/{process.pid}/task")) > 1:
            time.sleep(0.01)
        assert process.pid not in command.parents(), "a whole zombie only waits to be reaped"


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
