"""Runs threads that never die alone: an unforeseen error is told, and the loop begins again.

All threads of the sidecar and of the library are begun here.
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
"""Seconds until a loop begins again; longer after each death."""
REMEMBERED = 600.0
"""Seconds after which a death is forgotten."""

Died = Callable[[BaseException, int], None]
"""Called with what ended the loop, and how often it died in the last `REMEMBERED` seconds."""


def begin(name: str, body: Callable[[], None]) -> threading.Thread:
    """A daemon thread that runs `body`. Raises RuntimeError if the system gives no thread."""
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread


def supervise(
    body: Callable[[], None],
    died: Died,
    pause: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run `body` until it returns, again and again after what it raises. `pause` waits so many seconds, and
    says whether to go on."""
    deaths: deque[float] = deque()
    while True:
        try:
            return body()
        except BaseException as error:  # invariant: whatever it is, this loop's work is still to be done
            deaths.append(clock())
            while deaths[0] < deaths[-1] - REMEMBERED:
                deaths.popleft()
            with contextlib.suppress(Exception):
                died(error, len(deaths))
        if not pause(min(LONGEST, FIRST * 2 ** min(len(deaths) - 1, 10))):
            return


def describe(error: BaseException) -> str:
    """What kind of error, and where; not its own words, which may hold secrets."""
    frames = extract_tb(error.__traceback__)
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
