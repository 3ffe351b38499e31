"""Creates a TierCheckJob for each owner of attached pods, and reports or evicts unattached pods.

The pods carry all the necessary information, so no state is kept.

The webhook's failure policy is Ignore, so a pod that was created while no operator answered runs without
TierCheck. At the start of a workload that is intended. Later, the other workers would wait forever for this
one's sidecar. So it is evicted, and its own controller creates another. An eviction is no failure to a Job
(`podFailurePolicy`, DisruptionTarget) and respects disruption budgets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tiercheck.protocol import names
from tiercheck_operator.attach.injection import Attachment, attached_job, is_job_of
from tiercheck_operator.attach.owners import Owner, Unattachable, count_workers, find_owner
from tiercheck_operator.attach.trust import CertificateManager
from tiercheck_operator.attach.webhook import POLICIES, Admission, Webhook
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes.api_server import JOBS, PODS, ApiFailure
from tiercheck_operator.kubernetes.client import Kube, ObjectMetadata, backoff
from tiercheck_operator.kubernetes.events import ObjectEvents
from tiercheck_operator.model.observed import JobView, PodView
from tiercheck_operator.model.serialization import to_api

log = logging.getLogger(__name__)

_LOOK_EVERY = 10.0
"""Seconds until it is checked again that a new job is known."""


class Adoption:
    """Creates missing jobs of attached pods. The caller passes every watched pod to `pod_seen`.
    `has_job` returns whether the job of an owner, by namespace and UID, is known; `pods_of` its pods."""

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
        if not pod.attached or self._has_job(pod.namespace, pod.job_uid):
            return
        try:
            attachment = Attachment.from_json(pod.attached)
        except ValueError as error:
            log.warning("%s/%s: %s", pod.namespace, pod.name, error)
            return
        uid = attachment.owner.uid
        key = pod.namespace, uid
        if pod.job_uid != uid or key in self._tasks:
            return
        self._tasks[key] = asyncio.create_task(self._make(pod.namespace, attachment), name=f"adopt {uid}")
        self._tasks[key].add_done_callback(lambda _: self._tasks.pop(key, None))

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, namespace: str, attachment: Attachment) -> None:
        """Retries until the job exists or no pod is left: the pods need the job's Secret to start."""
        owner, failures = attachment.owner, 0
        while not self._has_job(namespace, owner.uid) and any(self._pods_of(namespace, owner.uid)):
            try:
                await self._try(namespace, attachment)
                failures = 0
            except ApiFailure as error:
                log.warning("%s/%s: no job for %s: %s", namespace, owner.name, owner.kind, error)
                if error.refused or error.not_found:
                    await self._events.warn(
                        {**to_api(owner), "namespace": namespace}, NOT_ATTACHED, str(error)
                    )
                failures += 1
            await asyncio.sleep(backoff(failures) if failures else _LOOK_EVERY)

    async def _try(self, namespace: str, attachment: Attachment) -> None:
        owner = attachment.owner
        # Any user may write annotations: an owner that does not exist, or is another one, gets no job.
        try:
            resource = owner.resource(namespace)
        except Unattachable as error:
            raise ApiFailure(422, str(error)) from error
        raw = await self._kube.find(resource, namespace, owner.name)
        if raw is None or raw["metadata"]["uid"] != owner.uid:
            raise ApiFailure(404, f"{owner.kind} {owner.name} of its pods is gone")
        policy = await self._kube.find(POLICIES, namespace, attachment.policy)
        if policy is None:
            raise ApiFailure(
                404, f"there is no TierCheckPolicy {attachment.policy} in namespace {namespace} any more"
            )
        job = attached_job(namespace, attachment, policy.get("spec") or {})
        name, known = job["metadata"]["name"], await self._kube.create_or_find(JOBS, namespace, job)
        if known is None:
            log.info("%s/%s: made for %s %s", namespace, name, owner.kind, owner.name)
        elif not is_job_of(owner, known):
            # It is an earlier owner's of the same name, and disappears with it; or a user created it.
            why = f"TierCheckJob {name} belongs to another owner; if it stays, remove or rename it"
            raise ApiFailure(422, why)


NOT_ATTACHED = "NotAttached"
"""Reason of the Event about a pod that is not attached."""
_SELECTOR = (
    f"labelSelector={names.LABEL_INJECT},!{names.LABEL_JOB_UID}"
    "&fieldSelector=status.phase!=Succeeded,status.phase!=Failed"
)
_TRY_AGAIN = 300.0
"""Seconds until the next eviction of a pod that its disruption budget protects."""
_MOST_OF_NAMESPACE = 20
"""The number of pods per namespace and pass that cause calls: all teams share a few threads."""
_UNASKED = "TierCheck was not asked, or did not answer, when the pod was created, so the pod runs without it."

_WITHOUT_LABELS = (
    f"TierCheck attached the pod, and its labels ({names.API_GROUP}/...) were removed since. So it is not "
    "found, and waits. Look for an admission webhook or policy that changes labels, and exempt these."
)


