"""The end of a process that used gloo: its threads must be idle before the interpreter goes."""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # 15 characters: all that Linux keeps of a name
_PAUSE = 0.002
_LOOKS = 2  # who waited for the interpreter lock at the first look has had it before the second
_PATIENCE = 1.0


@functools.cache
def wait_at_exit() -> None:
    """Let the process wait for them, after the hooks that are registered later."""
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Return when no gloo thread of this process has anything to do; after a second in any case. Raises nothing.

    Such a thread may be the last to let go of a tensor, some time after it said that the collective is done, and needs the
    interpreter lock for that. An interpreter before 3.14 that has begun to end unwinds whoever asks for its lock, which a C++
    destructor answers with abort. `destroy_process_group` does not end these threads: DTensor's caches keep the group.
    """
    end = time.monotonic() + _PATIENCE
    idle = 0
    while idle < _LOOKS and time.monotonic() < end:
        time.sleep(_PAUSE)  # without the interpreter lock
        idle = 0 if _some_busy() else idle + 1


def _some_busy() -> bool:
    for status in Path("/proc/self/task").glob("*/stat"):
        try:
            text = status.read_text()
        except OSError:
            continue  # it has just ended
        if f"({_NAME})" in text and text.rpartition(") ")[2].startswith(("R", "D")):  # "id (name) state ..."
            return True
    return False
