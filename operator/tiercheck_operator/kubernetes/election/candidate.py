"""When a replica may lead: the rules of the Lease, without a clock or an API of their own.

As client-go's leaderelection does it: a replica leads while it keeps renewing, and takes over from another
one only after it has itself watched that one's record stand still for a whole duration. So no clock is ever
compared with another machine's: times that others wrote are for people to read. The leader counts from the
moment *before* it sent a renewal, the others from the moment after they saw it, and the leader stops acting
(`renew_within`) well before they may begin (`duration`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Terms:
    """Seconds. Raises ValueError unless retry < renew_within < duration, each by a factor that leaves room
    for a lost call."""

    duration: float = 8.0
    """After which a record that stands still may be taken over."""
    renew_within: float = 5.0
    """After which a leader that could not renew stops acting."""
    retry: float = 1.0
    """Between two looks."""

    def __post_init__(self) -> None:
        if not (0 < self.retry * 2 <= self.renew_within and self.renew_within * 1.2 <= self.duration):
            raise ValueError(
                f"a lease of {self.duration:g} s needs renewals within at most {self.duration / 1.2:g} s, "
                "tried at least twice"
            )

    @staticmethod
    def of(duration: float) -> Terms:
        """In the usual proportions. Raises ValueError unless `duration` is positive."""
        return Terms(duration, duration * 5 / 8, duration / 8)

    @property
    def call(self) -> float:
        """How long one call to the API server may take."""
        return self.renew_within / 2


@dataclass(frozen=True)
class Record:
    """The spec of a Lease. `holder` is empty once it was released."""

    holder: str
    duration: float
    transitions: int
    mark: str
    """Anything that differs after each renewal; only compared for equality."""


class LeaseMove(Enum):
    CREATE = "there is no lease: make it ours"
    TAKE = "nobody holds it any more: take it over"
    RENEW = "it is ours: say so again"
    WAIT = "somebody else holds it"


class Candidate:
    """One replica's view of the lease. `now` is always this machine's monotonic time, in seconds."""

    def __init__(self, identity: str, terms: Terms) -> None:
        self.identity, self.terms = identity, terms
        self._seen: Record | None = None
        self._seen_at = 0.0
        self._until = float("-inf")

    def see(self, record: Record | None, now: float) -> LeaseMove:
        """What to do about the lease as it was just read; `record` is None if there is none. Somebody else's
        ends our lead."""
        if record is None:
            self._until = float("-inf")
            return LeaseMove.CREATE
        if record.holder != self.identity:
            self._until = float("-inf")
        if record != self._seen:
            self._seen, self._seen_at = record, now
        if record.holder == self.identity:
            return LeaseMove.RENEW
        if not record.holder:
            return LeaseMove.TAKE
        # During an upgrade the other may keep to longer terms than ours.
        patience = max(self.terms.duration, record.duration)
        return LeaseMove.TAKE if now - self._seen_at >= patience else LeaseMove.WAIT

    def wrote(self, record: Record, sent: float) -> None:
        """The server took our record, in an answer to what was sent at `sent`."""
        self._seen, self._seen_at = record, sent
        self._until = sent + self.terms.renew_within if record.holder == self.identity else float("-inf")

    def leads(self, now: float) -> bool:
        """Whether this replica may act at this very moment."""
        return now < self._until
