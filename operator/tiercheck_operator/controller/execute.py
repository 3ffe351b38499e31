"""Carries decisions out, and remembers what the API server refused of them.

No choice is made here, and every action may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from tiercheck.failpoints import failpoint
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.redaction import redacted
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes import api_server
from tiercheck_operator.kubernetes.api_server import JOBS, ApiFailure
from tiercheck_operator.kubernetes.client import Kube, NameTaken, backoff
from tiercheck_operator.kubernetes.owned_objects import ClusterIdentity, OwnedObjects, is_owned_by
from tiercheck_operator.manifests import owned
from tiercheck_operator.manifests.pod import Unbuildable, build_pod, build_spare
from tiercheck_operator.manifests.pod_settings import with_pull_settings
from tiercheck_operator.model import actions
from tiercheck_operator.model.observed import ANNOTATION_GIVEN_UP, JobView, Refusal
from tiercheck_operator.model.parsing import parse_pod
from tiercheck_operator.sidecars import JobSidecars, SidecarError

log = logging.getLogger(__name__)

_AT_ONCE = 16
_PUSHES_AT_ONCE = 64
"""The number of directives sent at once: a sidecar that does not answer blocks its place for seconds."""
_MADE_AT_ONCE = 3
"""The number of pods of one name that are made before they count as deleted by others."""
_LONGEST_NOTE = 1024
"""The maximum number of characters of an annotation."""
_PODS_STRICTLY = replace(api_server.PODS, plural="pods?fieldValidation=Strict")
"""Makes the server refuse unknown fields of the template by name, instead of dropping them silently."""


class Executor:
    """Executes decisions for one job. A directive that cannot be sent is retried by the next reconcile."""

    def __init__(
        self, kube: Kube, config: Config, belongings: OwnedObjects, cluster: ClusterIdentity | None = None
    ) -> None:
        self._kube, self._config, self._owned_objects, self._cluster = kube, config, belongings, cluster
        self._removed: list[actions.DeletePod] = []
        self._deleted: set[tuple[str, bool]] = set()
        self.refusals = RefusalMemory()

    async def run(
        self, job: JobView, wanted: Iterable[actions.Action], sidecars: JobSidecars | None
    ) -> list[tuple[actions.Action, ApiFailure]]:
        """Creates what the job owns one by one; then runs all deletions at once, then all else at once.

        Returns the failures. The other actions are done nevertheless, but no pod is created if something that
        all pods of the job need could not be.

        Deletions go before creations, so that the scheduler does not count a lost pod when it spreads its
        replacement. Once the server refuses a worker's pod, or a spare, the rest of them are not tried: they
        would be refused for the same reason."""
        gate, gate_of_pushes = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_PUSHES_AT_ONCE)
        failures: list[tuple[actions.Action, ApiFailure]] = []
        refused: dict[type[actions.Action], ApiFailure] = {}

        async def one(action: actions.Action) -> None:
            async with gate_of_pushes if isinstance(action, actions.Push) else gate:
                kind, failure = type(action), refused.get(type(action))
                if failure is None:
                    try:
                        return await self._one(job, action, sidecars)
                    except ApiFailure as error:
                        failure = error
                    except Unbuildable as error:
                        # The template of a job that has begun was changed: reported as a refusal by the
                        # API server.
                        failure = ApiFailure(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
                failures.append((action, failure))
                if kind in actions.NEEDED_BY_PODS:
                    refused.update(dict.fromkeys(actions.PODS, failure))
                elif kind in actions.PODS and failure.refused:
                    refused[kind] = failure

        own = (*actions.NEEDED_BY_PODS, actions.SavePlacement)
        deletions, others = [], []
        for action in wanted:
            if isinstance(action, own):
                await one(action)
            elif isinstance(action, actions.DeletePod):
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

    async def _one(self, job: JobView, action: actions.Action, sidecars: JobSidecars | None) -> None:
        match action:
            case actions.EnsureCredentials():
                await self._owned_objects.ensure_credentials(job)
            case actions.EnsureService():
                await self._owned_objects.ensure_service(job)
            case actions.EnsureGang():
                await self._owned_objects.ensure_gang(job)
            case actions.RemoveGang():
                await self._owned_objects.remove_gang(job)
            case actions.EnsureBudget(min_available):
                await self._owned_objects.ensure_budget(job, min_available)
            case actions.RemoveBudget():
                await self._owned_objects.remove_budget(job)
            case actions.SavePlacement(placement):
                await self._owned_objects.save_placement(job, placement)
            case actions.CreatePod() | actions.CreateSpare():
                await self._create_pod(job, action)
            case actions.Promote():
                await self._promote(job, action)
            case actions.DeletePod():
                await self._delete_pod(job, action)
            case actions.DeleteJob():
                await self._kube.delete(JOBS, job.namespace, job.name, uid=job.uid)
            case actions.ProbeSidecar(uid):
                if sidecars is not None:
                    sidecars.probe(uid)
            case actions.Push(uid, directive):
                if sidecars is not None and self._kube.may_write:
                    try:
                        await sidecars.push(uid, directive)
                        if directive.phase is Phase.RELEASE:
                            failpoint("after-release")
                    except SidecarError as error:
                        whose = f"{job.namespace}/{job.name}: directive for worker {directive.worker}"
                        log.warning("%s: %s", whose, error)

    async def _create_pod(self, job: JobView, action: actions.CreatePod | actions.CreateSpare) -> None:
        image, memory = job.sidecar_image or self._config.sidecar_image, self._config.node_memory
        if self._cluster is not None and job.spec.remote is not None:  # only a remote store is shared
            job = replace(job, cluster=await self._cluster.uid())
        avoid, unwelcome = action.avoid, action.unwelcome
        if isinstance(action, actions.CreateSpare):
            pod = build_spare(job, action.number, avoid, image, unwelcome=unwelcome, node_memory=memory)
        else:
            identity, prefer = (action.worker, action.incarnation), action.prefer
            pod = build_pod(
                job, *identity, avoid, image, prefer=prefer, unwelcome=unwelcome, node_memory=memory
            )
        pod = with_pull_settings(pod, self._config.sidecar_pull_policy, self._config.sidecar_pull_secrets)
        name = pod["metadata"]["name"]
        try:
            made = await self._kube.create(_PODS_STRICTLY, job.namespace, pod)
        except ApiFailure as error:
            if not (error.conflict and await self._is_outdated(job, name)):
                raise
        else:
            failpoint("after-pod-create")
            if not _has_identity(job, made, pod):
                await self._remove_unrecognizable(job, made)
            log.info("%s/%s: created pod %s", job.namespace, job.name, name)
            self.refusals.note_made(name)

    async def _is_outdated(self, job: JobView, name: str) -> bool:
        """Returns whether the pod is there, and our view is late. Raises NameTaken if it is not the job's."""
        found = await self._kube.find(api_server.PODS, job.namespace, name)
        if found is None or _has_identity(job, found):
            return found is not None
        owner = next(iter(found["metadata"].get("ownerReferences") or ()), None)
        if owner is not None and owner.get("uid") == job.uid:  # made by an operator that died right after
            await self._remove_unrecognizable(job, found)
        whose = f"belongs to {owner['kind']} {owner['name']}" if owner else "belongs to no controller"
        advice = "Another name is tried; remove or rename it if it stays"
        raise NameTaken(name, f"Pod {name} {whose} and is not one of this job's. {advice}")

    async def _remove_unrecognizable(self, job: JobView, made: Mapping[str, Any]) -> None:
        """Deletes a pod of the job that no watch would show as its own, and raises ApiFailure.
        Otherwise it would hold its node unseen, and another would be made in its place again and again."""
        name, uid = made["metadata"]["name"], made["metadata"].get("uid") or ""
        await self._kube.delete(api_server.PODS, job.namespace, name, uid=uid)
        why = (
            f"Pod {name} was admitted with other labels ({names.API_GROUP}/...) or owners than were sent. So "
            "it could not be recognized, and was deleted. Look for an admission webhook or policy that "
            "changes them (kubectl get mutatingwebhookconfigurations,mutatingadmissionpolicies), and exempt "
            "pods of TierCheckJobs from it"
        )
        raise ApiFailure(HTTPStatus.UNPROCESSABLE_ENTITY, why)

    async def _promote(self, job: JobView, action: actions.Promote) -> None:
        pod = action.pod
        labels = owned.worker_labels(action.worker, action.incarnation)
        metadata = {"uid": pod.uid, "resourceVersion": pod.resource_version, "labels": labels}
        try:
            await self._kube.patch(api_server.PODS, job.namespace, pod.name, {"metadata": metadata})
        except ApiFailure as error:
            # It was changed, perhaps by this operator, or is gone: the next reconcile will see that.
            if not (error.conflict or error.not_found):
                raise
        else:
            log.info("%s/%s: pod %s is worker %d now", job.namespace, job.name, pod.name, action.worker)

    async def _delete_pod(self, job: JobView, action: actions.DeletePod) -> None:
        if action.unseen and not await self._is_there(job, action):
            return
        if action.given_up:
            said = redacted(action.given_up)[:_LONGEST_NOTE]
            note = {"uid": action.uid, "annotations": {ANNOTATION_GIVEN_UP: said}}
            # The cause is in the status as well; a failure to annotate does not keep the pod.
            with contextlib.suppress(ApiFailure):
                await self._kube.patch(api_server.PODS, job.namespace, action.name, {"metadata": note})
        grace = 0 if action.force else None
        failpoint("before-pod-delete")
        found = False
        if action.evict:
            with contextlib.suppress(ApiFailure):  # it is lost, whatever a disruption budget allows
                await self._kube.evict(job.namespace, action.name, uid=action.uid, grace=grace)
                found = True
        found = found or await self._kube.delete(
            api_server.PODS, job.namespace, action.name, uid=action.uid, grace=grace
        )
        self.refusals.made.pop(action.name, None)
        # Our view of the pods may be a moment old: a deletion requested twice is reported once.
        if found and (action.uid, action.force) not in self._deleted:
            self._deleted.add((action.uid, action.force))
            self._removed.append(action)
            by_force = " by force" if action.force else ""
            log.info("%s/%s: deleted%s %s", job.namespace, job.name, by_force, action.why)

    async def _is_there(self, job: JobView, action: actions.DeletePod) -> bool:
        """Returns whether the pod exists and belongs to the job, whatever its labels.
        Its name and UID are from the placement, which any user of the namespace may have written."""
        if action.uid in self.refusals.absent:
            return False
        found = await self._kube.find(api_server.PODS, job.namespace, action.name)
        there = found is not None and found["metadata"].get("uid") == action.uid and is_owned_by(found, job)
        self.refusals.absent |= set() if there else {action.uid}
        return there

    def take_deleted_pods(self) -> list[actions.DeletePod]:
        """Returns the pods that were deleted since the last call."""
        removed, self._removed = self._removed, []
        return removed


