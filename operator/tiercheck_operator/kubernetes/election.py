"""Elects the leading replica by a Lease, which a thread renews or waits for.

So a busy event loop does not lose the lead, and a stuck one does. `leads` may be called from any thread right
before a write: it is a fence based on time, and does not depend on a message.
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
from tiercheck_operator.model.serialization import At, from_api


# As in client-go's leaderelection, a replica leads while it keeps renewing, and takes over from another one
# only after it has itself observed that one's record unchanged for a whole duration. So clocks of different
# machines are never compared: times in the record only inform users. The leader counts from the moment
# *before* it sent a renewal, the others from the moment after they saw it, and the leader stops acting
# (`renew_within`) well before they may begin (`duration`).
@dataclass(frozen=True)
class Terms:
    """Lease times in seconds. Raises ValueError unless 0 < 2 retry <= renew_within <= duration / 1.2."""

    duration: float = 8.0
    """Seconds after which an unchanged record may be taken over."""
    renew_within: float = 5.0
    """Seconds after which a leader that could not renew stops acting."""
    retry: float = 1.0
    """Seconds between two checks of the Lease."""

    def __post_init__(self) -> None:
        if not (0 < self.retry * 2 <= self.renew_within and self.renew_within * 1.2 <= self.duration):
            raise ValueError(
                f"a lease of {self.duration:g} s needs renewals within at most {self.duration / 1.2:g} s, "
                "tried at least twice"
            )

    @staticmethod
    def of(duration: float) -> Terms:
        """Derives all terms in the usual proportions. Raises ValueError unless `duration` is positive."""
        return Terms(duration, duration * 5 / 8, duration / 8)

    @property
    def call(self) -> float:
        """Returns the timeout, in seconds, of one call to the API server."""
        return self.renew_within / 2


@dataclass(frozen=True)
class Record:
    """The spec of a Lease. `holder` is empty once it is released."""

    holder: Annotated[str, At("holderIdentity")] = ""
    duration: Annotated[float, At("leaseDurationSeconds")] = 0.0
    mark: Annotated[str, At("renewTime")] = ""
    """A value that differs after each renewal; it is only compared for equality."""


class LeaseMove(Enum):
    CREATE = "there is no lease: make it ours"
    TAKE = "no process holds it any more: take it over"
    RENEW = "it is ours: say so again"
    WAIT = "another process holds it"


class Candidate:
    """One replica's view of the lease. `now` is always the local monotonic time, in seconds."""

    def __init__(self, identity: str, terms: Terms) -> None:
        self.identity, self.terms = identity, terms
        self._seen: Record | None = None
        self._seen_at = 0.0
        self._until = float("-inf")

    def see(self, record: Record | None, now: float) -> LeaseMove:
        """Returns the next move for the lease as read (None: no lease). Another holder ends the own lead."""
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
        # During an upgrade the other replica may use longer terms.
        patience = max(self.terms.duration, record.duration)
        return LeaseMove.TAKE if now - self._seen_at >= patience else LeaseMove.WAIT

    def wrote(self, record: Record, sent: float) -> None:
        """Notes that the server accepted `record`, which was sent at `sent`."""
        self._seen, self._seen_at = record, sent
        self._until = sent + self.terms.renew_within if record.holder == self.identity else float("-inf")

    def leads(self, now: float) -> bool:
        """Returns whether this replica leads at this moment."""
        return now < self._until


def parse_lease(raw: Mapping[str, Any]) -> Record:
    """Parses a Lease; one with missing fields counts as not held."""
    return from_api(Record, raw.get("spec") or {})


log = logging.getLogger(__name__)

_JITTER = 0.2
"""The share of the pause by which waiting replicas check later at most, so that their checks spread."""


