"""Counts steps that the sanity gate refused in a row, so that a run that diverges goes back."""

from __future__ import annotations

import threading


class Sanity:
    """Verdicts come from the training thread (the loss) and from the saver's (gradient, state), a step may
    get several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad = 0
        self._first = 0
        self._in_a_row = 0

    @property
    def in_a_row(self) -> int:
        """Steps refused, up to now, since the last good one."""
        return self._in_a_row

    def refused(self, step: int) -> None:
        """Loss, gradient or state of `step` is not finite. So were the steps since the last refused one,
        unless one was good."""
        with self._lock:
            if step > self._bad:
                if self._in_a_row == 0:
                    self._first = step
                self._bad = step
                self._in_a_row = step - self._first + 1

    def good(self, step: int) -> None:
        """All that was looked at is finite. Does not take back what was refused for the same step."""
        with self._lock:
            if step > self._bad:
                self._in_a_row = 0
