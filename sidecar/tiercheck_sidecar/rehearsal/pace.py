"""How slowly a rehearsal reads, and when a tier's turn has come: the rules, without clocks or threads."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.version import Version

SHARE = 0.01
"""Of one core, and of the bandwidth that the job allows its copies or uploads, that reading may take."""
WIRE_SECONDS = 1e-9
"""Core-seconds that a byte from elsewhere costs at least: kernel and other threads work for it as well (0.7 per GB were measured)."""
AGAIN = 300.0
"""Seconds after which what went wrong is looked at again, if its turn does not come sooner."""
FRESH = 12 * 3600.0
"""Seconds for which the proof of a version is good: it is not read again sooner. What lies in a remote store costs money to read."""


def rest(core: float, moved: int, bandwidth: int | None) -> float:
    """Seconds to pause after a piece that took `core` seconds of this thread's processor time and moved `moved` bytes here from elsewhere.

    `bandwidth`: bytes per second that the job allows; None: not limited.
    """
    worked = max(core, moved * WIRE_SECONDS)
    return max(worked / SHARE, 0.0 if bandwidth is None else moved / (bandwidth * SHARE))


@dataclass(frozen=True)
class Look:
    """The last rehearsal of one tier that came to an end."""

    course: tuple[int, str]
    """Attempt and placement in which it was."""
    began: float
    """Seconds of the clock that `due_in` is asked with."""
    good: bool
    whole: Version | None = None
    """The version, if it was one that was proved whole."""


def due_in(now: float, every: float, last: Look | None, course: tuple[int, str], newest: Version) -> float:
    """Seconds until a tier whose newest complete version is `newest` shall be rehearsed (again); 0: now."""
    if last is None or last.course != course:
        return 0.0
    wait = every if last.good else min(every, AGAIN)
    if last.whole == newest:
        wait = max(wait, FRESH)
    return max(0.0, last.began + wait - now)
