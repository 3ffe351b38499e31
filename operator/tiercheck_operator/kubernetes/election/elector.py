"""Holds the Lease, or waits for it, in a thread of its own.

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
from typing import Any, Protocol

from tiercheck.failpoints import failpoint
from tiercheck_operator.kubernetes.client import ApiFailure
from tiercheck_operator.kubernetes.cluster_facts import DEPLOYMENT, owner_metadata
from tiercheck_operator.kubernetes.election.candidate import Candidate, LeaseMove, Record, Terms

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def parse_lease(raw: Mapping[str, Any]) -> Record:
    """Tolerant: whatever is missing counts as not held."""
    spec = raw.get("spec") or {}
    return Record(
        holder=str(spec.get("holderIdentity") or ""),
        duration=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
        mark=str(spec.get("renewTime") or ""),
    )


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
"""Waiting replicas look at most this much later, as a part of the pause, so that they do not all ask at once.
"""


class Api(Protocol):
    """The calls that are needed, each blocking. All raise ApiFailure."""

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]: ...


def boot_clock() -> float:
    """Seconds that go on while the process is stopped and, where the system can tell, while the machine
    sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Elector(threading.Thread):
    """`changed` is told True and False in turn, from this thread.

    `lease`: its namespace and name. `alive`: False holds a renewal back, so that the lead is lost."""

    def __init__(
        self,
        api: Api,
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
                self._raw = self._read()
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
        """Stop for good; if the lease is ours it is given back, so that another replica need not wait for it
        to run out."""
        self._ending.set()
        if self.is_alive():
            self.join(self._terms.call * 2)
        if not self._candidate.leads(self._clock()) or self._raw is None:
            return
        try:
            self._write("")
        except ApiFailure as error:
            log.warning("lease %s was not given back: %s", self._lease, error)

    def _read(self) -> dict[str, Any] | None:
        try:
            return self._api.call("GET", self._path + "/" + self._lease)
        except ApiFailure as error:
            if error.not_found:
                return None
            raise

    def _write(self, holder: str) -> None:
        belonging = self._belonging() if self._raw is None else None
        sent = self._clock()
        now = datetime.datetime.now(datetime.UTC)
        body = build_lease(
            self._lease,
            self._namespace,
            self._raw,
            holder=holder,
            duration=self._terms.duration,
            now=now,
            belonging=belonging,
        )
        if self._raw is None:
            self._raw = self._api.call("POST", self._path, body)
        else:
            self._raw = self._api.call("PUT", self._path + "/" + self._lease, body)
        failpoint("after-lease")
        self._candidate.wrote(parse_lease(self._raw), sent)

    def _belonging(self) -> dict[str, Any]:
        """Of a lease that is made now: the Deployment has its name."""
        try:
            found = self._api.call("GET", DEPLOYMENT.format(namespace=self._namespace, name=self._lease))
        except ApiFailure as error:
            if error.not_found or error.refused:
                return {}
            raise
        return owner_metadata(found)

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

    @property
    def _path(self) -> str:
        return LEASES.format(namespace=self._namespace)
