"""Finds what the watches missed, and ends a process that does not do its work any more.

Deletions between two watches are made up for. A stale watch, an API server that cannot be reached for
minutes, or a look that does not end, makes `/healthz` say no, and Kubernetes starts the process anew. A stuck
event loop answers nothing at all, which is as good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.watches import Difference, Watched

log = logging.getLogger(__name__)

_GRACES = 5
"""Times the grace of a watch until a process that can list nothing is started anew. A server may be away for
as long as a control plane takes to start."""
_SETTLE = 1.0
"""Seconds after a watch began to list, before we list for ourselves."""


@dataclass(frozen=True)
class WatchedKind:
    """How a kind is listed, what is known of it, and what to do if a UID turns out to be gone."""

    api: str
    plural: str
    query: str
    known: Watched[Any]
    gone: Callable[[str], Awaitable[None]]
    namespaced: bool = True

    def paths(self, namespaces: tuple[str, ...]) -> list[str]:
        if not self.namespaced or not namespaces:
            return [f"{self.api}/{self.plural}"]
        return [f"{self.api}/namespaces/{namespace}/{self.plural}" for namespace in namespaces]


class Resync:
    """Every `every` seconds, and soon after a watch had to list anew. `grace` as in Hearing."""

    def __init__(
        self,
        kube: Kube,
        kinds: Mapping[str, WatchedKind],
        *,
        namespaces: tuple[str, ...],
        every: float,
        grace: float,
    ) -> None:
        self._kube, self._kinds, self._namespaces, self._every = kube, kinds, namespaces, every
        self._hearing = {kind: Hearing(kind, grace) for kind in kinds}
        self._compared: set[str] = set()
        self._due = asyncio.Event()
        self.seen_all = asyncio.Event()
        """Set as soon as all that there was when the watches began has been seen."""

    @property
    def complete(self) -> bool:
        """Whether everything that there was at the last look has been seen."""
        return self._compared == set(self._kinds) and all(
            hearing.complete for hearing in self._hearing.values()
        )

    def troubles(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        return [hearing.trouble(now) for hearing in self._hearing.values()]

    def heard(self, kind: str, uid: str, version: int, *, listed: bool) -> None:
        """By the watch; `listed`: as part of a list, which says nothing of what is gone."""
        self._hearing[kind].heard(uid, version)
        self._look_whether_all_is_seen()
        if listed:
            self._due.set()

    async def run(self, began: asyncio.Event) -> None:
        """For ever, from when the watches have begun."""
        await began.wait()
        while True:
            self._due.clear()
            for kind in self._kinds:
                try:
                    await self._compare(kind)
                except Exception as error:  # whatever it is, it is tried again
                    if self.seen_all.is_set():
                        log.info("%s: not compared with what the watch has shown: %s", kind, error)
                    else:
                        log.warning("no job is served yet: %s cannot be listed: %s", kind, error)
            self._look_whether_all_is_seen()
            pause = self._every if self.complete else min(self._every, 2 * _SETTLE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._due.wait()
                await asyncio.sleep(_SETTLE)

    def _look_whether_all_is_seen(self) -> None:
        if not self.seen_all.is_set() and self.complete:
            self.seen_all.set()

    async def _compare(self, name: str) -> None:
        kind, hearing = self._kinds[name], self._hearing[name]
        before = kind.known.uids()
        listed: dict[str, int] = {}
        for path in kind.paths(self._namespaces):
            try:
                listed |= await self._kube.list_versions(path, kind.query)
            except ApiFailure as error:
                if not error.not_found:  # the kind is not installed (any more)
                    raise
        difference = kind.known.compare(before, listed)
        for uid in difference.gone:
            log.info("%s %s is gone, and its watch did not say so", name, uid)
            hearing.forgotten(uid)
            await kind.gone(uid)
        hearing.compared(difference, asyncio.get_running_loop().time())
        self._compared.add(name)


class Hearing:
    """Judges the watch of one kind by what listings show and it has not. `grace`: seconds that it may be
    late."""

    def __init__(self, kind: str, grace: float) -> None:
        self.kind, self._grace = kind, grace
        self._missed: dict[str, tuple[int, float]] = {}
        """UID to the version that is being missed, and since when."""
        self._listed_at: float | None = None
        """When a listing last succeeded, or was first asked about."""

    def compared(self, difference: Difference, now: float) -> None:
        """The outcome of a listing at `now`."""
        self._listed_at = now
        self._missed = {
            uid: self._missed.get(uid, (version, now)) for uid, version in difference.unseen.items()
        }

    def heard(self, uid: str, version: int) -> None:
        """By the watch."""
        missed = self._missed.get(uid)
        if missed is not None and missed[0] <= version:
            del self._missed[uid]

    def forgotten(self, uid: str) -> None:
        self._missed.pop(uid, None)

    @property
    def complete(self) -> bool:
        """Whether everything that the last listing showed has been heard of."""
        return not self._missed

    def trouble(self, now: float) -> str:
        """A sentence; empty: none."""
        if self._listed_at is None:
            self._listed_at = now
        if now - self._listed_at > _GRACES * self._grace:
            return f"{self.kind}: the API server has answered no listing for {now - self._listed_at:.0f} s"
        late = [since for _, since in self._missed.values() if now - since > self._grace]
        if not late:
            return ""
        return (
            f"the watch of {self.kind} is deaf: {len(late)} objects have been different for "
            f"{now - min(late):.0f} s without a word of it"
        )


def stuck(begun: Mapping[str, float], now: float, limit: float) -> str:
    """Of jobs (by name) whose reconcile began at a time and has not ended; empty: none for longer than
    `limit` seconds."""
    late = {name: now - since for name, since in begun.items() if now - since > limit}
    if not late:
        return ""
    worst = max(late, key=lambda name: late[name])
    return f"{len(late)} jobs are stuck in a reconcile; {worst} for {late[worst]:.0f} s"
