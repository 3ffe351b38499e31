"""Provides named points at which a test can kill, stop or delay this process, or raise an error.

Modelled on FreeBSD's fail(9) and TiKV's fail-rs. A point is one line, `failpoint(NAME)`, and does nothing
unless the environment named a file (`TIERCHECK_FAILPOINTS`) when the process began. Each line of that file,
which may change at any time, arms one point:

    POINT ACTION [times=N] [skip=K] [seconds=S]

`times` (1): how often it triggers, over all processes that read the file. `skip` (0): how many passes of each
process have no effect first. `seconds` (1): the length of a delay. No input from the network, a store or
shared memory is used.

Each trigger is recorded in a file with the suffix `.struck` before it takes effect, so that the restarted
process does not trigger it again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

ENV_FAILPOINTS = "TIERCHECK_FAILPOINTS"
"""The path of the file that arms points. If it is not set, none can be armed."""
STRUCK = ".struck"
"""The suffix of the file with a line for each trigger: POINT ACTION PID TIME (Unix seconds)."""

ERRORS = {"enospc": errno.ENOSPC, "emfile": errno.EMFILE, "eio": errno.EIO}
"""Actions that raise OSError."""
ACTIONS = ("kill", "stop", "delay", "exception", *ERRORS)
"""kill: SIGKILL. stop: SIGSTOP, until a SIGCONT arrives. exception: raises `Struck`."""


class Struck(Exception):
    """An error of a type that no caller handles."""


@dataclass(frozen=True)
class Arming:
    """One line of the file, which arms one point."""

    point: str
    action: str
    times: int = 1
    skip: int = 0
    seconds: float = 1.0

    def __str__(self) -> str:
        return f"{self.point} {self.action} times={self.times} skip={self.skip} seconds={self.seconds}"

    @staticmethod
    def parse(line: str) -> Arming:
        """Parses one line. Raises ValueError."""
        point, action, *options = line.split()
        if action not in ACTIONS:
            raise ValueError(f"{action} is none of {', '.join(ACTIONS)}")
        given = dict(option.split("=", 1) for option in options)
        arming = Arming(
            point,
            action,
            int(given.pop("times", 1)),
            int(given.pop("skip", 0)),
            float(given.pop("seconds", 1.0)),
        )
        if given:
            raise ValueError(f"unknown: {', '.join(given)}")
        return arming


class Failpoints:
    """The points that one file arms. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._armed: dict[str, Arming] = {}
        self._passed: Counter[str] = Counter()

    def passed(self, point: str) -> None:
        """Triggers `point` if it is armed and due. Raises OSError or Struck if that is its action."""
        with self._lock:
            self._look()
            arming = self._armed.get(point)
            if arming is None:
                return
            self._passed[point] += 1
            if self._passed[point] <= arming.skip or not self._claim(arming):
                return
        _strike(arming)

    def _look(self) -> None:
        try:
            status = os.stat(self._path)
        except OSError:
            self._seen, self._armed = None, {}
            return
        if (status.st_mtime_ns, status.st_ino) == self._seen:
            return
        self._seen = (status.st_mtime_ns, status.st_ino)
        self._armed, self._passed = {}, Counter()
        with open(self._path) as file:
            for line in filter(str.strip, file):
                try:
                    arming = Arming.parse(line)
                except ValueError as error:
                    print(
                        f"{self._path}: {line.strip()!r} arms nothing: {error}", file=sys.stderr, flush=True
                    )
                else:
                    self._armed[arming.point] = arming

    def _claim(self, arming: Arming) -> bool:
        """Records the trigger and returns True, unless the point has already triggered `times` times."""
        with open(self._path + STRUCK, "a+") as struck:
            fcntl.flock(struck, fcntl.LOCK_EX)
            struck.seek(0)
            before = sum(line.split(" ", 1)[0] == arming.point for line in struck)
            if before >= arming.times:
                return False
            struck.write(f"{arming.point} {arming.action} {os.getpid()} {time.time():.6f}\n")
            return True


def _strike(arming: Arming) -> None:
    match arming.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(arming.seconds)
        case "exception":
            raise Struck(arming.point)
        case name:
            raise OSError(ERRORS[name], os.strerror(ERRORS[name]), arming.point)


_points = Failpoints(os.environ[ENV_FAILPOINTS]) if os.environ.get(ENV_FAILPOINTS) else None


def failpoint(name: str) -> None:
    """Marks a point with this name. Raises OSError or Struck if a test armed it so."""
    if _points is not None:
        _points.passed(name)
