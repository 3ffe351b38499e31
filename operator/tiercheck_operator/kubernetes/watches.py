"""Keeps what the watches have shown, and leaves out objects that make no sense.

kopf's own indexes keep an object whose deletion fell between two watches: after a 410 Gone it lists anew, and
says nothing of what is not there any more. So a listing of names and versions, now and then and after each
new list, tells what is gone, and whether a watch is stale.

One object that nobody can make sense of must not take the operator down for all others. It is told of once.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

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


def version_of(text: object) -> int:
    """Of a resourceVersion. They may be compared: integers in every API server (KEP-5504)."""
    return int(str(text)) if str(text or "").isdigit() else 0


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


@dataclass(frozen=True)
class Difference:
    """Between what was seen and what is there."""

    gone: tuple[str, ...] = ()
    """UIDs that were seen before the listing was asked for and are not in it: they are gone for sure."""
    unseen: Mapping[str, int] = field(default_factory=dict)
    """UID to version of what is there and has not been seen, at least not in this version: the watch is late,
    or deaf."""


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

    def compare(self, before: frozenset[str], listed: Mapping[str, int]) -> Difference:
        """With a complete listing, UID to version, asked for when `before` had been seen."""
        return Difference(
            gone=tuple(uid for uid in before if uid not in listed and uid in self._seen),
            unseen={
                uid: version
                for uid, version in listed.items()
                if uid not in self._seen or self._seen[uid][0] < version
            },
        )


def date_containers(pod: PodView, known: PodView | None, now: float) -> PodView:
    """`pod` with when its kubelet's last word about each container was first heard, and its node was seen.
    Nodes' clocks may be wrong; ours is one."""
    before = known.housed_since if known is not None else None
    return replace(
        pod,
        remade_since=pod.remade_since and ((known.remade_since if known is not None else None) or now),
        housed_since=None if pod.node is None else now if before is None else before,
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
