"""Carries decisions out, and remembers what the API server refused of them.

Dull on purpose: no choice is made here, and everything may be done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus

from tiercheck.failpoints import failpoint
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.redaction import redacted
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes import api_server
from tiercheck_operator.kubernetes.api_server import JOBS, ApiFailure
from tiercheck_operator.kubernetes.client import BACKOFF, Kube, NameTaken
from tiercheck_operator.kubernetes.owned_objects import Belongings, ClusterIdentity
from tiercheck_operator.manifests.pod import Unbuildable, build_pod, build_spare
from tiercheck_operator.manifests.pod_settings import with_pull_settings
from tiercheck_operator.model.actions import (
    NEEDED_BY_PODS,
    PODS,
    Action,
    CreatePod,
    CreateSpare,
    DeleteJob,
    DeletePod,
    EnsureBudget,
    EnsureCredentials,
    EnsureGang,
    EnsureService,
    ProbeSidecar,
    Promote,
    Push,
    RemoveBudget,
    RemoveGang,
    SavePlacement,
    subject_of,
)
from tiercheck_operator.model.observed import ANNOTATION_GIVEN_UP, JobView, Refusal
from tiercheck_operator.model.parsing import parse_pod
from tiercheck_operator.sidecars import JobSidecars, SidecarError

log = logging.getLogger(__name__)

_AT_ONCE = 16
_PUSHES_AT_ONCE = 64
"""Of directives: a sidecar that does not answer takes its place for seconds."""
_LONGEST_NOTE = 1024
"""Characters of an annotation."""
_PODS_STRICTLY = replace(api_server.PODS, plural="pods?fieldValidation=Strict")
"""A field of the template that the server does not know is refused with its name, not dropped in silence."""


class Executor:
    """For one job. A sidecar that cannot be told is told again by the next reconcile."""

    def __init__(
        self, kube: Kube, config: Config, belongings: Belongings, cluster: ClusterIdentity | None = None
    ) -> None:
        self._kube, self._config, self._belongings, self._cluster = kube, config, belongings, cluster
        self._removed: list[DeletePod] = []
        self._told: set[tuple[str, bool]] = set()

    async def run(
        self, job: JobView, actions: Iterable[Action], sidecars: JobSidecars | None
    ) -> list[tuple[Action, ApiFailure]]:
        """What the job owns first, then deletions, then everything else; within each, all at once.

        Returns what failed: no action waits for another one to succeed.

        Deletions go before creations, so that the scheduler does not count a lost pod when it spreads its
        replacement. Once the server refuses a worker's pod, or a spare, the rest of them are not tried: they
        would be refused for the same reason. No pod is made before what all pods of the job need.
        """
        gate, gate_of_pushes = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_PUSHES_AT_ONCE)
        failures: list[tuple[Action, ApiFailure]] = []
        refused: dict[type[Action], ApiFailure] = {}

        async def one(action: Action) -> None:
            async with gate_of_pushes if isinstance(action, Push) else gate:
                kind, failure = type(action), refused.get(type(action))
                if failure is None:
                    try:
                        return await self._one(job, action, sidecars)
                    except ApiFailure as error:
                        failure = error
                    except Unbuildable as error:
                        # Of a job that has begun, whose template was changed: told as what the API server
                        # would say of it.
                        failure = ApiFailure(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
                failures.append((action, failure))
                if kind in NEEDED_BY_PODS:
                    refused.update(dict.fromkeys(PODS, failure))
                elif kind in PODS and failure.refused:
                    refused[kind] = failure

        own = (*NEEDED_BY_PODS, SavePlacement)
        deletions, others = [], []
        for action in actions:
            if isinstance(action, own):
                await one(action)
            elif isinstance(action, DeletePod):
                deletions.append(action)
            else:
                others.append(action)
        results: list[BaseException | None] = []
        for group in (deletions, others):
            results += await asyncio.gather(*(one(action) for action in group), return_exceptions=True)
        for result in results:
            if result is not None:
                raise result
        return failures

    async def _one(self, job: JobView, action: Action, sidecars: JobSidecars | None) -> None:
        match action:
            case EnsureCredentials():
                await self._belongings.ensure_credentials(job)
            case EnsureService():
                await self._belongings.ensure_service(job)
            case EnsureGang():
                await self._belongings.ensure_gang(job)
            case RemoveGang():
                await self._belongings.remove_gang(job)
            case EnsureBudget(min_available):
                await self._belongings.ensure_budget(job, min_available)
            case RemoveBudget():
                await self._belongings.remove_budget(job)
            case SavePlacement(placement):
                await self._belongings.save_placement(job, placement)
            case CreatePod() | CreateSpare():
                await self._create_pod(job, action)
            case Promote():
                await self._promote(job, action)
            case DeletePod():
                await self._delete_pod(job, action)
            case DeleteJob():
                await self._kube.delete(JOBS, job.namespace, job.name, uid=job.uid)
            case ProbeSidecar(uid):
                if sidecars is not None:
                    sidecars.probe(uid)
            case Push(uid, directive):
                if sidecars is not None and self._kube.may_write:
                    try:
                        await sidecars.push(uid, directive)
                        if directive.phase is Phase.RELEASE:
                            failpoint("after-release")
                    except SidecarError as error:
                        whose = f"{job.namespace}/{job.name}: directive for worker {directive.worker}"
                        log.warning("%s: %s", whose, error)

    async def _create_pod(self, job: JobView, action: CreatePod | CreateSpare) -> None:
        image, memory = job.sidecar_image or self._config.sidecar_image, self._config.node_memory
        if self._cluster is not None and job.spec.remote is not None:  # nobody else's store is shared
            job = replace(job, cluster=await self._cluster.uid())
        avoid, unwelcome = action.avoid, action.unwelcome
        if isinstance(action, CreateSpare):
            pod = build_spare(job, action.number, avoid, image, unwelcome=unwelcome, node_memory=memory)
        else:
            who, prefer = (action.worker, action.incarnation), action.prefer
            pod = build_pod(job, *who, avoid, image, prefer=prefer, unwelcome=unwelcome, node_memory=memory)
        pod = with_pull_settings(pod, self._config.sidecar_pull_policy, self._config.sidecar_pull_secrets)
        try:
            await self._kube.create(_PODS_STRICTLY, job.namespace, pod)
        except ApiFailure as error:
            if not (error.conflict and await self._is_late_news(job, pod["metadata"]["name"])):
                raise
        else:
            failpoint("after-pod-create")
            log.info("%s/%s: created pod %s", job.namespace, job.name, pod["metadata"]["name"])

    async def _is_late_news(self, job: JobView, name: str) -> bool:
        """Returns whether the pod that we miss is there, and on its way to us: our view may be a moment old.

        Raises NameTaken if it is not this job's.
        """
        found = await self._kube.find(api_server.PODS, job.namespace, name)
        known = parse_pod(found) if found is not None else None
        if found is None or (known is not None and known.job_uid == job.identity):
            return found is not None
        owner = next(iter(found["metadata"].get("ownerReferences") or ()), None)
        whose = f"belongs to {owner['kind']} {owner['name']}" if owner else "belongs to no controller"
        advice = "Another name is tried; remove or rename it if it stays"
        raise NameTaken(name, f"Pod {name} {whose} and is not one of this job's. {advice}")

    async def _promote(self, job: JobView, action: Promote) -> None:
        pod = action.pod
        labels = {names.LABEL_WORKER: str(action.worker), names.LABEL_INCARNATION: str(action.incarnation)}
        metadata = {"uid": pod.uid, "resourceVersion": pod.resource_version, "labels": labels}
        try:
            await self._kube.patch(api_server.PODS, job.namespace, pod.name, {"metadata": metadata})
        except ApiFailure as error:
            # It changed, perhaps by our own hand, or is gone: the next look will show it.
            if not (error.conflict or error.not_found):
                raise
        else:
            log.info("%s/%s: pod %s is worker %d now", job.namespace, job.name, pod.name, action.worker)

    async def _delete_pod(self, job: JobView, action: DeletePod) -> None:
        if action.given_up:
            said = redacted(action.given_up)[:_LONGEST_NOTE]
            note = {"uid": action.uid, "annotations": {ANNOTATION_GIVEN_UP: said}}
            # The cause is in the status as well; a pod is not kept for it.
            with contextlib.suppress(ApiFailure):
                await self._kube.patch(api_server.PODS, job.namespace, action.name, {"metadata": note})
        grace = 0 if action.force else None
        failpoint("before-pod-delete")
        found = False
        if action.evict:
            with contextlib.suppress(ApiFailure):  # it is lost, whatever a disruption budget says
                await self._kube.evict(job.namespace, action.name, uid=action.uid, grace=grace)
                found = True
        found = found or await self._kube.delete(
            api_server.PODS, job.namespace, action.name, uid=action.uid, grace=grace
        )
        # Our view of the pods may be a moment old: what was asked for twice is told once.
        if found and (action.uid, action.force) not in self._told:
            self._told.add((action.uid, action.force))
            self._removed.append(action)
            by_force = " by force" if action.force else ""
            log.info("%s/%s: deleted%s %s", job.namespace, job.name, by_force, action.why)

    def take_deleted_pods(self) -> list[DeletePod]:
        """The pods that were deleted since this was asked last."""
        removed, self._removed = self._removed, []
        return removed


# Each action is asked for again by itself, with growing pauses, as long as decisions want it. A restarted
# operator has forgotten all of it, asks at once, and gets the same answers.
_NAMES = 64
"""Names of others' pods that are remembered; who takes more of them makes his own job wait."""
PATIENT_FAILURES = 3
"""Failures in a row that are not worth a word where the server did not refuse, but failed or was away."""


