"""Gives every owner of attached pods its TierCheckJob.

Pods say all that is needed, so nothing is remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from tiercheck_operator.attach.admission import POLICIES
from tiercheck_operator.attach.injection import Attachment, attached_job
from tiercheck_operator.attach.left_out import NOT_ATTACHED
from tiercheck_operator.attach.owners import Unattachable
from tiercheck_operator.kubernetes.client import JOBS, ApiFailure, Kube
from tiercheck_operator.kubernetes.events import ObjectEvents
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.spelling import spell

log = logging.getLogger(__name__)

_BACKOFF = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Adoption:
    """`pod_seen` for every pod that a watch shows. `has_job` tells whether the job of an owner, by its
    namespace and UID, is known, `pods_of` what pods there still are of it."""

    def __init__(
        self,
        kube: Kube,
        has_job: Callable[[str, str], bool],
        pods_of: Callable[[str, str], Iterable[PodView]],
    ) -> None:
        self._kube, self._has_job, self._pods_of = kube, has_job, pods_of
        self._events = ObjectEvents(kube)
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def pod_seen(self, pod: PodView) -> None:
        if not pod.attached:
            return
        try:
            attachment = Attachment.from_json(pod.attached)
        except ValueError as error:
            log.warning("%s/%s: %s", pod.namespace, pod.name, error)
            return
        uid = attachment.owner.uid
        key = pod.namespace, uid
        if pod.job_uid != uid or self._has_job(*key) or key in self._tasks:
            return
        self._tasks[key] = asyncio.create_task(self._make(pod.namespace, attachment), name=f"adopt {uid}")
        self._tasks[key].add_done_callback(lambda _: self._tasks.pop(key, None))

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _make(self, namespace: str, attachment: Attachment) -> None:
        """Again and again until the job is there or nobody needs it: the pods cannot start without its
        Secret."""
        owner, failures = attachment.owner, 0
        while not self._has_job(namespace, owner.uid) and any(self._pods_of(namespace, owner.uid)):
            try:
                await self._try(namespace, attachment)
                failures = 0
            except ApiFailure as error:
                log.warning("%s/%s: no job for %s: %s", namespace, owner.name, owner.kind, error)
                if error.refused or error.not_found:
                    await self._events.warn(
                        {**spell(owner), "namespace": namespace}, NOT_ATTACHED, str(error)
                    )
                failures += 1
            await asyncio.sleep(_BACKOFF[min(failures, len(_BACKOFF) - 1)] if failures else _BACKOFF[-1])

    async def _try(self, namespace: str, attachment: Attachment) -> None:
        owner = attachment.owner
        # Anybody may write annotations: an owner that is not there, or is another one, gets no job.
        try:
            path = owner.path(namespace)
        except Unattachable as error:
            raise ApiFailure(422, str(error)) from error
        raw = await self._kube.get(path)
        if raw is None or raw["metadata"]["uid"] != owner.uid:
            raise ApiFailure(404, f"{owner.kind} {owner.name} of its pods is gone")
        policy = await self._kube.get(POLICIES, namespace=namespace, name=attachment.policy)
        if policy is None:
            raise ApiFailure(
                404, f"there is no TierCheckPolicy {attachment.policy} in namespace {namespace} any more"
            )
        job = attached_job(namespace, attachment, policy.get("spec") or {})
        try:
            await self._kube.create(JOBS, job, namespace=namespace)
        except ApiFailure as error:
            if not error.conflict:
                raise
            name = job["metadata"]["name"]
            known = await self._kube.get(JOBS + "/{name}", namespace=namespace, name=name)
            attach = ((known or {}).get("spec") or {}).get("attach") or {}
            if known is not None and (attach.get("owner") or {}).get("uid") != owner.uid:
                # Of an earlier owner of the same name, and goes with it; or somebody's own.
                raise ApiFailure(
                    422, f"TierCheckJob {name} belongs to another owner; if it stays, remove or rename it"
                ) from error
        else:
            log.info("%s/%s: made for %s %s", namespace, job["metadata"]["name"], owner.kind, owner.name)
