"""Decides what one pod is to be at admission, or why it stays as it is.

It reads from the API server and changes nothing there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from tiercheck.protocol import names
from tiercheck.redaction import redacted
from tiercheck_operator.attach.injection import (
    Attachment,
    attached_job,
    attachment_of,
    inject,
    is_injected,
    job_name,
    mark_refused,
)
from tiercheck_operator.attach.owners import Owner, Unattachable, find_owner, find_seat
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes.client import JOBS, ApiFailure, Kube, fill
from tiercheck_operator.kubernetes.cluster_facts import ClusterIdentity

log = logging.getLogger(__name__)

POLICIES = (
    f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{{namespace}}/{names.POLICY_PLURAL}/{{name}}"
)
_REMEMBERED = 5.0
"""Seconds that an answer of the API server is used again: the pods of a workload come in one burst."""
_PATIENCE = 4.0
"""Seconds for all that a pod needs to be read; less than the webhook's own timeout, so that the pod still
hears why."""


class Admission:
    """`admit` is all there is."""

    def __init__(self, kube: Kube, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._config, self._clock = kube, config, clock
        self._cluster = ClusterIdentity(kube)
        self._known: dict[str, tuple[float, Mapping[str, Any] | None]] = {}

    async def admit(self, namespace: str, pod: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """The pod as it should be, and a warning if it could not be attached. Never raises for a strange
        pod.
        """
        policy = ((pod.get("metadata") or {}).get("labels") or {}).get(names.LABEL_INJECT)
        if not policy or is_injected(pod):
            return pod, ""
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._attached(namespace, pod, policy), ""
        except Unattachable as error:
            why = str(error)
        except TimeoutError:
            why = "the API server did not answer in time"
        except ApiFailure as error:
            why = f"what is needed could not be read: {error}"
        sentence = redacted(f"TierCheck does not look after this pod: {why}.")
        log.warning("%s/%s: %s", namespace, _named(pod), sentence)
        return mark_refused(pod, sentence), sentence

    async def _attached(self, namespace: str, pod: Mapping[str, Any], policy: str) -> dict[str, Any]:
        owner = find_owner(pod)
        raw_owner = await self._read(owner.path(namespace))
        if raw_owner is None:
            raise Unattachable(f"there is no {owner.kind} {owner.name}")
        seat = find_seat(pod, owner, raw_owner)
        job = await self._job(namespace, owner)
        if job is None:
            found = await self._read(_path_of(policy, namespace))
            if found is None:
                raise Unattachable(f"there is no TierCheckPolicy {policy} in namespace {namespace}")
            spec = found.get("spec") or {}
            attachment = attachment_of(pod, owner, seat, policy, spec.get("procsPerWorker"))
            job = attached_job(namespace, attachment, spec)
        else:
            # The job has it already; what pods of one job agree on must not depend on when they came.
            attach = job["spec"]["attach"]
            procs, workers = int(job["spec"]["procsPerWorker"]), int(job["spec"]["workers"])
            attachment = Attachment(
                owner, attach.get("policy") or policy, attach["container"], workers, procs
            )
        remote = (job["spec"].get("tiers") or {}).get("remote") is not None
        cluster = await self._cluster.uid() if remote else ""
        return inject(pod, attachment, seat, job, self._config, cluster=cluster)

    async def _job(self, namespace: str, owner: Owner) -> Mapping[str, Any] | None:
        """The owner's job, if it exists; one of an earlier owner of the same name does not count."""
        path = fill(JOBS + "/{name}", namespace=namespace, name=job_name(owner))
        found = await self._read(path)
        attach = ((found or {}).get("spec") or {}).get("attach") or {}
        return found if (attach.get("owner") or {}).get("uid") == owner.uid else None

    async def _read(self, path: str) -> Mapping[str, Any] | None:
        now = self._clock()
        known = self._known.get(path)
        if known is not None and known[0] > now and known[1] is not None:
            return known[1]
        self._known = {key: entry for key, entry in self._known.items() if entry[0] > now}
        found = await self._kube.get(path)
        self._known[path] = (now + _REMEMBERED, found)
        return found


def _path_of(policy: str, namespace: str) -> str:
    try:
        return fill(POLICIES, namespace=namespace, name=policy)
    except ValueError as error:
        raise Unattachable(f"the label {names.LABEL_INJECT} names no TierCheckPolicy: {error}") from error


def _named(pod: Mapping[str, Any]) -> str:
    metadata = pod.get("metadata") or {}
    return str(metadata.get("name") or metadata.get("generateName") or "?")
