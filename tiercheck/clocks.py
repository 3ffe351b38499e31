"""Gives times that may be compared: of a clock without steps, and of machines whose clocks differ.

Decisions need the time that has passed, and the status needs the time of day. One clock for both advances as
the monotonic clock does, and approaches the wall clock slowly. A step of 90 s (NTP, a resumed virtual
machine) would otherwise end healthy attempts. With two clocks, moments of both would be compared.
"""

from __future__ import annotations

import email.utils
import threading
import time
from collections.abc import Callable

_CATCH_UP = 0.1
"""Seconds by which it is faster or slower, for each that passes, while the wall clock shows another time."""


class SteadyClock:
    """Call it for the time. It never goes back. Thread-safe.

    A process that starts begins with the wall clock, so what was written before is by about the same time.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._monotonic, self._lock = wall, monotonic, threading.Lock()
        self._time, self._at = wall(), monotonic()
        """What it showed when it was asked last, and the monotonic moment of that."""

    def __call__(self) -> float:
        """Unix seconds."""
        with self._lock:
            at = self._monotonic()
            passed, self._at = at - self._at, at
            self._time += passed
            # Nothing passed, nothing is made up for: all who ask in one moment get one answer.
            most = _CATCH_UP * passed
            self._time += min(max(self._wall() - self._time, -most), most)
            return self._time


FORGIVEN = 2.0
"""Seconds: an answer's Date is precise to one, and the answer was under way for a moment."""


class ClockSkew:
    """Of the sidecars of one job, by host."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def heard(self, host: str, date: str | None, now: float) -> float:
        """Seconds by which the host's clock is ahead of ours, by the Date of an answer that has just come.

        The same as before while it is about the same, so that a report does not look new only for that.
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
