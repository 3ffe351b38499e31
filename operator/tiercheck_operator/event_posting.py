"""Posts Kubernetes Events. Losing one is not worth a retry: the status has said it already."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

from tiercheck.protocol import names
from tiercheck_operator.controller.actions import Notice
from tiercheck_operator.controller.observation import JobView
from tiercheck_operator.controller.record import rfc3339
from tiercheck_operator.kube import CORE, ApiFailure, Kube

log = logging.getLogger(__name__)

_COMPONENT = "tiercheck-operator"
_QUIET = 60.0
"""Seconds in which the same Event about a job is posted once only."""
_LONG_QUIET = 3600.0
"""The same for objects that are no jobs: nothing happens to them while they wait for somebody to mend their templates."""
_MESSAGE_LIMIT = 1024


class EventPoster:
    """For one job."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._posted: dict[tuple[str, str], float] = {}

    async def post(self, job: JobView, notices: Iterable[Notice], now: float) -> None:
        self._posted = {key: at for key, at in self._posted.items() if now - at < _QUIET}
        for notice in notices:
            key = (notice.reason, notice.message)
            if key in self._posted:
                continue
            self._posted[key] = now
            log.info("%s/%s: %s: %s", job.namespace, job.name, notice.reason, notice.message)
            try:
                await self._kube.create(CORE + "/events", _event(_reference(job), notice, now), namespace=job.namespace)
            except ApiFailure as error:
                log.warning("%s/%s: Event %s was not posted: %s", job.namespace, job.name, notice.reason, error)


class ObjectEvents:
    """Warnings about objects that are not jobs of ours: pods, and the owners of attached ones."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.time) -> None:
        self._kube, self._clock = kube, clock
        self._posted: dict[tuple[str, str, str], float] = {}

    async def warn(self, about: Mapping[str, str], reason: str, message: str) -> None:
        """`about`: an ObjectReference with namespace and UID."""
        now = self._clock()
        self._posted = {key: at for key, at in self._posted.items() if now - at < _LONG_QUIET}
        key = (about["uid"], reason, message)
        if key in self._posted:
            return
        self._posted[key] = now
        try:
            body = _event(about, Notice("Warning", reason, message), now)
            await self._kube.create(CORE + "/events", body, namespace=about["namespace"])
        except ApiFailure as error:
            log.warning("%s/%s: Event %s was not posted: %s", about["namespace"], about["name"], reason, error)


def _reference(job: JobView) -> Mapping[str, str]:
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "namespace": job.namespace,
        "name": job.name,
        "uid": job.uid,
    }


def _event(about: Mapping[str, str], notice: Notice, now: float) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about['name']}.{secrets.token_hex(8)}", "namespace": about["namespace"]},
        "involvedObject": dict(about),
        "type": notice.type,
        "reason": notice.reason,
        "message": notice.message[:_MESSAGE_LIMIT],
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "count": 1,
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "reportingInstance": _COMPONENT,
    }
