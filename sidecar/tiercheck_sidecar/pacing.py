"""Bounds the bandwidth of uploads and copies, and detects CPU throttling of this sidecar.

Training keeps its network by a token bucket in its time-based form: instead of counting tokens it records
when the bytes already granted will be paid for. A piece of any size is granted as soon as the ones before it
are paid, so a piece may exceed a second's worth.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BURST_SECONDS = 0.25
"""Seconds of unused time to be made up for, so that small objects after a pause are not delayed."""

SMALLEST_PIECE = 64 * 1024
"""Bytes below which pacing would cost more than it gives."""


class TokenBucket:
    """Grants bytes at `rate` per second to any number of threads. `rate` None: no limit.

    `wait(seconds)` pauses the caller; it may raise, which is how closing interrupts a transfer."""

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
        """Changes the limit for what is granted from then on. Raises ValueError if `rate` is not positive."""
        if rate is not None and rate <= 0:
            raise ValueError(f"a bandwidth is a positive number of bytes per second, not {rate}")
        with self._lock:
            self.rate = rate

    def take(self, size: int) -> None:
        """Returns when `size` bytes may be sent."""
        with self._lock:
            now = self._clock()
            start = max(self._paid_at, now - BURST_SECONDS)
            if self.rate is None:
                self._paid_at = now
                return
            self._paid_at = start + size / self.rate
        # Waiting outside the lock: the place in the queue is already fixed by `start`.
        if start > now:
            self._wait(start - now)


class Portion:
    """A share of a bucket for one kind of traffic, which asks for `seconds` worth of bytes at a time.

    Larger requests get a larger part of a bucket that is short, because places in its queue are per request.
    """

    def __init__(self, bucket: TokenBucket, seconds: float) -> None:
        self._bucket, self._seconds = bucket, seconds

    @property
    def piece(self) -> int | None:
        """Returns the number of bytes to ask for at once; None: it does not matter."""
        rate = self._bucket.rate
        return None if rate is None else max(SMALLEST_PIECE, int(rate * self._seconds))

    def take(self, size: int) -> None:
        """Returns when `size` bytes may be sent."""
        self._bucket.take(size)


CGROUP = Path("/sys/fs/cgroup")
"""The path at which a container sees its own cgroup."""
EVERY = 5.0
"""Seconds between two checks."""
_WINDOW = 60.0
_MUCH, _LITTLE = 0.25, 0.1
"""Shares of the window's periods: from the first on a problem is stated, below the other withdrawn."""
_LEAST = 50
"""The number of periods with work, usually of 0.1 s each, below which nothing is concluded."""
_MOST_HANDS = 16
"""The limit of threads; fewer already use the memory's bandwidth."""
_V2, _V1 = ("cpu.stat", "cpu.max"), ("cpu.stat", "cpu.cfs_quota_us", "cpu.cfs_period_us")
_V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


@dataclass(frozen=True)
class CpuStat:
    """The kernel's counters, which only grow."""

    periods: int
    """The number of periods with work and a limit."""
    throttled: int
    """The number of these in which the limit was used up."""
    limit: float | None = None
    """Cores; None: not known."""


class ThrottleWatch:
    """Detects that the kernel throttles this sidecar. Used by one thread."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, CpuStat]] = deque()
        self._stated = False

    def look(self, now: float, stat: CpuStat | None) -> str:
        """Returns the problem to state; empty: none. `stat`: None if there is no limit."""
        if stat is None:
            self._seen.clear()
            return ""
        self._seen.append((now, stat))
        while len(self._seen) > 1 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()
        first = self._seen[0][1]
        periods, throttled = stat.periods - first.periods, stat.throttled - first.throttled
        share = throttled / periods if periods >= _LEAST else 0.0
        self._stated = share >= (_LITTLE if self._stated else _MUCH)
        if not self._stated:
            return ""
        limit = "its CPU limit" if stat.limit is None else f"its limit of {stat.limit:g} cores"
        return (
            f"the kernel holds this sidecar back again and again, because it uses up {limit}: copies and "
            "restores are slow. Raise spec.sidecar.resources.limits.cpu, or the LimitRange of the namespace "
            "if the limit comes from there"
        )


def spare_hands(folder: Path) -> int:
    """Returns how many threads may be busy for long: one per core, at most half of the cgroup's CPU limit.
    With more, the kernel would hold up all other threads."""
    stat, cores = read_cpu_stat(folder), len(os.sched_getaffinity(0))
    limit = stat.limit if stat is not None else None
    return max(1, min(_MOST_HANDS, cores, cores if limit is None else int(limit / 2)))


def read_cpu_stat(folder: Path) -> CpuStat | None:
    """Reads the counters of the cgroup at `folder`, v2 or v1; None: no limit, or nothing can be read."""
    if (folder / _V2[0]).is_file():
        quota, period = _words(folder / _V2[1], 2)
        return _stat(folder / _V2[0], quota, period)
    for name in _V1_FOLDERS:
        place = folder / name
        if (place / _V1[0]).is_file():
            return _stat(place / _V1[0], *_words(place / _V1[1], 1), *_words(place / _V1[2], 1))
    return None


def _stat(path: Path, quota: str, period: str) -> CpuStat | None:
    try:
        counters = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
        periods, throttled = int(counters["nr_periods"]), int(counters["nr_throttled"])
    except (OSError, ValueError, KeyError):
        return None
    if quota in ("max", "-1"):
        return None
    limited = quota.isdigit() and period.isdigit() and int(period) > 0
    return CpuStat(periods, throttled, int(quota) / int(period) if limited else None)


def _words(path: Path, count: int) -> list[str]:
    """Returns the file's words; empty ones if it cannot be read."""
    try:
        found = path.read_text().split()
    except OSError:
        found = []
    return (found + [""] * count)[:count]
