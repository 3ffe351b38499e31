"""Decides which deltas are worth taking: there is time for all, and a snapshot leads to them.

The bytes of deltas decide how often snapshots are taken, and whether memory holds them. Their time decides
whether they are taken at all: training waits for the copy of one step before it makes the next. Deltas that
take as long as steps do would slow it down, so all are taken or none: a chain with a gap leads nowhere.

After a gap, none is taken until there is a new snapshot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

MOST = 0.8
"""The part of a step that its delta may take. What is left is for the update itself, during which nothing is
copied, and for snapshots."""
AGAIN = 0.4
"""The same where none are taken: further below, so that the answer does not change with every breath of the
machine."""
ASKED, ASKED_AGAIN = 0.05, 0.025
"""The part of a step that modules may take to tell what they keep beside their tensors. Training stands still
meanwhile: some (TransformerEngine's with fp8) wait for the device, each of them, so that the lead of the host
is lost."""
WINDOW_SECONDS = 60.0
WINDOW_STEPS = 8
"""Both must have passed before there is an answer: the first deltas pay for memory that is touched for the
first time."""
_KEPT = 1024
"""Measurements of a window."""


def there_is_time(taken: bool, delta: float, step: float, asked: float = 0.0) -> bool:
    """Whether deltas shall be taken at every step. `taken`: whether they are now. Seconds that one takes the
    saver, that a step takes without what it waits for copies, and that modules take of it to tell their extra
    state.
    """
    return delta <= (MOST if taken else AGAIN) * step and asked <= (ASKED if taken else ASKED_AGAIN) * step


class Pace:
    """Measures both. The saver's thread reports deltas, the training thread all else."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deltas: deque[float] = deque(maxlen=_KEPT)
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._asked: deque[float] = deque(maxlen=_KEPT)
        self._waited = 0.0
        self._last = self._window = clock()
        self.delta = self.asked = 0.0
        """Seconds of a delta, by the newest window that had enough of them."""
        self.step = 0.0
        """Seconds of a step."""

    def begin_step(self) -> None:
        """The first step begins now."""
        self._last = self._window = self._clock()
        self._waited = 0.0

    def note_work(self, seconds: float) -> None:
        """Saver: a delta is in its slot after so much work."""
        self._deltas.append(seconds)

    def note_wait(self, seconds: float) -> None:
        """For copies, where nothing else could go on meanwhile."""
        self._waited += seconds

    def note_extra_state(self, seconds: float) -> None:
        """So long modules took to tell their extra state."""
        self._asked.append(seconds)

    def ends_step(self, taken: bool) -> bool:
        """A step ends. Whether deltas shall be taken from now on, given whether they are now."""
        now = self._clock()
        self._steps.append(max(0.0, now - self._last - self._waited))
        self._last, self._waited = now, 0.0
        enough = len(self._steps) >= WINDOW_STEPS and (not taken or len(self._deltas) >= WINDOW_STEPS)
        if not enough or now - self._window < WINDOW_SECONDS:
            return taken
        # Evaluations, and slots that are touched for the first time, are not the rule: so medians.
        self.step = median(self._steps)
        if taken:
            self.delta = median(list(self._deltas))
            self.asked = median(list(self._asked)) if self._asked else 0.0
        self._window = now
        self._deltas.clear()
        self._steps.clear()
        self._asked.clear()
        return there_is_time(taken, self.delta, self.step, self.asked)


class Unbroken:
    """Which steps a chain can reach. Both the training thread and the saver's report here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self._gap = 0
        """Newest step whose delta is missing."""
        self._bases: set[int] = set()
        """Steps of snapshots taken, or being taken, from which every delta since was taken as well."""

    @property
    def begun(self) -> bool:
        """Whether there was ever a snapshot to begin from."""
        return self._begun

    def restored(self, step: int) -> None:
        """Training begins from a version that the tiers hold, chain and all."""
        with self._lock:
            self._begun = True
            self._bases = {step}
            self._gap = step

    def snapshot(self, step: int) -> None:
        """A snapshot was begun. It counts at once: if deltas waited until it is complete, they would leave a
        gap behind it."""
        with self._lock:
            self._begun = True
            self._bases.add(step)
            self._bases = set(sorted(self._bases)[-2:])

    def snapshot_failed(self, step: int) -> None:
        with self._lock:
            self._bases.discard(step)

    def delta_missing(self, step: int) -> None:
        with self._lock:
            self._gap = max(self._gap, step)

    def reaches(self, step: int) -> bool:
        """Whether the delta of `step` would continue a chain."""
        with self._lock:
            return any(self._gap <= base < step for base in self._bases)
