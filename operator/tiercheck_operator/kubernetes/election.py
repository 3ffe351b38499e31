"""Decides by a Lease which replica leads, and holds it, or waits for it, in a thread.

So a busy event loop does not cost us the lead, and a stuck one does. `leads` may be asked from any thread,
right before anything is written: it is a fence by time, and needs no message to arrive.
"""

from __future__ import annotations

import datetime
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from tiercheck.failpoints import failpoint
from tiercheck_operator.kubernetes.api_server import LEASES, ApiFailure, ApiServer
from tiercheck_operator.kubernetes.owned_objects import belonging
from tiercheck_operator.model.spelling import At, read_as


# As client-go's leaderelection does it: a replica leads while it keeps renewing, and takes over from another
# one only after it has itself watched that one's record stand still for a whole duration. So no clock is ever
# compared with another machine's: times that others wrote are for people to read. The leader counts from the
# moment *before* it sent a renewal, the others from the moment after they saw it, and the leader stops acting
# (`renew_within`) well before they may begin (`duration`).
@dataclass(frozen=True)
class Terms:
    """Seconds. Raises ValueError unless retry < renew_within < duration, with room for a lost call each."""

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

    holder: Annotated[str, At("holderIdentity")] = ""
    duration: Annotated[float, At("leaseDurationSeconds")] = 0.0
    mark: Annotated[str, At("renewTime")] = ""
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
        """What to do about the lease as just read; `record`: None if none. Somebody else's ends our lead."""
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


def parse_lease(raw: Mapping[str, Any]) -> Record:
    """Tolerant: whatever is missing counts as not held."""
    return read_as(Record, raw.get("spec") or {})


def build_lease(
    name: str,
    namespace: str,
    before: Mapping[str, Any] | None,
    *,
    holder: str,
    duration: float,
    now: datetime.datetime,
    belonging: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The lease held by `holder` (empty: released), in place of `before`, whose resourceVersion is the
    precondition.

    `now` is only for people, and to make each renewal differ from the last one. `belonging`: metadata of a
    new one.
    """
    old = (before or {}).get("spec") or {}
    same = before is not None and holder == (old.get("holderIdentity") or "")
    stamp = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    metadata |= (belonging or {}) if before is None else before["metadata"]
    transitions = int(old.get("leaseTransitions") or 0)
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": holder,
            # The shortest there is, for a lease that was given back.
            "leaseDurationSeconds": math.ceil(duration) if holder else 1,
            "acquireTime": old.get("acquireTime") if same else stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions if before is None or same or not holder else transitions + 1,
        },
    }


log = logging.getLogger(__name__)

_JITTER = 0.2
"""Waiting replicas look at most this part of the pause later, so that they do not all ask at once."""


def boot_clock() -> float:
    """Seconds that go on while the process is stopped and, if that can be told, while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Elector(threading.Thread):
    """`changed` is told True and False in turn, from this thread.

    `lease`: its namespace and name. `alive`: False holds a renewal back, so that the lead is lost."""

    def __init__(
        self,
        api: ApiServer,
        lease: tuple[str, str],
        identity: str,
        terms: Terms,
        *,
        changed: Callable[[bool], None],
        alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = boot_clock,
        random: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(name="leader election", daemon=True)
        self._api, (self._namespace, self._lease) = api, lease
        self._candidate, self._terms = Candidate(identity, terms), terms
        self._changed, self._alive, self._clock, self._random = changed, alive, clock, random
        self._ending = threading.Event()
        self._led = False
        self._raw: dict[str, Any] | None = None
        """The lease as we wrote it last; None: it has to be read first."""
        self._holder = ""
        self._failing = False

    @property
    def identity(self) -> str:
        return self._candidate.identity

    def leads(self) -> bool:
        """Whether this replica may act at this very moment."""
        return not self._ending.is_set() and self._candidate.leads(self._clock())

    @property
    def died(self) -> bool:
        """Whether the thread was started and has ended without being told to."""
        return self.ident is not None and not self.is_alive() and not self._ending.is_set()

    def retire(self) -> None:
        """Never lead again, but leave the lease to run out."""
        self._raw = None
        self._ending.set()

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                self.look()
                self._tell()
            except Exception:
                # Whatever it was, the next look is still to come; until then time takes the lead away, if
                # anything.
                log.exception("a look at lease %s failed", self._lease)
                self._raw = None
            pause = self._terms.retry
            if not self._led:
                pause *= 1 + _JITTER * self._random()
            self._ending.wait(pause)

    def look(self) -> None:
        """One round: read what has to be read, write what may be written."""
        try:
            if self._raw is None or not self._led:
                self._raw = self._api.find(LEASES, self._namespace, self._lease)
            move = self._candidate.see(None if self._raw is None else parse_lease(self._raw), self._clock())
            self._note_holder()
            if move is LeaseMove.WAIT or not self._alive():
                return
            self._write(self._candidate.identity)
            self._failing = False
        except ApiFailure as error:
            self._raw = None  # it may have changed, or our write may have arrived after all
            if not error.conflict:
                log.log(
                    logging.DEBUG if self._failing else logging.WARNING, "lease %s: %s", self._lease, error
                )
                self._failing = True

    def release(self) -> None:
        """Stop for good; a lease of ours is given back, so that no other replica waits for it to run out."""
        self._ending.set()
        if self.is_alive():
            self.join(self._terms.call * 2)
        if not self._candidate.leads(self._clock()) or self._raw is None:
            return
        try:
            self._write("")
        except ApiFailure as error:
            log.warning("lease %s was not given back: %s", self._lease, error)

    def _write(self, holder: str) -> None:
        # The Deployment has the lease's name.
        owner = belonging(self._api, self._namespace, self._lease) if self._raw is None else None
        sent = self._clock()
        now = datetime.datetime.now(datetime.UTC)
        body = build_lease(
            self._lease,
            self._namespace,
            self._raw,
            holder=holder,
            duration=self._terms.duration,
            now=now,
            belonging=owner,
        )
        if self._raw is None:
            self._raw = self._api.create(LEASES, self._namespace, body)
        else:
            self._raw = self._api.replace(LEASES, self._namespace, self._lease, body)
        failpoint("after-lease")
        self._candidate.wrote(parse_lease(self._raw), sent)

    def _note_holder(self) -> None:
        holder = parse_lease(self._raw).holder if self._raw is not None else ""
        if holder != self._holder and holder not in ("", self.identity):
            log.info("%s leads; this replica waits", holder)
        self._holder = holder

    def _tell(self) -> None:
        leads = self.leads()
        if leads != self._led:
            self._led = leads
            log.info("%s: this replica %s", self.identity, "leads now" if leads else "does not lead any more")
            self._changed(leads)
