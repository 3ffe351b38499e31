"""Keeps uploads from taking the network that training needs: at most so many bytes per second for the whole worker.

A token bucket in its time-based form: instead of counting tokens it remembers when the bytes already granted will
be paid for. A piece of any size is granted as soon as the ones before it are paid, so a piece may exceed a second's worth.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.25
"""Unused time that may be made up for, so that small objects after a pause are not delayed."""


class TokenBucket:
    """Grants bytes at `rate` per second to any number of threads. `rate` None: no limit.

    `wait(seconds)` pauses the caller; it may raise to abandon the upload (that is how closing interrupts it).
    """

    def __init__(
        self,
        rate: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()
        self._paid_at = clock()
        self.set_rate(rate)

    def set_rate(self, rate: int | None) -> None:
        """Change the limit for what is granted from now on. Raises ValueError if `rate` is not positive."""
        if rate is not None and rate <= 0:
            raise ValueError(f"a bandwidth is a positive number of bytes per second, not {rate}")
        with self._lock:
            self._rate = rate

    def take(self, size: int) -> None:
        """Return when `size` bytes may be sent."""
        with self._lock:
            now = self._clock()
            start = max(self._paid_at, now - BURST_SECONDS)
            if self._rate is None:
                self._paid_at = now
                return
            self._paid_at = start + size / self._rate
        # Waiting outside the lock: the place in the queue is already fixed by `start`.
        if start > now:
            self._wait(start - now)
