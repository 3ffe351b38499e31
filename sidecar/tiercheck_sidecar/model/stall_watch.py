"""When a rank that makes no step has hung: what is unusual for this job, not what somebody guessed.

The limit grows with the job's own step time and with the longest pause that was seen between two of its steps
(an evaluation, a checkpoint of the user's own), so that what happened once without harm is no hang the next
time. A rank that has hung up its connection is not watched: it has closed its Checkpointer, or has ended,
which somebody else sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.directive import HangLimits

_PAUSES = 3.0
"""Times the longest pause that was seen."""
_ASLEEP = 10.0
"""Seconds between two looks after which it was we who were stopped; then everybody gets the time again."""


@dataclass
class _Rank:
    step: int
    at: float
    """Of its last sign of life."""
    here: bool = True


class StallWatch:
    """Of the local ranks in one attempt. Not thread-safe: the state's lock guards it. Times are unix seconds
    by one clock."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._started: float | None = None
        self._pause = 0.0
        """The longest between two signs of life of a rank."""
        self._looked: float | None = None
        self._awake = 0.0

    def started(self, now: float) -> None:
        """The command runs, or was found running."""
        self._started = now

    def progress(self, rank: int, step: int, now: float) -> None:
        """A sign of life: `step` was reached, now or before."""
        self._notice_sleep(now)
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(step, now)
            return
        if known.here:
            self._pause = max(self._pause, now - max(known.at, self._awake))
        known.step, known.at, known.here = max(step, known.step), now, True

    def _notice_sleep(self, now: float) -> None:
        if self._looked is not None and now - self._looked > _ASLEEP:
            self._awake = self._looked = now

    def left(self, rank: int) -> None:
        if rank in self._ranks:
            self._ranks[rank].here = False

    def slowest(self) -> tuple[int, int] | None:
        """(rank, step) of the rank that is furthest behind; None: none has made a step."""
        found = min(((entry.step, rank) for rank, entry in self._ranks.items()), default=None)
        return None if found is None else (found[1], found[0])

    def stalled_since(
        self, now: float, limits: HangLimits | None, step_seconds: float | None
    ) -> float | None:
        """The last sign of life of the rank that has given none for longest, if that is too long ago."""
        self._notice_sleep(now)
        self._looked = now
        if limits is None:
            return None
        if not self._ranks:
            since, limit = self._started, limits.first_step
        else:
            since = min((entry.at for entry in self._ranks.values() if entry.here), default=None)
            limit = max(limits.seconds, limits.steps * (step_seconds or 0.0), _PAUSES * self._pause)
        if since is None or limit is None or now - max(since, self._awake) <= limit:
            return None
        return since