def _has_identity(job: JobView, raw: Mapping[str, Any], sent: Mapping[str, Any] | None = None) -> bool:
    """Returns whether a pod from the API server is recognized as one of the job's, and as what was sent."""
    pod, wanted = parse_pod(raw), parse_pod(sent or raw)
    if pod is None or wanted is None or pod.job_uid != job.identity:
        return False
    return (pod.worker, pod.spare) == (wanted.worker, wanted.spare)


# Each refused action is retried by itself, with growing pauses, as long as decisions contain it. A restarted
# operator remembers no refusal, tries at once, and gets the same answers.
_NAMES = 64
"""The number of foreign pod names that are remembered; a job that meets more of them has to wait."""
PATIENT_FAILURES = 3
"""The number of server errors in a row that are not reported; refusals are reported at once."""


class RefusalMemory:
    """Remembers what the API server refused to one job. Times are unix seconds."""

    def __init__(self) -> None:
        self.known: Mapping[int | str, Refusal] = {}
        self.names_taken: frozenset[str] = frozenset()
        self.absent: set[str] = set()
        """The UIDs of unseen pods that are not there."""
        self.made: Counter[str] = Counter()
        """The number of pods made by name, since one of the name was last deleted by this operator."""

    def note_made(self, name: str) -> None:
        """Counts a new pod. Raises ApiFailure, with a pause, if others have deleted each one of its name.
        A pod that is lost otherwise is still there, or in the placement, so the next one has another name."""
        self.made[name] += 1
        again = self.made[name] - _MADE_AT_ONCE
        if again > 0:
            why = (
                f"Pod {name} is made again and again, and is gone at once each time; TierCheck does not "
                "delete it. Look for the policy, controller or user that does (the "
                "API server's audit log), and exempt pods of TierCheckJobs"
            )
            raise ApiFailure(HTTPStatus.UNPROCESSABLE_ENTITY, why, retry_after=backoff(again))

    def due(self, wanted: Iterable[actions.Action], now: float) -> list[actions.Action]:
        """Returns the actions that need not wait after a refusal; pods wait while what they need waits."""
        held = {subject for subject, refusal in self.known.items() if refusal.again_at > now}
        alone = not held & {kind.__name__ for kind in actions.NEEDED_BY_PODS}
        return [
            action
            for action in wanted
            if actions.subject_of(action) not in held and (alone or not isinstance(action, actions.PODS))
        ]

    def note(
        self,
        wanted: Sequence[actions.Action],
        failures: Iterable[tuple[actions.Action, ApiFailure]],
        now: float,
    ) -> bool:
        """Records the outcome of a reconcile. Returns whether what is reported of refusals has changed.
        `wanted`: all actions of the decision, due or not."""
        before = self.known
        # Nothing that depends on the placement is written without it, so it is retried in every reconcile.
        failed = {
            actions.subject_of(action): error
            for action, error in failures
            if not isinstance(action, actions.SavePlacement)
        }
        tried = {actions.subject_of(action) for action in self.due(wanted, now)}
        known = {
            subject: before[subject]
            for subject in map(actions.subject_of, wanted)
            if subject in before and subject not in tried
        }
        for subject, error in failed.items():
            tries = before[subject].tries + 1 if subject in before else 1
            pause = max(backoff(tries), error.retry_after or 0.0)
            if isinstance(error, NameTaken) and len(self.names_taken) < _NAMES:
                self.names_taken |= {error.name}
                pause = 0.0  # the next name is tried at once
            broken = tries > PATIENT_FAILURES and error.status > 0
            is_shown = error.refused or isinstance(error, NameTaken) or broken
            known[subject] = Refusal(str(error), now + pause, tries, is_shown)
        self.known = known
        return _shown(before) != _shown(known)

    def seconds_to_next_try(self, now: float) -> float | None:
        """Returns the seconds until the next refused action is due; None if nothing is refused."""
        return min((max(0.0, refusal.again_at - now) for refusal in self.known.values()), default=None)


def _shown(known: Mapping[int | str, Refusal]) -> dict[int | str, str]:
    return {subject: refusal.sentence for subject, refusal in known.items() if refusal.is_shown}
