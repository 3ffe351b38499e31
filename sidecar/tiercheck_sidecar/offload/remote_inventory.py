"""Lists the versions of the remote tier when that is due, and tries the tier out before it counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tiercheck.protocol.report import SPARE
from tiercheck.protocol.version import Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.remote import RemoteArchived, RemoteCorrupt, RemoteMissing, RemoteStore

log = logging.getLogger(__name__)

_LIST_EVERY = 30.0
_NOT_SAFE = "RemoteNotSafe"
"""Reason of the problem that the store does not keep a promise that is relied on. It lasts; other troubles of
the store come and go."""
_EXAMINATIONS = 3
"""Times that a store is tried out, if it could not be to the end."""


class RemoteListing:
    """Used by one thread."""

    def __init__(self, state: SidecarState, tell_stored: Callable[[tuple[Version, ...]], None]) -> None:
        """`tell_stored`: tells the coordinator what worker 0 has found."""
        self._state, self._tell_stored = state, tell_stored
        self._listed_at: float | None = None
        self._listed_for: Version | None = None
        self._listed_as: int | None = None
        """Which worker this was then."""
        self._worlds: dict[Version, int] = {}
        """By how many ranks each stored version was made, 0 if that cannot be read."""
        self._examinations = 0
        self._broken: dict[str, str] = {}
        """What was found when the store was tried out, by the name of the check."""

    def look_again(self) -> None:
        """The store was in trouble: what this worker knows of it counts no more."""
        self._listed_at = None

    def list_when_due(self, store: RemoteStore, verdict: TierVerdict | None) -> None:
        """Each sidecar at its start, so that it is known whether its node reaches the store; later only
        worker 0, who tells the others."""
        now = time.monotonic()
        self._tell_broken(store)
        mark = verdict.watermarks.remote if verdict else None
        if self._listed_at is None:
            store.check()
            self._tell_broken(store)
        elif self._state.config.worker != 0:
            self._listed_as = self._state.config.worker
            if verdict is not None and verdict.stored is not None:
                self._found(verdict.stored)
            return
        elif self._listed_as == 0 and mark == self._listed_for and now - self._listed_at <= _LIST_EVERY:
            return
        versions = tuple(store.versions())
        self.learn_attempts(store)
        self._listed_at, self._listed_for, self._listed_as = now, mark, self._state.config.worker
        self.publish(store, versions)
        if self._state.config.worker == 0 and self._examinations < _EXAMINATIONS:
            self._examine(store)

    def learn_attempts(self, store: RemoteStore) -> None:
        """Learn of newer attempts that are announced in the store."""
        state = self._state
        for told in store.newest_attempts(state.config.job_uid, state.newest_attempt.attempt):
            state.learn(told)

    def publish(self, store: RemoteStore, versions: tuple[Version, ...]) -> None:
        """The store holds these versions."""
        self._found(versions, self._ranks_of(store, versions))
        if (
            self._state.config.worker == 0
        ):  # what another one found long ago is no more true when it takes that place
            self._tell_stored(versions)

    def _examine(self, store: RemoteStore) -> None:
        """Once, by one worker: what the store does not do as it should is said before it does harm. Nothing
        is left undone for it."""
        findings = list(store.examine())
        for finding in findings:
            log.log(
                logging.INFO if finding.ok else logging.WARNING,
                "remote tier: %s: %s",
                finding.name,
                finding.message,
            )
        self._broken = {each.name: each.message for each in findings if not each.ok and not each.passing}
        self._tell_broken(store)
        self._examinations = (
            self._examinations + 1 if any(each.passing for each in findings) else _EXAMINATIONS
        )

    def _tell_broken(self, store: RemoteStore) -> None:
        """What the store showed when it was tried out comes before what is seen while it is used."""
        seen = store.shortcomings | self._broken
        told = " ".join(f"{name}: {message}" for name, message in seen.items() if message)
        self._state.problem(_NOT_SAFE, told)

    def _ranks_of(self, store: RemoteStore, versions: tuple[Version, ...]) -> tuple[int, ...]:
        """By how many ranks each version was made. Manifests name every rank, so one worker of the job reads
        them, each once."""
        if self._state.config.worker not in (0, SPARE):  # a spare may yet become worker 0
            return ()
        for version in set(versions) - set(self._worlds):
            try:
                self._worlds[version] = store.read_manifest(version).world_size
            except (RemoteArchived, RemoteCorrupt, RemoteMissing) as error:
                log.warning("manifest of %s: %s", version, error)
                self._worlds[version] = 0
        self._worlds = {version: self._worlds[version] for version in versions}
        return tuple(self._worlds.values())

    def _found(self, versions: tuple[Version, ...], ranks: tuple[int, ...] = ()) -> None:
        self._state.report_remote(True, "", versions, ranks)
        self._state.withdraw("Remote", but=_NOT_SAFE)
