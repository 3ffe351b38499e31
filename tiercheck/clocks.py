"""Provides comparable times: a clock without steps, and the skew between machines' clocks.

Decisions need elapsed time, and the status needs the time of day. One clock serves both: it advances with the
monotonic clock and approaches the wall clock slowly. A step of 90 s (NTP, a resumed virtual machine) would
otherwise end healthy attempts. With two clocks, times of different clocks would be compared.
"""

from __future__ import annotations

import email.utils
import threading
import time
from collections.abc import Callable

_CATCH_UP = 0.1
"""Seconds of correction per elapsed second while the clock differs from the wall clock."""


class SteadyClock:
    """A callable clock that never goes back. Thread-safe.

    It starts at the wall clock, so times that an earlier process wrote are on about the same scale.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._monotonic, self._lock = wall, monotonic, threading.Lock()
        self._time, self._at = wall(), monotonic()
        """The time last returned, and the monotonic time of that call."""

    def __call__(self) -> float:
        """Returns the time in Unix seconds."""
        with self._lock:
            at = self._monotonic()
            passed, self._at = at - self._at, at
            self._time += passed
            # No correction if no time has passed: all calls at one moment return the same time.
            most = _CATCH_UP * passed
            self._time += min(max(self._wall() - self._time, -most), most)
            return self._time


FORGIVEN = 2.0
"""Seconds. Skew up to this is ignored: a Date header is precise to 1 s, and the response took time."""


class ClockSkew:
    """The clock skew of one job's sidecars, by host."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def measure(self, host: str, date: str | None, now: float) -> float:
        """Returns the seconds by which the host's clock is ahead, from the Date of a response just received.

        Small changes return the previous value, so that a report does not look new only because of them.
        """
        known = self._seconds.get(host, 0.0)
        if date is None:
            return known
        try:
            found = email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - now
        except ValueError:
            return known
        if abs(found) <= FORGIVEN:
            found = 0.0
        if abs(found - known) > FORGIVEN:
            self._seconds[host] = known = found
        return known

    def forget(self, host: str) -> None:
        self._seconds.pop(host, None)
