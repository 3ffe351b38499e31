"""Posts Kubernetes Events about a job. Losing one is not worth a retry: the status has said it already."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable

from tiercheck.protocol import names
from tiercheck_operator.controller.actions import Notice
from tiercheck_operator.controller.observation import JobView
from tiercheck_operator.controller.record import rfc3339
from tiercheck_operator.kube import CORE, ApiFailure, Kube

log = logging.getLogger(__name__)

_COMPONENT = "tiercheck-operator"
_QUIET = 60.0
"""Seconds in which the same Event about a job is posted once only."""
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
                await self._kube.create(CORE + "/events", _event(job, notice, now), namespace=job.namespace)
            except ApiFailure as error:
                log.warning("%s/%s: Event %s was not posted: %s", job.namespace, job.name, notice.reason, error)


def _event(job: JobView, notice: Notice, now: float) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{secrets.token_hex(8)}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
            "kind": names.KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
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
