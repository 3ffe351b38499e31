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
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tiercheck.protocol import names
from tiercheck_operator.attach.owners import Unattachable, find_owner
from tiercheck_operator.kubernetes.client import CORE, ApiFailure, Kube, ObjectMetadata
from tiercheck_operator.kubernetes.events import ObjectEvents

log = logging.getLogger(__name__)

NOT_ATTACHED = "NotAttached"
"""Reason of the Event."""
_SELECTOR = (
    f"labelSelector={names.LABEL_INJECT},!{names.LABEL_JOB_UID}"
    "&fieldSelector=status.phase!=Succeeded,status.phase!=Failed"
)
_TRY_AGAIN = 300.0
"""Seconds until a pod that its disruption budget keeps is evicted again."""
_MOST_OF_NAMESPACE = 20
"""Pods of a namespace about which there are calls in one look: all teams' calls are made by few threads."""
_UNASKED = "TierCheck was not asked, or did not answer, when the pod was created, so the pod runs without it."


def must_go(pod: ObjectMetadata, has_job: Callable[[str, str], bool]) -> bool:
    """Whether the pod keeps a job from going on that could go on with another in its place."""
    if names.ANNOTATION_NOT_ATTACHED in pod.annotations or pod.deleted:
        return False  # another one would be refused as well
    try:
        owner = find_owner({"metadata": {"labels": pod.labels, "ownerReferences": pod.owners}})
        return has_job(pod.namespace, owner.uid)
    except Unattachable:
        return False


class LeftOut:
    """Looks every `every` seconds, in `namespaces` (empty: everywhere), while this replica leads."""

    def __init__(
        self,
        kube: Kube,
        namespaces: Sequence[str],
        every: float,
        has_job: Callable[[str, str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._every, self._has_job = kube, every, has_job
        places = [f"/api/v1/namespaces/{namespace}/pods" for namespace in namespaces] or ["/api/v1/pods"]
        self._paths = places
        self._events, self._clock = ObjectEvents(kube), clock
        self._kept: dict[str, float] = {}
        """By UID of pods that their disruption budget keeps: when to try again."""
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
            looked_after: Counter[str] = Counter()
            try:
                async for page in self._kube.list_metadata(path, _SELECTOR):
                    for pod in page:
                        if looked_after[pod.namespace] < _MOST_OF_NAMESPACE:
                            looked_after[pod.namespace] += await self._look_after(pod)
            except ApiFailure as error:
                log.warning("pods that were not attached could not be listed: %s", error)

    async def _look_after(self, pod: ObjectMetadata) -> bool:
        """Whether that took any call."""
        namespace, name, uid = pod.namespace, pod.name, pod.uid
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid}
        going = must_go(pod, self._has_job)
        said = pod.annotations.get(names.ANNOTATION_NOT_ATTACHED) or _UNASKED
        if going:
            said += " The other workers wait for it, so it is evicted and its controller makes another."
        told, now = await self._events.warn(about, NOT_ATTACHED, said), self._clock()
        self._kept = {known: until for known, until in self._kept.items() if until > now}
        if not going or uid in self._kept:
            return told
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            await self._kube.create(CORE + "/pods/{name}/eviction", eviction, namespace=namespace, name=name)
        except ApiFailure as error:
            log.warning("%s/%s: it was not attached, and could not be evicted: %s", namespace, name, error)
            if error.considered:
                self._kept[uid] = now + _TRY_AGAIN
                said = f"It waits for its disruption budget, and is evicted later: {error}"
                await self._events.warn(about, NOT_ATTACHED, said)
        else:
            log.info("%s/%s: evicted, because it was not attached and its job waits for it", namespace, name)
        return True
