"""Decides which source brings which chunk of an artifact: the rules, without sockets or threads.

Whoever is free takes the next chunk, so a fast source brings more. A chunk that came damaged is asked of
another source, if there is one. What a source owes for long may be asked of a second one as well, so that one
that stalls holds up nobody. A source that brings damaged chunks repeatedly is dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

Source = TypeVar("Source", bound=Hashable)

DAMAGED_MOST = 2
"""Damaged chunks after which a source is dropped."""
OVERDUE = 1.0
"""Seconds after which a chunk that was asked for is asked of another source too."""


class Gathering(Generic[Source]):
    """Not thread-safe. Times are seconds of any monotonic clock."""

    def __init__(self, chunks: int, sources: Collection[Source]) -> None:
        self._waiting = deque(range(chunks))
        self._asked: dict[int, dict[Source, float]] = {}
        self._damaged: dict[int, set[Source]] = {}
        self._faults: Counter[Source] = Counter()
        self._live = set(sources)
        self._missing = set(range(chunks))

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def over(self) -> bool:
        """Complete, or nobody is left who could bring the rest."""
        return not self._missing or not self._live

    def is_here(self, index: int) -> bool:
        return index not in self._missing

    def is_live(self, source: Source) -> bool:
        return source in self._live

    def brought_damaged(self, source: Source) -> bool:
        """Whether anything from it did not match: its copy may be bad, or the line."""
        return self._faults[source] > 0

    def take(self, source: Source, now: float) -> int | None:
        """The chunk that `source` should be asked for; None if there is none for it now."""
        if source not in self._live:
            return None
        index = self._first_waiting(source)
        if index is None:
            index = self._overdue(source, now)
        if index is not None:
            self._asked.setdefault(index, {})[source] = now
        return index

    def arrived(self, index: int, source: Source) -> bool:
        """It came, and is verified. False if it was here already."""
        self._answered(index, source)
        if index not in self._missing:
            return False
        self._missing.discard(index)
        if index in self._waiting:
            self._waiting.remove(index)
        return True

    def damaged(self, index: int, source: Source) -> None:
        """It came, and does not match its digest."""
        self._damaged.setdefault(index, set()).add(source)
        self._faults[source] += 1
        self.lost((index,), source)
        if self._faults[source] >= DAMAGED_MOST:
            self.drop(source)

    def lost(self, indices: Iterable[int], source: Source) -> None:
        """They were asked for, and will not come."""
        for index in indices:
            self._answered(index, source)
            if index in self._missing and index not in self._asked and index not in self._waiting:
                self._waiting.append(index)

    def drop(self, source: Source) -> None:
        """Nothing more is asked of it; what it owes is asked of others."""
        self._live.discard(source)
        self.lost([index for index, asked in self._asked.items() if source in asked], source)

    def _answered(self, index: int, source: Source) -> None:
        asked = self._asked.get(index)
        if asked is not None:
            asked.pop(source, None)
            if not asked:
                del self._asked[index]

    def _first_waiting(self, source: Source) -> int | None:
        for place, index in enumerate(self._waiting):
            spoiled = self._damaged.get(index, set())
            if source not in spoiled or self._live <= spoiled:
                del self._waiting[place]
                return index
        return None

    def _overdue(self, source: Source, now: float) -> int | None:
        late = [
            (since, index)
            for index, asked in self._asked.items()
            if len(asked) == 1 and source not in asked and source not in self._damaged.get(index, set())
            for since in asked.values()
            if now - since >= OVERDUE and index in self._missing
        ]
        return min(late)[1] if late else None