def boot_clock() -> float:
    """Returns seconds that advance while the process is stopped and, with CLOCK_BOOTTIME, in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Elector(threading.Thread):
    """The thread that holds the lease or waits for it. It calls `changed` with True and False in turn.
    `lease`: its namespace and name. `alive`: while False, the lease is not renewed, so the lead is lost."""

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
    ) -> None:
        super().__init__(name="leader election", daemon=True)
        self._api, (self._namespace, self._lease) = api, lease
        self._candidate, self._terms = Candidate(identity, terms), terms
        self._changed, self._alive, self._clock = changed, alive, clock
        self._ending = threading.Event()
        self._led = False
        self._raw: dict[str, Any] | None = None
        """The lease as last read or written; None: it must be read first."""
        self._holder = ""
        self._failing = False

    @property
    def identity(self) -> str:
        return self._candidate.identity

    def leads(self) -> bool:
        """Returns whether this replica leads at this moment."""
        return not self._ending.is_set() and self._candidate.leads(self._clock())

    @property
    def died(self) -> bool:
        """Returns whether the thread was started and has ended without `release` or `retire`."""
        return self.ident is not None and not self.is_alive() and not self._ending.is_set()

    def retire(self) -> None:
        """Stops for good, but lets the lease expire."""
        self._raw = None
        self._ending.set()

    def run(self) -> None:
        while not self._ending.is_set():
            began = self._clock()
            try:
                self.look()
                self._notify_if_changed()
            except Exception:
                # The next round retries after any error; until then the lead can only expire.
                log.exception("a look at lease %s failed", self._lease)
                self._raw = None
            pause = self._terms.retry
            if self._led:  # a slow renewal must not delay the next one as well
                pause = max(0.0, began + pause - self._clock())
            else:
                pause *= 1 + random.uniform(0.0, _JITTER)
            self._ending.wait(pause)

    def look(self) -> None:
        """Does one round: reads the lease if necessary, and writes it if that is allowed."""
        try:
            if self._raw is None or not self._led:
                self._raw = self._api.find(LEASES, self._namespace, self._lease)
            lease = None if self._raw is None else parse_lease(self._raw)
            move = self._candidate.see(lease, self._clock())
            holder = "" if lease is None else lease.holder
            if holder != self._holder and holder not in ("", self.identity):
                log.info("%s leads; this replica waits", holder)
            self._holder = holder
            if move is LeaseMove.WAIT or not self._alive():
                return
            self._write(self._candidate.identity)
            self._failing = False
        except ApiFailure as error:
            self._raw = None  # it may have changed, or the write may have arrived after all
            if not error.conflict:
                slow = (
                    f"; if it answers, but later than in {self._terms.call:g} s, raise "
                    "TIERCHECK_LEASE_SECONDS (chart: settings.leaseSeconds)"
                )
                level = logging.DEBUG if self._failing else logging.WARNING
                log.log(level, "lease %s: %s%s", self._lease, error, "" if error.status else slow)
                self._failing = True

    def release(self) -> None:
        """Stops for good and releases an own lease, so that no other replica waits until it expires."""
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
        """Writes the lease with this holder (empty: released), unless it has changed since it was read."""
        if self._raw is None:
            # The Deployment has the lease's name.
            owner = belonging(self._api, self._namespace, self._lease)
            metadata = {"name": self._lease, "namespace": self._namespace, **owner}
        else:
            metadata = self._raw["metadata"]
        sent = self._clock()
        # This time only informs users, and makes each renewal differ from the last one.
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = (self._raw or {}).get("spec") or {}
        same = self._raw is not None and holder == (old.get("holderIdentity") or "")
        transitions = int(old.get("leaseTransitions") or 0)
        spec = {
            "holderIdentity": holder,
            # The shortest possible duration for a released lease.
            "leaseDurationSeconds": math.ceil(self._terms.duration) if holder else 1,
            "acquireTime": old.get("acquireTime") if same else stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions if self._raw is None or same or not holder else transitions + 1,
        }
        body = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata, "spec": spec}
        if self._raw is None:
            self._raw = self._api.create(LEASES, self._namespace, body)
        else:
            self._raw = self._api.replace(LEASES, self._namespace, self._lease, body)
        failpoint("after-lease")
        self._candidate.wrote(parse_lease(self._raw), sent)

    def _notify_if_changed(self) -> None:
        leads = self.leads()
        if leads != self._led:
            self._led = leads
            log.info("%s: this replica %s", self.identity, "leads now" if leads else "does not lead any more")
            self._changed(leads)
