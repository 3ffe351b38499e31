"""Keeps what the watches have shown, and leaves out objects that make no sense.

kopf's own indexes keep an object whose deletion fell between two watches: after a 410 Gone it lists anew, and
says nothing of what is not there any more. So a listing of names and versions, now and then and after each
new list, tells what is gone, and whether a watch is stale.

One object that nobody can make sense of must not take the operator down for all others. It is told of once.
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

from tiercheck_operator.kubernetes.api_server import ApiFailure, ApiResource
from tiercheck_operator.kubernetes.client import Kube, version_of
from tiercheck_operator.model.observed import ContainerView, NodeView, PodView

log = logging.getLogger(__name__)

T = TypeVar("T")

_REMEMBERED = 1000
"""Objects that were complained of; of more at once, some are complained of again."""


class Strange:
    """What was left out so far."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, None] = OrderedDict()

    def parse_or_none(
        self, kind: str, raw: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], T | None]
    ) -> T | None:
        """`parse` of an object as the API server holds it; None where it raises, whatever it raises."""
        try:
            return parse(raw)
        except Exception as error:  # what others wrote is no bug of ours, however deep it is nested
            metadata = raw["metadata"]
            uid = str(metadata["uid"])
            if uid not in self._told:
                name = f"{metadata.get('namespace') or ''}/{metadata.get('name')}".lstrip("/")
                log.warning(
                    "%s %s makes no sense, and is left out: %s: %.200s",
                    kind,
                    name,
                    type(error).__name__,
                    error,
                )
            self._told[uid] = None
            self._told.move_to_end(uid)
            if len(self._told) > _REMEMBERED:
                self._told.popitem(last=False)
            return None


V = TypeVar("V")


def version_in(raw: Mapping[str, Any]) -> int:
    return version_of(raw["metadata"].get("resourceVersion"))


def copy_of_job(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A job as it is kept, once it was read by `object_reader`."""
    found: dict[str, Any] = _copy(dict(raw))
    return found


def _copy(value: Any) -> Any:
    """Names of fields are one string for all jobs: they are most of what a parsed object takes."""
    if isinstance(value, dict):
        return {sys.intern(key): _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


class Watched(Generic[V]):
    """The objects of one kind, by UID. Only ever touched by the event loop's thread."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, V]] = {}
        """Version and view."""

    def put(self, uid: str, version: int, view: V) -> V | None:
        """What was known of the object before. An older version than that changes nothing."""
        before = self._seen.get(uid)
        if before is None or before[0] <= version:
            self._seen[uid] = version, view
        return before[1] if before is not None else None

    def drop(self, uid: str) -> V | None:
        """The object is gone; what was known of it."""
        known = self._seen.pop(uid, None)
        return known[1] if known is not None else None

    def get(self, uid: str) -> V | None:
        known = self._seen.get(uid)
        return known[1] if known is not None else None

    def views(self) -> Iterable[V]:
        return [view for _, view in self._seen.values()]

    def uids(self) -> frozenset[str]:
        return frozenset(self._seen)

    def compare(
        self, before: frozenset[str], listed: Mapping[str, int]
    ) -> tuple[tuple[str, ...], Mapping[str, int]]:
        """With a complete listing, UID to version, asked for when `before` had been seen.

        Returns the UIDs of what was seen and is gone for sure, and UID to version of what is there and was
        not seen, or not in this version: the watch is late or deaf.
        """
        unseen = {
            uid: version
            for uid, version in listed.items()
            if uid not in self._seen or self._seen[uid][0] < version
        }
        return tuple(uid for uid in before if uid not in listed and uid in self._seen), unseen


def date_pod(pod: PodView, known: PodView | None, now: float) -> PodView:
    """`pod` with when its kubelet's last word about each container was first heard, and its node, or that
    none was found, was seen. Clocks of others may be wrong; ours is one."""

    def since(moment: str, there: bool) -> float | None:
        before: float | None = getattr(known, moment, None)
        return None if not there else now if before is None else before

    return replace(
        pod,
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
    """Pods by job and nodes by name, as decisions want them; asking for them costs nothing unless something
    changed.

    A view of None: an object that makes no sense, which belongs to nobody.
    """

    def __init__(self) -> None:
        self.pods: Watched[PodView | None] = Watched()
        self.nodes: Watched[NodeView | None] = Watched()
        self._by_job: dict[tuple[str, str], dict[str, PodView]] = {}
        self._by_name: Mapping[str, NodeView] | None = None

    def pods_of(self, namespace: str, job_uid: str) -> Iterable[PodView]:
        """Of the job that its pods know by this UID, in its own namespace: what others elsewhere say about
        themselves counts for nothing."""
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
        """Whether anything that decisions look at has changed: heartbeats change a node every few seconds."""
        changed = self.nodes.put(uid, version, node) != self.nodes.get(uid)
        if changed:
            self._by_name = None
        return changed

    def drop_node(self, uid: str) -> NodeView | None:
        self._by_name = None
        return self.nodes.drop(uid)


def _job_of(pod: PodView) -> tuple[str, str]:
    return pod.namespace, pod.job_uid


# Deletions between two watches are made up for. A stale watch, an API server that cannot be reached for
# minutes, or a look that does not end, makes `/healthz` say no, and Kubernetes starts the process anew. A
# stuck event loop answers nothing at all, which is as good.

_GRACES = 5
"""Times the grace of a watch until a process that can list nothing is started anew. A server may be away for
as long as a control plane takes to start."""
_SETTLE = 1.0
"""Seconds after a watch began to list, before we list for ourselves."""


@dataclass(frozen=True)
class WatchedKind:
    """How a kind is listed, what is known of it, and what to do if an object has changed or a UID is gone."""

    resource: ApiResource
    query: str
    known: Watched[Any]
    changed: Callable[[Mapping[str, Any]], None]
    gone: Callable[[str], Awaitable[None]]


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
        for namespace in (self._namespaces if kind.resource.namespaced else ()) or (None,):
            try:
                listed |= await self._kube.list_versions(kind.resource.path(namespace), kind.query)
            except ApiFailure as error:
                if not error.not_found:  # the kind is not installed (any more)
                    raise
        gone, unseen = kind.known.compare(before, listed)
        for uid in gone:
            log.info("%s %s is gone, and its watch did not say so", name, uid)
            hearing.forgotten(uid)
            await kind.gone(uid)
        hearing.compared(unseen, asyncio.get_running_loop().time())
        self._compared.add(name)


class Hearing:
    """Judges the watch of one kind by what listings show and it does not. `grace`: seconds it may be late."""

    def __init__(self, kind: str, grace: float) -> None:
        self.kind, self._grace = kind, grace
        self._missed: dict[str, tuple[int, float]] = {}
        """UID to the version that is being missed, and since when."""
        self._listed_at: float | None = None
        """When a listing last succeeded, or was first asked about."""

    def compared(self, unseen: Mapping[str, int], now: float) -> None:
        """The outcome of a listing at `now`: UID to version of what the watch has not shown."""
        self._listed_at = now
        self._missed = {uid: self._missed.get(uid, (version, now)) for uid, version in unseen.items()}

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