def should_evict(pod: ObjectMetadata, has_job: Callable[[str, str], bool]) -> bool:
    """Returns whether the pod blocks its job, which could continue with a replacement."""
    if names.ANNOTATION_NOT_ATTACHED in pod.annotations or pod.deleted:
        return False  # its replacement would be refused as well
    try:
        owner = find_owner({"metadata": {"labels": pod.labels, "ownerReferences": pod.owners}})
        return has_job(pod.namespace, owner.uid)
    except Unattachable:
        return False


class UninjectedPods:
    """Reports or evicts unattached pods of `namespaces` (empty: all)."""

    def __init__(
        self,
        kube: Kube,
        namespaces: Sequence[str],
        has_job: Callable[[str, str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._has_job = kube, has_job
        self._paths = [PODS.path(namespace) for namespace in namespaces or (None,)]
        self._events, self._clock = ObjectEvents(kube), clock
        self._kept: dict[str, float] = {}
        """The time of the next eviction, by UID of pods that their disruption budget protects."""

    async def look(self) -> None:
        """Does one pass over all namespaces."""
        for path in self._paths:
            looked_after: Counter[str] = Counter()
            try:
                async for page in self._kube.list_pages(path, _SELECTOR):
                    for pod in page.objects:
                        if looked_after[pod.namespace] < _MOST_OF_NAMESPACE:
                            looked_after[pod.namespace] += await self._look_after(pod)
            except ApiFailure as error:
                log.warning("pods that were not attached could not be listed: %s", error)

    async def _look_after(self, pod: ObjectMetadata) -> bool:
        """Reports or evicts one pod. Returns whether that took any call."""
        namespace, name, uid = pod.namespace, pod.name, pod.uid
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid}
        going = should_evict(pod, self._has_job)
        unlabelled = names.ANNOTATION_ATTACHED in pod.annotations
        said = pod.annotations.get(names.ANNOTATION_NOT_ATTACHED)
        said = said or (_WITHOUT_LABELS if unlabelled else _UNASKED)
        if going:
            said += " The other workers wait for it, so it is evicted and its controller makes another."
        posted, now = await self._events.warn(about, NOT_ATTACHED, said), self._clock()
        self._kept = {known: until for known, until in self._kept.items() if until > now}
        if not going or uid in self._kept:
            return posted
        try:
            await self._kube.evict(namespace, name, uid=uid)
        except ApiFailure as error:
            log.warning("%s/%s: it was not attached, and could not be evicted: %s", namespace, name, error)
            if error.considered:
                self._kept[uid] = now + _TRY_AGAIN
                said = f"It waits for its disruption budget, and is evicted later: {error}"
                await self._events.warn(about, NOT_ATTACHED, said)
        else:
            log.info("%s/%s: evicted, because it was not attached and its job waits for it", namespace, name)
        return True


class AttachService:
    """Runs attach mode if the webhook is configured. All replicas serve it; only the leader makes jobs.
    `kube` writes only while this replica leads, `always` at any time. `has_job` and `pods_of` take the
    namespace and UID of an owner."""

    def __init__(
        self,
        kube: Kube,
        always: Kube,
        config: Config,
        has_job: Callable[[str, str], bool],
        pods_of: Callable[[str, str], Iterable[PodView]],
    ) -> None:
        self._always = always
        self._webhook: Webhook | None = None
        self._adoption = Adoption(kube, has_job, pods_of)
        self._uninjected = UninjectedPods(kube, config.namespaces, has_job)
        self._every = config.resync_seconds
        self._task: asyncio.Task[None] | None = None
        if config.webhook is not None:
            settings = config.webhook
            trust = CertificateManager(always, settings, config.lease)
            self._webhook = Webhook(settings.host, settings.port, trust, Admission(always, config))

    async def owner_size(self, job: JobView) -> int | None:
        """Returns how many workers the owner of an attached job has at present; None: not known."""
        attach = job.spec.attach
        if attach is None:
            return None
        owner = Owner(attach.api_version, attach.kind, attach.name, attach.uid)
        try:
            raw = await self._always.find(owner.resource(job.namespace), job.namespace, owner.name)
            return count_workers(owner.kind, raw) if raw and raw["metadata"]["uid"] == owner.uid else None
        except (ApiFailure, Unattachable, KeyError, TypeError, ValueError, AttributeError):
            return None  # a brief problem, or an invalid object

    def start(self) -> None:
        if self._webhook is not None:
            self._webhook.start()

    def lead(self) -> None:
        """Starts the leader's work; the caller passes every existing pod to `pod_seen`."""
        if self._webhook is not None and self._task is None:
            self._task = asyncio.create_task(self._look_at_uninjected(), name="pods that were left out")

    async def _look_at_uninjected(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self._uninjected.look()

    def pod_seen(self, pod: PodView | None) -> None:
        """Handles a pod of a job; called for every one while this replica leads."""
        if self._webhook is not None and pod is not None:
            self._adoption.pod_seen(pod)

    async def stop_leading(self) -> None:
        """Ends the leader's work."""
        await self._adoption.stop()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self) -> None:
        await self.stop_leading()
        if self._webhook is not None:
            await self._webhook.stop()
        self._always.close()
