"""Runs the reconcile loop of one job: wait for a change, observe, decide, execute, and repeat.

No essential state is kept here: credentials, reports and the placement are read back after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

from tiercheck.clocks import SteadyClock
from tiercheck.failpoints import failpoint
from tiercheck.protocol import names
from tiercheck_operator.config import Config
from tiercheck_operator.controller.decide import decide, decision_after_refusal
from tiercheck_operator.controller.execute import PATIENT_FAILURES, Executor
from tiercheck_operator.controller.members.lost_nodes import find_silent_members
from tiercheck_operator.controller.members.replacing import choose_sidecar_image
from tiercheck_operator.controller.status.status import with_unreadable
from tiercheck_operator.kubernetes import owned_objects
from tiercheck_operator.kubernetes.api_server import JOBS, PODS, ApiFailure
from tiercheck_operator.kubernetes.client import Kube, backoff
from tiercheck_operator.kubernetes.events import EventPoster, ObjectEvents, without_credentials
from tiercheck_operator.kubernetes.watches import copy_of_job, version_in
from tiercheck_operator.manifests import owned
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Decision, SavePlacement
from tiercheck_operator.model.limits import fit_status
from tiercheck_operator.model.observed import JobView, NodeView, Observation, PodView, WorkerReport, soonest
from tiercheck_operator.model.parsing import UNREADABLE, parse_job
from tiercheck_operator.model.saved_placement import SavedMember, SavedPlacement
from tiercheck_operator.model.status import JobRecord
from tiercheck_operator.sidecars import JobSidecars, Lines

log = logging.getLogger(__name__)

_LEAST_PAUSE = 0.02
"""Seconds. The minimum between two reconciles of a job, so that a burst of changes is handled as one."""
_COOLDOWN_FACTOR = 4.0
"""The pause after a reconcile in multiples of the decision's duration: limits a job to 1/5 of the CPU."""
_READ_AGAIN = 60.0
"""Seconds after which the objects of a job with constant news, as one that trains has, are read again."""
_LATE = 4.0
"""Seconds that a kubelet may take to claim a new pod before its node's lease is read."""
_OWNER_EVERY = {True: 60.0, False: 10.0}
"""Seconds between two reads of an attached job's owner.
True: there are as many pods as workers, and the owner's size is the same or unknown; False: otherwise."""
_PROGRESS = ("progress", "tiers")
"""The parts of the status that change continuously during training."""
_PROGRESS_WRITES = 50
"""Progress writes per second of all jobs together: each is a store write and an event to all watchers."""


@dataclass(frozen=True)
class ReconcilerContext:
    """The context that all jobs share: the views of the cluster, kept up to date by the watches."""

    pods: Callable[[str, str], Iterable[PodView]]
    """Lists a job's pods by its namespace and the UID that they carry for it (`JobView.identity`)."""
    nodes: Callable[[], Mapping[str, NodeView]]
    kube: Kube
    config: Config
    metrics: Metrics
    clock: Callable[[], float] = field(default_factory=SteadyClock)
    places: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """The names of the nodes that each job avoids, by the job's namespace and UID.
    Pods prefer nodes that no job of their namespace, nor of two others, avoids: reports may be false."""
    sidecars: Callable[..., JobSidecars] = JobSidecars
    lines: Lines = field(default_factory=Lines)
    training: set[str] = field(default_factory=set)
    """The UIDs of the jobs that write progress."""
    found: Callable[[Mapping[str, Any]], object] = lambda raw: None
    """Receives a pod that the API server has and the view lacks."""
    gone: Callable[[str], object] = lambda uid: None
    """Receives the UID of a job missing on the API server, whatever watches show; its loop has ended."""
    leases: owned_objects.NodeLeases | None = None
    owner_size: Callable[[JobView], Awaitable[int | None]] | None = None
    """Returns the number of workers that an attached job's owner has; None if that is unknown."""
    cluster: owned_objects.ClusterIdentity | None = None
    """The source of the cluster's UID for pods; None: pods get none."""


class JobGone(Exception):
    """The API server does not have the job, or has another one under its name."""


