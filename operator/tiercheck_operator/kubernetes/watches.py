"""Caches the objects that the watches have shown, and skips invalid ones.

kopf's own indexes keep an object that was deleted between two watches: after a 410 Gone it lists again, and
does not report objects that have disappeared. So a listing of names and versions, regularly and after each
new list, finds vanished objects and stale watches.

One invalid object must not take the operator down for all others. It is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from tiercheck_operator.kubernetes.api_server import JOBS, ApiFailure, ApiResource
from tiercheck_operator.kubernetes.client import Kube, ListedState, version_of
from tiercheck_operator.model.observed import ContainerView, NodeView, PodView

log = logging.getLogger(__name__)

T = TypeVar("T")

_REMEMBERED = 1000
"""The number of invalid objects that are remembered; with more, some are logged again."""


class ObjectParser:
    """Parses objects, and logs each invalid one once."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()

    def parse_or_none(
        self, kind: str, raw: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], T | None]
    ) -> T | None:
        """Parses an object with `parse`; returns None if that raises any exception."""
        try:
            return parse(raw)
        except Exception as error:  # foreign data is not a bug here, however deeply nested
            metadata = raw["metadata"]
            uid = str(metadata["uid"])
            if uid not in self._logged:
                name = f"{metadata.get('namespace') or ''}/{metadata.get('name')}".lstrip("/")
                why = f"{type(error).__name__}: {str(error)[:200]}"
                log.warning("%s %s makes no sense, and is left out: %s", kind, name, why)
            self._logged[uid] = None
            self._logged.move_to_end(uid)
            if len(self._logged) > _REMEMBERED:
                self._logged.popitem(last=False)
            return None


V = TypeVar("V")


def version_in(raw: Mapping[str, Any]) -> int:
    return version_of(raw["metadata"].get("resourceVersion"))