class RefusalMemory:
    """Of one job. Times are unix seconds."""

    def __init__(self) -> None:
        self.known: Mapping[int | str, Refusal] = {}
        self.names_taken: frozenset[str] = frozenset()

    def due(self, actions: Iterable[Action], now: float) -> list[Action]:
        """Those that are not to wait after a refusal; no pod is made while what it needs waits."""
        held = {subject for subject, refusal in self.known.items() if refusal.again_at > now}
        alone = not held & {kind.__name__ for kind in NEEDED_BY_PODS}
        return [
            action
            for action in actions
            if subject_of(action) not in held and (alone or not isinstance(action, PODS))
        ]

    def note(
        self, wanted: Sequence[Action], failures: Iterable[tuple[Action, ApiFailure]], now: float
    ) -> bool:
        """Takes in how a look went. `wanted`: all that it asked for, due or not. Returns whether there is
        something new to tell."""
        before = self.known
        # What rests on the placement is not written without it, so that it is asked for at every look.
        failed = {
            subject_of(action): error for action, error in failures if not isinstance(action, SavePlacement)
        }
        tried = {subject_of(action) for action in self.due(wanted, now)}
        known = {
            subject: before[subject]
            for subject in map(subject_of, wanted)
            if subject in before and subject not in tried
        }
        for subject, error in failed.items():
            tries = before[subject].tries + 1 if subject in before else 1
            pause = max(BACKOFF[min(tries, len(BACKOFF)) - 1], error.retry_after or 0.0)
            if isinstance(error, NameTaken) and len(self.names_taken) < _NAMES:
                self.names_taken |= {error.name}
                pause = 0.0  # the next name is tried at once
            broken = tries > PATIENT_FAILURES and error.status > 0
            told = error.refused or isinstance(error, NameTaken) or broken
            known[subject] = Refusal(str(error), now + pause, tries, told)
        self.known = known
        return _told(before) != _told(known)

    def seconds_to_next_try(self, now: float) -> float | None:
        """None: nothing is refused."""
        return min((max(0.0, refusal.again_at - now) for refusal in self.known.values()), default=None)


def _told(known: Mapping[int | str, Refusal]) -> dict[int | str, str]:
    return {subject: refusal.sentence for subject, refusal in known.items() if refusal.told}
