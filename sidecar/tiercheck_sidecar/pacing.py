"""Bounds the bytes per second of uploads and copies, so that training keeps its network.

A token bucket in its time-based form: instead of counting tokens it remembers when the bytes already granted
will be paid for. A piece of any size is granted as soon as the ones before it are paid, so a piece may exceed
a second's worth.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.25
"""Unused time that may be made up for, so that small objects after a pause are not delayed."""

SMALLEST_PIECE = 64 * 1024
"""Bytes below which pacing would cost more than it gives."""


class TokenBucket:
    """Grants bytes at `rate` per second to any number of threads. `rate` None: no limit.

    `wait(seconds)` pauses the caller; it may raise to abandon the transfer (that is how closing interrupts
    it).
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

    @property
    def rate(self) -> int | None:
        """Bytes per second; None: no limit."""
        return self._rate

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


class Portion:
    """A share of a bucket for one kind of traffic, which asks for `seconds` worth of bytes at a time.

    Whoever asks for more at once gets a larger part of a bucket that is short: places in its queue are per
    request.
    """

    def __init__(self, bucket: TokenBucket, seconds: float) -> None:
        self._bucket, self._seconds = bucket, seconds

    @property
    def piece(self) -> int | None:
        """How many bytes to ask for at once; None: it does not matter."""
        rate = self._bucket.rate
        return None if rate is None else max(SMALLEST_PIECE, int(rate * self._seconds))

    def take(self, size: int) -> None:
        """Return when `size` bytes may be sent."""
        self._bucket.take(size)
