"""Runs threads that survive unexpected errors: the error is reported, and the loop starts again.

All threads of the sidecar and of the library are started here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb

FIRST, LONGEST = 0.5, 60.0
"""Seconds until a failed loop starts again: the first delay, doubled at each failure, and the maximum."""
REMEMBERED = 600.0
"""Seconds after which a failure is no longer counted."""

Died = Callable[[BaseException, int], None]
"""Receives the error that ended the loop, and the number of failures in the last `REMEMBERED` seconds."""


def begin(name: str, body: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that runs `body`. Raises RuntimeError if the system cannot start a thread."""
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread


def supervise(
    body: Callable[[], None],
    died: Died,
    pause: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs `body` until it returns, and again after each exception.

    `pause` waits the given seconds, and returns whether to continue."""
    deaths: deque[float] = deque()
    while True:
        try:
            return body()
        except BaseException as error:  # invariant: the loop's work is still to be done after any error
            deaths.append(clock())
            while deaths[0] < deaths[-1] - REMEMBERED:
                deaths.popleft()
            with contextlib.suppress(Exception):
                died(error, len(deaths))
        if not pause(min(LONGEST, FIRST * 2 ** min(len(deaths) - 1, 10))):
            return


def describe(error: BaseException) -> str:
    """Returns the type and place of an error, without its message, which may contain secrets."""
    frames = extract_tb(error.__traceback__)
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
