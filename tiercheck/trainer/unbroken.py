"""A delta is worth its slot only if a snapshot leads to it: after a gap, none is taken until there is a new one."""

from __future__ import annotations

import threading


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
        """A snapshot was begun. It counts at once: if deltas waited until it is complete, they would leave a gap behind it."""
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
