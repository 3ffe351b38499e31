"""Tells of pods that were to be attached and were not, and evicts those that their job waits for.

The webhook's failure policy is Ignore, so a pod that was created while no operator answered runs without
TierCheck. At the start of a workload that is what was promised. Later it is not: the other workers are held
until this one has a sidecar too, and would be held for ever. So it is evicted, for its own controller to make
another; by eviction, because that is no failure in a Job's eyes (`podFailurePolicy`, DisruptionTarget) and
respects disruption budgets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.attach.owners import Unattachable, find_owner
from tiercheck_operator.kubernetes.client import CORE, ApiFailure, Kube
from tiercheck_operator.kubernetes.events import ObjectEvents

log = logging.getLogger(__name__)

NOT_ATTACHED = "NotAttached"
"""Reason of the Event."""
_SELECTOR = f"labelSelector={names.LABEL_INJECT},!{names.LABEL_JOB_UID}"
_UNASKED = "TierCheck was not asked, or did not answer, when the pod was created, so the pod runs without it."


def must_go(pod: Mapping[str, Any], has_job: Callable[[str, str], bool]) -> bool:
    """Whether the pod keeps a job from going on that could go on with another in its place."""
    metadata = pod.get("metadata") or {}
    if names.ANNOTATION_NOT_ATTACHED in (metadata.get("annotations") or {}) or metadata.get(
        "deletionTimestamp"
    ):
        return False  # another one would be refused as well
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return False
    try:
        return has_job(str(metadata.get("namespace") or ""), find_owner(pod).uid)
    except Unattachable:
        return False


class LeftOut:
    """Looks every `every` seconds, in `namespaces` (empty: everywhere), while this replica leads."""

    def __init__(
        self, kube: Kube, namespaces: Sequence[str], every: float, has_job: Callable[[str, str], bool]
    ) -> None:
        self._kube, self._every, self._has_job = kube, every, has_job
        places = [f"/api/v1/namespaces/{namespace}/pods" for namespace in namespaces] or ["/api/v1/pods"]
        self._paths = [f"{place}?{_SELECTOR}" for place in places]
        self._events = ObjectEvents(kube)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="pods that were left out")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self.look()

    async def look(self) -> None:
        """Once."""
        for path in self._paths:
            try:
                found = await self._kube.get(path)
            except ApiFailure as error:
                log.warning("pods that were not attached could not be listed: %s", error)
                continue
            for pod in (found or {}).get("items") or []:
                await self._look_after(pod)

    async def _look_after(self, pod: Mapping[str, Any]) -> None:
        metadata = pod["metadata"]
        namespace, name = str(metadata["namespace"]), str(metadata["name"])
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return
        about = {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": namespace,
            "name": name,
            "uid": metadata["uid"],
        }
        going = must_go(pod, self._has_job)
        said = (metadata.get("annotations") or {}).get(names.ANNOTATION_NOT_ATTACHED) or _UNASKED
        if going:
            said += " The other workers wait for it, so it is evicted and its controller makes another."
        await self._events.warn(about, NOT_ATTACHED, said)
        if not going:
            return
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": metadata["uid"]}},
        }
        try:
            await self._kube.create(CORE + "/pods/{name}/eviction", eviction, namespace=namespace, name=name)
        except ApiFailure as error:
            log.warning("%s/%s: it was not attached, and could not be evicted: %s", namespace, name, error)
        else:
            log.info("%s/%s: evicted, because it was not attached and its job waits for it", namespace, name)
