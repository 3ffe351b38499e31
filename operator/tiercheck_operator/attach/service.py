"""Attach mode as one thing for the operator to start, to tell of pods, and to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tiercheck_operator.attach.admission import Admission
from tiercheck_operator.attach.adoption import Adoption, LeftOut
from tiercheck_operator.attach.owners import Owner, Unattachable, count_workers
from tiercheck_operator.attach.trust import Trust
from tiercheck_operator.attach.webhook import Webhook
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.model.observed import JobView, PodView


class AttachService:
    """Does nothing if the webhook is not configured. Every replica answers the API server, only the leading
    one makes jobs.

    `kube` writes only while this replica leads, `always` at any time. `has_job` and `pods_of` are asked with
    namespace and UID of an owner.
    """

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
        self._adoption: Adoption | None = None
        self._left_out: LeftOut | None = None
        if config.webhook is not None:
            settings = config.webhook
            trust = Trust(always, settings, config.lease)
            self._webhook = Webhook(settings.host, settings.port, trust, Admission(always, config))
            self._adoption = Adoption(kube, has_job, pods_of)
            self._left_out = LeftOut(kube, config.namespaces, config.resync_seconds, has_job)

    async def owner_size(self, job: JobView) -> int | None:
        """How many workers the owner of an attached job has now; None: that cannot be told."""
        attach = job.spec.attach
        if attach is None:
            return None
        owner = Owner(attach.api_version, attach.kind, attach.name, attach.uid)
        try:
            raw = await self._always.get(owner.path(job.namespace))
            return count_workers(owner.kind, raw) if raw and raw["metadata"]["uid"] == owner.uid else None
        except (ApiFailure, Unattachable, KeyError, TypeError, ValueError, AttributeError):
            return None  # a moment of trouble, or nothing that makes sense

    def start(self) -> None:
        if self._webhook is not None:
            self._webhook.start()

    def lead(self) -> None:
        """This replica leads now; tell it of every pod that there is."""
        if self._left_out is not None:
            self._left_out.start()

    def pod_seen(self, pod: PodView | None) -> None:
        """For every pod of a job, while this replica leads."""
        if self._adoption is not None and pod is not None:
            self._adoption.pod_seen(pod)

    async def cease(self) -> None:
        """This replica leads no more."""
        if self._adoption is not None:
            await self._adoption.stop()
        if self._left_out is not None:
            await self._left_out.stop()

    async def stop(self) -> None:
        await self.cease()
        if self._webhook is not None:
            await self._webhook.stop()
        self._always.close()