class JobLoop:
    """Reconciles one job between `start` and `stop`. Ends by itself once the API server has no such job."""

    def __init__(self, raw: Mapping[str, Any], context: ReconcilerContext) -> None:
        self._raw = raw
        self._context = context
        self._woken = asyncio.Event()
        self._owned_objects = owned_objects.OwnedObjects(context.kube)
        self._topology = owned_objects.TopologySource(context.kube)
        self._known = False
        self._read_at = float("-inf")
        """The time at which the objects that the job owns were read."""
        self._maybe_outdated = False
        """True while an answer of the API server suggests that the job is gone or has changed."""
        self._executor = Executor(context.kube, context.config, self._owned_objects, context.cluster)
        self._events = EventPoster(context.kube)
        self._object_events = ObjectEvents(context.kube)
        self._looked_for: set[str] = set()
        """The UIDs of the attempt's pods that the view lacked and the API server was asked for."""
        self._kubelets: Mapping[str, float] = {}
        self._owner_read = float("-inf")
        self._owner_size: int | None = None
        self._invalid_generation = -1
        """The generation of the job that could not be parsed."""
        self._sidecars: JobSidecars | None = None
        self._wrote_progress = 0.0
        self._failures = 0
        """The number of reconciles in a row that failed."""
        self._task: asyncio.Task[None] | None = None
        self._deciding = 0.0
        """Seconds that the last decision took."""
        self.began: float | None = None
        """The start of the reconcile under way by the loop's clock; None between reconciles."""

    @property
    def uid(self) -> str:
        return str(self._raw["metadata"]["uid"])

    def start(self) -> None:
        metadata = self._raw["metadata"]
        # An empty context: that of kopf's handler would keep the event, and the whole job, alive with this.
        self._task = asyncio.create_task(
            self._run(), name=f"job {metadata['namespace']}/{metadata['name']}", context=Context()
        )

    def changed(self, raw: Mapping[str, Any]) -> None:
        """Takes over a watch event unless it is outdated or of another job, and wakes the loop."""
        if raw["metadata"]["uid"] == self.uid and version_in(raw) >= version_in(self._raw):
            self._raw = raw
        self.wake()

    def wake(self) -> None:
        self._woken.set()

    async def stop(self) -> None:
        """Ends the loop when the job is gone or the operator ends. Owner references remove the job's pods."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._close()

    async def _close(self) -> None:
        if self._sidecars is not None:
            await self._sidecars.close()
            self._sidecars = None
        self._context.training.discard(self.uid)
        self._context.places.pop((self.key[0], self.uid), None)
        self._context.metrics.job_gone(*self.key)

    async def _run(self) -> None:
        try:
            await self._reconcile_forever()
        except JobGone:
            log.info("%s: the API server does not have it any more", self.named)
            self._context.gone(self.uid)
            await self._close()

    async def _reconcile_forever(self) -> None:
        while True:
            self._woken.clear()
            began = self.began = asyncio.get_running_loop().time()
            try:
                try:
                    delay = await self._reconcile()
                finally:
                    await self._report_deletions()
                self._failures = 0
            except JobGone:
                raise
            except ApiFailure as error:
                self._failures += 1
                self._note_failure(error)
                # A conflict means that the job was written since it was read.
                self._maybe_outdated = self._maybe_outdated or error.conflict
                delay = max(backoff(self._failures), error.retry_after or 0.0)
            except Exception:
                # One job's trouble must not take the operator down; it is counted, logged and tried again.
                self._context.metrics.reconcile_failed("bug")
                log.exception("%s: reconcile failed", self.named)
                self._failures += 1
                delay = backoff(self._failures)
            self.began, took = None, asyncio.get_running_loop().time() - began
            self._context.metrics.reconciled(took)
            await asyncio.sleep(
                delay if self._failures else max(_LEAST_PAUSE, _COOLDOWN_FACTOR * self._deciding)
            )
            quiet = self._failures > 0 or not await self._changed_within(delay)
            if quiet and delay >= self._context.config.resync_seconds:
                self._known = False  # nothing happened for a while: read everything again

    async def _report_deletions(self) -> None:
        removed = self._executor.take_deleted_pods()
        if removed:
            await self._events.post_removed(parse_job(self._raw), removed, self._context.clock())

    async def _changed_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._woken.wait()
        return False

    def _note_failure(self, error: ApiFailure) -> None:
        log.log(logging.DEBUG if error.conflict else logging.WARNING, "%s: %s", self.named, error)
        self._context.metrics.reconcile_failed("conflict" if error.conflict else "api")
        self._maybe_outdated = self._maybe_outdated or error.not_found  # the job itself may be gone

    async def _reread_job(self) -> None:
        """Reads the job from the API server. Raises JobGone, or ApiFailure and leaves the job uncertain."""
        fresh = await self._context.kube.find(JOBS, *self.key)
        if fresh is None or fresh["metadata"]["uid"] != self.uid:
            raise JobGone
        if version_in(fresh) >= version_in(self._raw):
            self._raw = copy_of_job(fresh)
        self._maybe_outdated = False

    async def _reconcile(self) -> float:
        """Observes, decides and executes once. Returns the seconds until the next reconcile at the latest."""
        context = self._context
        try:
            job = parse_job(self._raw)
        except Exception as error:
            await self._report_invalid_job(error)
            return context.config.resync_seconds
        # Anybody may have deleted them, and only pods are watched.
        self._known = self._known and context.clock() - self._read_at < _READ_AGAIN
        if _is_managed(job) and (self._maybe_outdated or not (self._known or self._is_done(job))):
            # Nothing is created for a job that exists only in a late event or a watch that missed its end.
            await self._reread_job()
            job = parse_job(self._raw)
        raw = self._raw
        image = choose_sidecar_image(job.status, self._pods(job), context.config.sidecar_image)
        job = replace(job, sidecar_image=image)
        if not _is_managed(job):
            return context.config.resync_seconds
        if not self._is_done(job):
            job = await self._topology.resolve(job)
        if not self._known and not self._is_done(job):
            await self._owned_objects.refresh(job)
            self._known, self._read_at = True, context.clock()
        await self._read_owner_size(job)
        await self._look_at_leases(job)
        await self._look_for_vanished(job)
        observation = self._observe(job)
        began = time.perf_counter()
        decision = decide(observation)
        self._deciding = time.perf_counter() - began
        context.metrics.decided(self._deciding)
        if self._sidecars is not None:  # a recovery waits for their answers, and not for the status write
            status = decision.status or job.status
            self._sidecars.want_holdings(_holdings_matter(status, self._owned_objects.placement))
        context.places[self.key[0], self.uid] = frozenset(
            place.node for place in (decision.status or job.status).places
        )
        refusals, now = self._executor.refusals, observation.now
        try:
            failures = await self._executor.run(job, refusals.due(decision.before, now), self._sidecars)
        except Exception as error:
            # Most likely a bug in the operator: the job's status must show it, not only the operator's log.
            why = f"what the spec asks for cannot be made: {type(error).__name__}: {error}"[:500]
            await self._write_status(job, raw, decision_after_refusal(observation, decision, why))
            raise
        if refusals.note(decision.before, failures, now):
            self.wake()  # the next reconcile reports it
        for failure in {str(error): error for _, error in failures}.values():
            self._note_failure(failure)
        unsaved = next((error for action, error in failures if isinstance(action, SavePlacement)), None)
        if unsaved is not None:  # the status and the directives depend on it
            if unsaved.refused or (unsaved.status >= 500 and self._failures >= PATIENT_FAILURES):
                await self._write_status(
                    job, raw, decision_after_refusal(observation, decision, str(unsaved))
                )
            raise unsaved
        delay = await self._write_status(job, raw, decision)
        for _, failure in await self._executor.run(job, decision.after, self._sidecars):
            raise failure
        context.metrics.job_seen(parse_job(self._raw), len(find_silent_members(observation)))
        wake = soonest(decision.wake_after, delay, refusals.seconds_to_next_try(now))
        return max(_LEAST_PAUSE, soonest(wake, context.config.resync_seconds) or 0.0)

    async def _report_invalid_job(self, error: Exception) -> None:
        """Reports, once per generation, a job that cannot be parsed, and leaves it alone until it changes.
        The API server's schema should have refused it, or it is too large for this process."""
        metadata = self._raw["metadata"]
        generation = int(metadata.get("generation") or 0)
        if self._invalid_generation == generation:
            return
        named = "" if UNREADABLE in self._raw else f"{type(error).__name__}: "
        why = f"The job cannot be understood, and is left alone: {named}{error}"[:500]
        log.warning("%s: %s", self.named, why)
        await self._post_warning("NotUnderstood", why)
        shown = with_unreadable(self._raw.get("status") or {}, generation, why, self._context.clock())
        patch = {
            "metadata": {"resourceVersion": metadata.get("resourceVersion"), "uid": metadata["uid"]},
            "status": without_credentials(shown),
        }
        try:
            await self._context.kube.patch(JOBS, *self.key, patch, subresource="status")
        except ApiFailure as failure:
            if failure.not_found:
                raise JobGone from failure
            if not failure.refused:
                raise
            log.info("%s: its condition was not written: %s", self.named, failure)
        self._invalid_generation = generation

    async def _read_owner_size(self, job: JobView) -> None:
        """Reads the number of workers that an attached job's owner has."""
        now, pods = self._context.clock(), sum(not pod.terminal for pod in self._pods(job))
        every = _OWNER_EVERY[pods == job.spec.workers and self._owner_size in (None, pods)]
        read = self._context.owner_size if job.spec.attach is not None and not job.status.finished else None
        if read is not None and now - self._owner_read >= every:
            self._owner_read, self._owner_size = now, await read(job)

    async def _look_at_leases(self, job: JobView) -> None:
        """Reads the leases of nodes with a pod that the kubelet has not claimed for `_LATE` seconds."""
        now, leases = self._context.clock(), self._context.leases
        late = {
            pod.node for pod in self._pods(job) if not pod.claimed and now - (pod.housed_since or now) > _LATE
        }
        self._kubelets = await leases.renewals(filter(None, late), now) if late and leases is not None else {}

    def _is_done(self, job: JobView) -> bool:
        """Returns whether the job needs nothing any more: finished and queued jobs may exist in hundreds."""
        if job.deleting:
            return True
        suspended = job.status.condition(conditions.SUSPENDED)
        queued = job.spec.suspend and suspended is not None and suspended.status is True
        if queued and suspended is not None and suspended.observed_generation == job.generation:
            return not any(self._pods(job))
        return job.status.finished and all(pod.terminal for pod in self._pods(job))

    def _pods(self, job: JobView) -> Iterator[PodView]:
        """Yields the job's own pods, or only attached ones if it is attached: no job gets another's pods."""
        attached = job.spec.attach is not None
        for pod in self._context.pods(job.namespace, job.identity):
            if bool(pod.attached) is attached:
                yield pod

    def _observe(self, job: JobView) -> Observation:
        context = self._context
        pods = tuple(self._pods(job))
        credentials = self._owned_objects.credentials
        if credentials is not None and self._sidecars is None:
            self._sidecars = context.sidecars(
                job.identity,
                credentials,
                self.wake,
                poll_seconds=context.config.poll_seconds,
                call_seconds=context.config.call_seconds,
                clock=context.clock,
                lines=context.lines,
            )
        earlier: Mapping[str, WorkerReport] = {}
        if self._sidecars is not None:
            hosts = {pod.uid: pod.address for pod in pods if pod.ip and not pod.terminal}
            earlier = self._sidecars.reports  # includes the final reports of those that are dropped next
            self._sidecars.follow(hosts, keep=self._vanished_members(job, pods))
        return Observation(
            now=context.clock(),
            job=job,
            pods=tuple(pod for pod in pods if not pod.is_spare),
            spares=tuple(pod for pod in pods if pod.is_spare),
            nodes=context.nodes(),
            reports={**earlier, **self._sidecars.reports} if self._sidecars is not None else {},
            placement=self._owned_objects.placement,
            patience=context.config.patience,
            unwelcome=find_unwelcome(context.places, job.namespace),
            have_service=self._owned_objects.have_service,
            have_credentials=self._owned_objects.have_secret,
            knows_credentials=self._owned_objects.credentials is not None,
            have_gang=self._owned_objects.have_gang,
            gang_problem=self._owned_objects.gang_problem,
            kubelets=self._kubelets,
            owner_size=self._owner_size,
            refused=self._executor.refusals.known,
            names_taken=self._executor.refusals.names_taken,
            budget=self._owned_objects.budget,
            budget_problem=self._owned_objects.budget_problem or self._owned_objects.rival_budget,
        )

    async def _look_for_vanished(self, job: JobView) -> None:
        """Reads, once, each of the attempt's pods that is not in the view, and puts its labels back.
        A stale list may lack it, or its labels were taken off; neither may restart a healthy training."""
        placement = self._owned_objects.placement
        if placement is None or placement.attempt != job.status.attempt or self._is_done(job):
            return
        present = {pod.uid for pod in self._pods(job)} | self._looked_for
        missing = [member for member in placement.members if member.pod_uid not in present]
        # At once, because all pods of a large job may be lost.
        await asyncio.gather(*(self._look_for(job, member) for member in missing))

    async def _look_for(self, job: JobView, member: SavedMember) -> None:
        pod = await self._context.kube.find(PODS, job.namespace, member.pod)
        self._looked_for.add(member.pod_uid)
        if pod is not None and pod["metadata"].get("uid") == member.pod_uid:
            self._context.found(await self._with_labels(job, member, pod))

    async def _with_labels(self, job: JobView, member: SavedMember, pod: dict[str, Any]) -> dict[str, Any]:
        """Returns the pod, with the labels by which it is found if it is the job's and lacks them."""
        present = pod["metadata"].get("labels") or {}
        owners = {owner.get("uid") for owner in pod["metadata"].get("ownerReferences") or []}
        if {names.LABEL_JOB_UID, names.LABEL_WORKER} <= present.keys() or job.identity not in owners:
            return pod
        ours = {
            names.LABEL_JOB: job.name,
            names.LABEL_JOB_UID: job.identity,
            **owned.worker_labels(member.worker, member.incarnation),
        }
        labels = {key: value for key, value in ours.items() if key not in present}
        log.warning("%s: labels were taken off pod %s, and are put back once", self.named, member.pod)
        change = {"metadata": {"uid": member.pod_uid, "labels": labels}}
        try:
            return await self._context.kube.patch(PODS, job.namespace, member.pod, change)
        except ApiFailure as error:
            log.warning("%s: pod %s: %s", self.named, member.pod, error)
            return pod

    def _vanished_members(self, job: JobView, pods: Iterable[PodView]) -> set[str]:
        """Returns the UIDs of the attempt's pods that have no object, as after a forced deletion.
        Until the next attempt is decided they may still train, and only their reports show how far."""
        recovery, placement = job.status.recovery, self._owned_objects.placement
        if recovery is None or recovery.decided_at is not None or placement is None:
            return set()
        return {member.pod_uid for member in placement.members} - {pod.uid for pod in pods}

    async def _post_warning(self, reason: str, why: str) -> None:
        """Posts an Event about the job when its status cannot show the reason."""
        metadata = self._raw["metadata"]
        about = {key: metadata[key] for key in ("namespace", "name", "uid")}
        about |= {"apiVersion": self._raw.get("apiVersion"), "kind": names.KIND}
        await self._object_events.warn(about, reason, why)

    async def _write_status(self, job: JobView, raw: Mapping[str, Any], decision: Decision) -> float | None:
        """Writes the status, or returns the seconds until it may be written.
        Raises ApiFailure if the write failed; nothing that depends on it may be done then."""
        if decision.status is None:
            return None
        old, new = raw.get("status") or {}, without_credentials(fit_status(decision.status)[1])
        if old == new:
            return None
        now = self._context.clock()
        trains = new.get("phase") == "Running"  # others are written at once: final reports come only once
        (self._context.training.add if trains else self._context.training.discard)(self.uid)
        if trains and _without_progress(old) == _without_progress(new):
            pause = max(self._context.config.progress_seconds, len(self._context.training) / _PROGRESS_WRITES)
            left = self._wrote_progress + pause - now
            if left > 0:
                return left
        patch = {
            "metadata": {"resourceVersion": job.resource_version, "uid": job.uid},
            "status": merge_patch(old, new),
        }
        failpoint("before-status-write")
        try:
            written = await self._context.kube.patch(
                JOBS, job.namespace, job.name, patch, subresource="status"
            )
        except ApiFailure as error:
            if error.refused:
                why = f"The job's status cannot be written, and what depends on it waits: {error}"
                await self._post_warning("StatusRefused", why)
            raise
        failpoint("after-status-write")
        self._wrote_progress = now
        if version_in(written) >= version_in(self._raw):
            self._raw = copy_of_job(written)
        self._context.metrics.status_written(job, decision.status)
        await self._events.post(job, decision.notices, now)
        return None

    @property
    def key(self) -> tuple[str, str]:
        """Returns the namespace and name of the job."""
        return str(self._raw["metadata"]["namespace"]), str(self._raw["metadata"]["name"])

    @property
    def named(self) -> str:
        return "/".join(self.key)

    @property
    def dead(self) -> bool:
        """Returns whether the loop was started, and ended without being stopped."""
        return self._task is not None and self._task.done()


def find_unwelcome(places: Mapping[tuple[str, str], frozenset[str]], namespace: str) -> frozenset[str]:
    """Returns the nodes that jobs of this namespace, or of two others, avoid."""
    named: dict[str, set[str]] = {}
    for (team, _), nodes in places.items():
        for node in nodes:
            named.setdefault(node, set()).add(team)
    return frozenset(node for node, teams in named.items() if namespace in teams or len(teams) > 1)


def _holdings_matter(status: JobRecord, placement: SavedPlacement | None) -> bool:
    """Returns whether holdings affect decisions: from a failure to the first step, and while copies move."""
    settled = status.attempt > 0 and status.recovery is None
    return not settled or placement is None or bool(placement.leaving)


def _is_managed(job: JobView) -> bool:
    """Returns whether this operator has anything to do for the job."""
    return job.spec.managed_by == names.CONTROLLER


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON merge patch that turns `old` into `new`."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch


def _without_progress(status: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in status.items() if key not in _PROGRESS}
