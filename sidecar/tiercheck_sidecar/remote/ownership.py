"""Gives a job's remote folder one owner, so that two jobs never destroy each other's versions.

Jobs of the same namespace and name meet in one folder if they share a bucket and a prefix: one after the
other in a cluster, which is how a job is resumed; but also in a development and a production cluster, or in a
copy made for disaster recovery.

Every owner is an object `owner/<number>.json`, created only if there is none; the highest number counts. So
only one of two concurrent claims succeeds, and none is overwritten. Kubernetes lets only one job of a name
exist at a time in a cluster, so there the next one succeeds the last automatically. In another cluster a user
has to confirm it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck_sidecar.remote import keys
from tiercheck_sidecar.remote.errors import Reason, RemoteCorrupt, RemoteError, RemoteOwned
from tiercheck_sidecar.remote.objects import Objects

_FORMER = 100
_TRIES = 5


@dataclass(frozen=True)
class StoreOwner:
    """A job that owns its folder, as written there."""

    cluster: str
    """UID of its cluster's namespace kube-system; empty: not known."""
    job_uid: str
    since: float = 0.0
    """Unix seconds by its own clock; for display."""
    former: tuple[str, ...] = ()
    """UIDs of the jobs that owned the folder before; at most the last `_FORMER`."""

    @property
    def described(self) -> str:
        return f"job UID {self.job_uid} of cluster {self.cluster or 'unknown'} since {_day(self.since)}"


@dataclass(frozen=True)
class Claimant:
    """A job that asks to write."""

    cluster: str
    """UID of its cluster's namespace kube-system; empty: not known."""
    job_uid: str
    take_over_from: str = ""
    """UID of the job that it may replace as owner, once, in whatever cluster that job is."""


def owns(owner: StoreOwner | None, claimant: Claimant) -> bool:
    """Returns whether the folder belongs to the claimant."""
    return owner is not None and owner.job_uid == claimant.job_uid and claimant.cluster in ("", owner.cluster)


def may_claim(owner: StoreOwner | None, claimant: Claimant) -> bool:
    """Returns whether the claimant may become the next owner without a user's consent."""
    if owner is None or (owner.job_uid == claimant.job_uid and not owner.cluster):
        return True  # an owner that a user named may lack the cluster; the job then adds it
    if owner.job_uid == claimant.job_uid or claimant.job_uid in owner.former:
        # The owner is a clone of the claimant or its successor: the remains of a deleted job must not take
        # the folder back by themselves.
        return False
    if owner.cluster and owner.cluster == claimant.cluster:
        return True
    return bool(claimant.take_over_from) and owner.job_uid == claimant.take_over_from


def refusal(owner: StoreOwner, claimant: Claimant, location: str) -> str:
    """Returns the message for a claimant that may not write: the folder's owner and the advice."""
    lost = claimant.job_uid in owner.former
    return (
        f"{location} {'was taken over by' if lost else 'belongs to'} {owner.described}; this is job UID "
        f"{claimant.job_uid} of cluster {claimant.cluster or 'unknown'}. Nothing there was touched. Give "
        "this job another prefix, which pods use that are made from then on; or, if that one must not write "
        "there any more, run: kubectl tiercheck remote take-over"
        + ("." if lost else f", or set tiers.remote.takeOverFrom: {owner.job_uid} before this job begins.")
    )


def _day(when: float) -> str:
    try:
        return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


class Ownership:
    """Reads and claims a folder's owner. Thread-safe: caches immutable data only. Raises RemoteError."""

    def __init__(self, objects: Objects, claimant: Claimant | None) -> None:
        self._objects, self._claimant = objects, claimant
        self._known: tuple[int, StoreOwner] | None = None

    def owner(self) -> StoreOwner | None:
        """Returns the owner of the folder; None: it has none yet."""
        return self._read(self._number())

    def check(self) -> None:
        """Raises RemoteOwned if the claimant neither owns the folder nor may claim it.

        Sends no request without a claimant."""
        if self._claimant is not None:
            self._require_claimable(self.owner(), self._claimant)

    def claim(self) -> None:
        """Makes the claimant the folder's owner, or raises RemoteOwned.

        Sends no request without a claimant."""
        claimant = self._claimant
        if claimant is None:
            return
        for _ in range(_TRIES):
            number = self._number()
            owner = self._read(number)
            self._require_claimable(owner, claimant)
            if owns(owner, claimant) or self._succeed(
                number, owner, StoreOwner(claimant.cluster, claimant.job_uid)
            ):
                return
        raise RemoteError(
            Reason.OWNED, f"{self._objects.location} changes hands all the time.", retriable=True
        )

    def assign_owner(self, job_uid: str, cluster: str = "") -> StoreOwner | None:
        """Makes a job the folder's owner by a user's decision, and returns the previous owner."""
        while True:
            number, owner = self._number(), None
            with contextlib.suppress(RemoteCorrupt):  # this repairs it
                owner = self._read(number)
            if owner is not None and owner.job_uid == job_uid and cluster in ("", owner.cluster):
                return owner
            if self._succeed(number, owner, StoreOwner(cluster, job_uid)):
                return owner

    def _require_claimable(self, owner: StoreOwner | None, claimant: Claimant) -> None:
        if owner is not None and not owns(owner, claimant) and not may_claim(owner, claimant):
            raise RemoteOwned(refusal(owner, claimant, self._objects.location))

    def _succeed(self, number: int, before: StoreOwner | None, owner: StoreOwner) -> bool:
        former = (
            ()
            if before is None
            else tuple(each for each in (*before.former, before.job_uid) if each != owner.job_uid)
        )
        owner = replace(owner, since=time.time(), former=former[-_FORMER:])
        if not self._objects.create(keys.owner_key(number + 1), to_json(owner)):
            return False
        with contextlib.suppress(RemoteError):  # only the highest counts
            self._objects.delete([keys.owner_key(number)] if number else [])
        return True

    def _number(self) -> int:
        return max((keys.owner_number(stored.key) for stored in self._objects.list(keys.OWNERS)), default=0)

    def _read(self, number: int) -> StoreOwner | None:
        if number == 0:
            return None
        known = self._known
        if known is not None and known[0] == number:
            return known[1]
        key = keys.owner_key(number)
        place = f"{self._objects.location}/{key}"
        body = self._objects.read(key)
        if body is None:
            raise RemoteError(Reason.OWNED, f"{place} went while it was being read.", retriable=True)
        try:
            owner = from_json(body, StoreOwner)
        except Malformed as error:
            raise RemoteCorrupt(
                f"{place}, which names the owner of the folder, cannot be read: {error}."
            ) from error
        self._known = number, owner
        return owner