def copy_of_job(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a job, as read by `object_reader`, for the cache."""
    found: dict[str, Any] = _copy(dict(raw))
    return found


def _copy(value: Any) -> Any:
    """Copies a value with interned field names: they are most of the memory of a parsed object."""
    if isinstance(value, dict):
        return {sys.intern(key): _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


class Watched(Generic[V]):
    """The objects of one kind, by UID. Only the event loop's thread may use it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, V]] = {}
        """The version and view by UID."""

    def put(self, uid: str, version: int, view: V) -> V | None:
        """Stores a view, unless a newer version is known. Returns the object's view before."""
        before = self._seen.get(uid)
        if before is None or before[0] <= version:
            self._seen[uid] = version, view
        return before[1] if before is not None else None

    def drop(self, uid: str) -> V | None:
        """Removes an object that is gone, and returns its view."""
        known = self._seen.pop(uid, None)
        return known[1] if known is not None else None

    def get(self, uid: str) -> V | None:
        known = self._seen.get(uid)
        return known[1] if known is not None else None

    def views(self) -> Iterable[V]:
        return [view for _, view in self._seen.values()]

    def uids(self) -> frozenset[str]:
        return frozenset(self._seen)

    def newest(self) -> int:
        """Returns the newest version of any object; 0 if there is none."""
        return max((version for version, _ in self._seen.values()), default=0)

    def compare(
        self, before: frozenset[str], listing: ListedState
    ) -> tuple[tuple[str, ...], Mapping[str, int]]:
        """Compares with a complete listing that was requested when `before` had been seen.
        Returns the UIDs of objects that are certainly gone, and UID to version of objects that exist and were
        not seen in this version, because the watch is late or stale. A listing that is older than what was
        seen of an object, as from a cache, cannot show that it is gone."""
        listed = listing.objects
        unseen = {
            uid: version
            for uid, version in listed.items()
            if uid not in self._seen or self._seen[uid][0] < version
        }
        missing = (uid for uid in before if uid not in listed and uid in self._seen)
        return tuple(uid for uid in missing if self._seen[uid][0] <= listing.version), unseen


def date_pod(pod: PodView, known: PodView | None, now: float) -> PodView:
    """Returns `pod` with the times of its last changes by the operator's clock: others may be wrong."""

    def since(moment: str, there: bool) -> float | None:
        before: float | None = getattr(known, moment, None)
        return None if not there else now if before is None else before

    return replace(
        pod,
        seen_since=since("seen_since", True),
        deleted_at=since("deleted_at", pod.deleted_at is not None),
        unschedulable_since=since("unschedulable_since", pod.unschedulable_since is not None),
        remade_since=since("remade_since", pod.remade_since is not None),
        housed_since=since("housed_since", pod.node is not None),
        trainer=_dated(pod.trainer, known.trainer if known is not None else None, now),
        sidecar=_dated(pod.sidecar, known.sidecar if known is not None else None, now),
    )


def _dated(container: ContainerView, known: ContainerView | None, now: float) -> ContainerView:
    if known is not None and replace(known, since=None) == replace(container, since=None):
        return known
    return replace(container, since=now)


class ClusterView:
    """Indexes pods by job and nodes by name. A view of None is an invalid object, which belongs to no job."""

    def __init__(self) -> None:
        self.pods: Watched[PodView | None] = Watched()
        self.nodes: Watched[NodeView | None] = Watched()
        self._by_job: dict[tuple[str, str], dict[str, PodView]] = {}
        self._by_name: Mapping[str, NodeView] | None = None

    def pods_of(self, namespace: str, job_uid: str) -> Iterable[PodView]:
        """Returns the job's pods in its own namespace; labels on pods of other namespaces have no effect."""
        return list(self._by_job.get((namespace, job_uid), {}).values())

    def all_nodes(self) -> Mapping[str, NodeView]:
        if self._by_name is None:
            known = (node for node in self.nodes.views() if node is not None)
            self._by_name = MappingProxyType({node.name: node for node in known})
        return self._by_name

    def put_pod(self, uid: str, pod: PodView | None, version: int) -> None:
        before = self.pods.put(uid, version, pod)
        known = self.pods.get(uid)
        if before is not None and (known is None or _job_of(known) != _job_of(before)):
            self._leave(uid, before)
        if known is not None:
            self._by_job.setdefault(_job_of(known), {})[uid] = known

    def drop_pod(self, uid: str) -> PodView | None:
        pod = self.pods.drop(uid)
        if pod is not None:
            self._leave(uid, pod)
        return pod

    def _leave(self, uid: str, pod: PodView) -> None:
        mates = self._by_job.get(_job_of(pod), {})
        mates.pop(uid, None)
        if not mates:
            self._by_job.pop(_job_of(pod), None)

    def put_node(self, uid: str, node: NodeView | None, version: int) -> bool:
        """Stores a node. Returns whether its view changed: heartbeats, every few seconds, do not count."""
        changed = self.nodes.put(uid, version, node) != self.nodes.get(uid)
        if changed:
            self._by_name = None
        return changed

    def drop_node(self, uid: str) -> NodeView | None:
        self._by_name = None
        return self.nodes.drop(uid)


def _job_of(pod: PodView) -> tuple[str, str]:
    return pod.namespace, pod.job_uid


# A listing also finds deletions between two watches. A stale watch, an API server that is unreachable for
# minutes, or a stuck reconcile makes `/healthz` fail, and Kubernetes restarts the process. A stuck event loop
# does not answer at all, which has the same effect.

_GRACES = 5
"""Multiples of a watch's grace for a control plane to start; then a process that cannot list restarts."""
_SETTLE = 1.0
"""Seconds between the start of a watch's listing and the operator's own listing."""


@dataclass(frozen=True)
class WatchedKind:
    """A kind's listing, its known objects, and the callbacks for changed objects and vanished UIDs."""

    resource: ApiResource
    query: str
    known: Watched[Any]
    changed: Callable[[Mapping[str, Any]], None]
    gone: Callable[[str], Awaitable[None]]


class Resync:
    """Compares listings every `every` seconds and after each watch restart. `grace` is that of a watch."""

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
        self._health = {kind: WatchHealth(kind, grace) for kind in kinds}
        self._compared: set[str] = set()
        self._due = asyncio.Event()
        self.seen_all = asyncio.Event()
        """Set once everything that existed when the watches began has been seen."""

    @property
    def complete(self) -> bool:
        """Returns whether everything in the last listings has been seen."""
        return self._compared == set(self._kinds) and all(
            hearing.complete for hearing in self._health.values()
        )

    def troubles(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        return [hearing.trouble(now) for hearing in self._health.values()]

    def note_event(self, kind: str, uid: str, version: int, *, listed: bool) -> None:
        """Notes an object from the watch; `listed`: from a list, which does not show deletions."""
        self._health[kind].note_event(uid, version)
        self._look_whether_all_is_seen()
        if listed:
            self._due.set()

    async def run(self, began: asyncio.Event) -> None:
        """Runs forever once the watches have begun."""
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
            settled = self.complete and not any(hearing.behind for hearing in self._health.values())
            pause = self._every if settled else min(self._every, 2 * _SETTLE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._due.wait()
                await asyncio.sleep(_SETTLE)

    def _look_whether_all_is_seen(self) -> None:
        if not self.seen_all.is_set() and self.complete:
            self.seen_all.set()

    async def _compare(self, name: str) -> None:
        kind, hearing = self._kinds[name], self._health[name]
        before, newest = kind.known.uids(), kind.known.newest()
        listings = []
        for namespace in (self._namespaces if kind.resource.namespaced else ()) or (None,):
            try:
                listings.append(await self._kube.list_versions(kind.resource.path(namespace), kind.query))
            except ApiFailure as error:
                if not (error.not_found and kind.resource == JOBS):  # the kind is not installed (any more)
                    raise
        objects = {uid: version for each in listings for uid, version in each.objects.items()}
        listing = ListedState(min((each.version for each in listings), default=0), objects)
        gone, unseen = kind.known.compare(before, listing)
        for uid in gone:
            log.info("%s %s is gone, and its watch did not say so", name, uid)
            hearing.forgotten(uid)
            await kind.gone(uid)
        hearing.compared(unseen, asyncio.get_running_loop().time(), listing.version, newest)
        self._compared.add(name)


class WatchHealth:
    """Detects a stale watch by objects that only listings show. `grace`: seconds that it may lag."""

    def __init__(self, kind: str, grace: float) -> None:
        self.kind, self._grace = kind, grace
        self._missed: dict[str, tuple[int, float]] = {}
        """UID to the version that the watch has not shown, and the time since then."""
        self._listed_at: float | None = None
        """The time of the last successful listing, or of the first call of `trouble`."""
        self._ahead: tuple[int, float] | None = None
        """The version that was known and no listing has reached, and the time since then."""

    def compared(self, unseen: Mapping[str, int], now: float, listed: int = 0, newest: int = 0) -> None:
        """Notes the result of a listing at `now`: UID to version of objects that the watch has not shown.
        `listed`: its version, 0 if unknown; `newest`: the newest version that was known before it."""
        self._listed_at = now
        self._missed = {uid: self._missed.get(uid, (version, now)) for uid, version in unseen.items()}
        if self._ahead is None or listed >= self._ahead[0]:
            self._ahead = (newest, now) if 0 < listed < newest else None

    def note_event(self, uid: str, version: int) -> None:
        """Notes an object that the watch showed."""
        missed = self._missed.get(uid)
        if missed is not None and missed[0] <= version:
            del self._missed[uid]

    def forgotten(self, uid: str) -> None:
        self._missed.pop(uid, None)

    @property
    def complete(self) -> bool:
        """Returns whether the watch has shown everything in the last listing."""
        return not self._missed

    @property
    def behind(self) -> bool:
        """Returns whether the last listing was older than what was known before it."""
        return self._ahead is not None

    def trouble(self, now: float) -> str:
        """Returns the problem as a sentence; empty: none."""
        if self._listed_at is None:
            self._listed_at = now
        if now - self._listed_at > _GRACES * self._grace:
            return f"{self.kind}: the API server has answered no listing for {now - self._listed_at:.0f} s"
        if self._ahead is not None and now - self._ahead[1] > self._grace:
            return (
                f"{self.kind}: listings have been older than resourceVersion {self._ahead[0]}, which is "
                f"known, for {now - self._ahead[1]:.0f} s: etcd was restored from a backup, or a proxy "
                "answers from a cache"
            )
        late = [since for _, since in self._missed.values() if now - since > self._grace]
        if not late:
            return ""
        return (
            f"the watch of {self.kind} is deaf: {len(late)} objects have been different for "
            f"{now - min(late):.0f} s without a word of it"
        )


def stuck(begun: Mapping[str, float], now: float, limit: float) -> str:
    """Returns a sentence about reconciles, begun at times by job, that last longer than `limit` seconds."""
    late = {name: now - since for name, since in begun.items() if now - since > limit}
    if not late:
        return ""
    worst = max(late, key=lambda name: late[name])
    return f"{len(late)} jobs are stuck in a reconcile; {worst} for {late[worst]:.0f} s"
