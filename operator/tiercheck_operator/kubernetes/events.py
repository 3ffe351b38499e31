"""Posts Kubernetes Events, and redacts credentials in the status.

Every user with the role `view` may read both. A lost Event is not retried: the status has its content.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tiercheck.protocol import names
from tiercheck.redaction import redacted
from tiercheck_operator.kubernetes.api_server import EVENTS, ApiFailure
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.model.actions import DeletePod, Notice
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.status import rfc3339

log = logging.getLogger(__name__)

_COMPONENT = "tiercheck-operator"
_PAUSE = 10.0
"""Seconds between two writes of one Event; what happens meanwhile is counted."""
_SIMILAR = 10
"""The number of Events of one reason with different messages; further ones share one Event."""
_FORGET = 600.0
"""Seconds after which a repeated Event is posted as a new one."""
_SERIES, _POSTED = 50, 5000
"""The numbers of remembered series per job and of Events about other objects; oldest dropped first."""
_LONG_QUIET = 3600.0
"""Seconds between two equal Events about an object that is no job: it waits for its user."""
_MESSAGE_LIMIT = 1024
POD_REMOVED = "PodRemoved"
"""Reason of the Event about each pod that the operator deletes."""
_PODS_AT_ONCE = 64
"""The number of pods per reconcile with own Events: a recovery must not wait for a thousand."""


@dataclass
class _Series:
    """One Event in the cluster that stands for all equal notices."""

    notice: Notice
    name: str = ""
    """The Event's name; empty: not posted yet."""
    count: int = 0
    posted: int = 0
    """The count that the cluster's Event has."""
    last: float = 0.0
    written: float = float("-inf")


class EventPoster:
    """Posts one job's Events. A repeated one raises the Event's count, as in Kubernetes' controllers."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._series: dict[tuple[str, str, str], _Series] = {}

    async def post(self, job: JobView, notices: Iterable[Notice], now: float) -> None:
        """Posts notices. A later call, even without `notices`, posts counts that are not posted yet."""
        kept = [(key, entry) for key, entry in self._series.items() if now - entry.last < _FORGET]
        self._series = dict(kept[-_SERIES:])
        for notice in notices:
            series = self._of(notice)
            series.count, series.last = series.count + 1, now
            if notice.reason != POD_REMOVED:  # the deletion is already logged
                log.info("%s/%s: %s: %s", job.namespace, job.name, notice.reason, notice.message)
        for series in list(self._series.values()):
            if series.count > series.posted and now - series.written >= _PAUSE:
                await self._write(job, series, now)

    async def post_removed(self, job: JobView, removed: Sequence[DeletePod], now: float) -> None:
        """Posts the reasons of pod deletions, on the job and on the pods themselves."""
        notices = [
            Notice("Normal", POD_REMOVED, f"deleted{' by force' * pod.force} {pod.why}") for pod in removed
        ]
        await self.post(job, notices, now)
        pairs = list(zip(removed, notices, strict=True))[:_PODS_AT_ONCE]
        await asyncio.gather(*(_post(self._kube, _pod(job, pod), notice, now) for pod, notice in pairs))

    def _of(self, notice: Notice) -> _Series:
        notice = replace(notice, message=notice.message[:_MESSAGE_LIMIT])
        key = (notice.type, notice.reason, notice.message)
        if key not in self._series:
            alike = sum(known[:2] == key[:2] and known[2] != "" for known in self._series)
            if alike >= _SIMILAR:
                key = (*key[:2], "")
                notice = replace(notice, message=f"(combined from similar events): {notice.message}")
        series = self._series.pop(key, None) or _Series(notice)
        series.notice = notice
        self._series[key] = series  # the newest last
        return series

    async def _write(self, job: JobView, series: _Series, now: float) -> None:
        series.written, count = now, series.count
        if not (series.name and await self._again(job, series)):
            series.name = await _post(self._kube, _reference(job), series.notice, now, count)
        series.posted = count

    async def _again(self, job: JobView, series: _Series) -> bool:
        """Raises the Event's count in the cluster. Returns False if the Event is gone."""
        again = {
            "count": series.count,
            "lastTimestamp": rfc3339(series.last),
            "message": _message_of(series.notice),
        }
        try:
            await self._kube.patch(EVENTS, job.namespace, series.name, again)
        except ApiFailure as error:
            if error.not_found:
                return False
            _log_loss(_reference(job), series.notice, error)
        return True


class ObjectEvents:
    """Posts warnings about objects other than jobs: pods, and the owners of attached ones."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._posted: dict[int, float] = {}
        """The time of the last post, by a hash of the Event and its object."""

    async def warn(self, about: Mapping[str, str], reason: str, message: str) -> bool:
        """Posts a warning; False if posted before. `about`: an ObjectReference with namespace and UID."""
        now, key = time.time(), hash((about["uid"], reason, message))
        if now - self._posted.get(key, -_LONG_QUIET) < _LONG_QUIET:
            return False
        self._posted.pop(key, None)
        self._posted[key] = now  # the newest last
        if len(self._posted) > _POSTED:
            del self._posted[next(iter(self._posted))]
        await _post(self._kube, about, Notice("Warning", reason, message), now)
        return True


def _pod(job: JobView, pod: DeletePod) -> Mapping[str, str]:
    return {"apiVersion": "v1", "kind": "Pod", "namespace": job.namespace, "name": pod.name, "uid": pod.uid}


def _reference(job: JobView) -> Mapping[str, str]:
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "namespace": job.namespace,
        "name": job.name,
        "uid": job.uid,
    }


def _message_of(notice: Notice) -> str:
    return redacted(notice.message)[:_MESSAGE_LIMIT]


def _log_loss(about: Mapping[str, str], notice: Notice, error: ApiFailure) -> None:
    named = f"{about['namespace']}/{about['name']}"
    log.warning("%s: Event %s was not posted: %s", named, notice.reason, error)


async def _post(kube: Kube, about: Mapping[str, str], notice: Notice, now: float, count: int = 1) -> str:
    """Creates an Event and returns its name; empty: it was not posted."""
    name = f"{about['name']}.{secrets.token_hex(8)}"
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about["namespace"]},
        "involvedObject": dict(about),
        "type": notice.type,
        "reason": notice.reason,
        "message": _message_of(notice),
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "count": count,
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "reportingInstance": _COMPONENT,
    }
    try:
        await kube.create(EVENTS, about["namespace"], body)
    except ApiFailure as error:
        _log_loss(about, notice, error)
        return ""
    return name


_EXACT = {"members", "sidecarImage", "hash", "node", "nodes", "type", "phase"}
"""Fields that stay unchanged because decisions read them back."""

_LONGEST = 4000
"""Characters. Replacements of credentials do not lengthen a text beyond this."""


def without_credentials(status: dict[str, Any]) -> dict[str, Any]:
    """Replaces credentials in a rendered status by REDACTED; idempotent."""
    return {key: value if key in _EXACT else _without(value) for key, value in status.items()}


def _without(value: Any) -> Any:
    if isinstance(value, str):
        return _hide(value)
    if isinstance(value, dict):
        return without_credentials(value)
    if isinstance(value, list):
        return [_without(entry) for entry in value]
    return value


@lru_cache(maxsize=4096)
def _hide(text: str) -> str:
    return redacted(text)[: max(len(text), _LONGEST)]
