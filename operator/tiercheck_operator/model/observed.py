"""Holds what one reconcile observes of the job, its pods, the nodes and the sidecars' reports.

All of it is immutable. `parsing` makes these views, so that decisions never read raw objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated

from tiercheck.protocol.names import join_address
from tiercheck.protocol.report import SPARE, Report, TrainerState
from tiercheck_operator.model.conditions import Finding
from tiercheck_operator.model.saved_placement import SavedPlacement
from tiercheck_operator.model.serialization import INTERNAL, As, At
from tiercheck_operator.model.spec import JobSpec, queue_entries, read_spec
from tiercheck_operator.model.status import Condition, JobRecord, parse_record

ANNOTATION_AVOIDED = "tiercheck.io/avoided-nodes"
"""Pod annotation: the nodes that the pod must avoid, so that this can be lifted when they recover."""
ANNOTATION_GIVEN_UP = "tiercheck.io/given-up"
"""Pod annotation: `PodView.given_up`."""


@dataclass(frozen=True)
class Patience:
    """The controller's timeouts, in seconds. `planning.suspicion` explains those of silent sidecars."""

    settle: float = 1.0
    """Seconds after a trainer failure in which a pod or node loss may still explain it."""
    unreachable: float = 2.0
    suspect: float = 10.0
    silent: float = 60.0
    isolated: float = 30.0
    hand_over: float = 5.0
    """Seconds for an ending pod to send its holders what they lack, before the next attempt refuses it."""
    unclaimed: float = 8.0
    """Seconds for a kubelet to accept a new pod; a live one does so in a second or two."""
    lease: float = 12.0
    """Seconds since a kubelet renewed its lease, which it does every ten."""
    start: float = 120.0
    """Seconds for a pod on a node to get its address while others have one: volumes may be slow."""
    start_said: float = 60.0
    """Seconds for the same if Kubernetes reports why the pod does not start."""
    place: float = 300.0
    """Seconds that a node is avoided after a pod failed to start or had to leave; doubled each time."""
    unschedulable: float = 30.0
    """Seconds that a pod may lack a node before the nodes that it avoids are reconsidered."""
    capacity: float = 300.0
    """Seconds without a node before capacity is lacking (`failurePolicy.capacityTimeoutSeconds`)."""
    suspend: float = 30.0
    """Seconds for stopping pods to end by themselves before they are deleted."""
    flush: float = 600.0
    """Seconds for the same with a remote tier, because a version may not be uploaded yet."""
    relocate: float = 5.0
    """Seconds that a reason to move copies must last; twelve times that if nothing is at risk."""
    grow: float = 60.0
    """Seconds that free room must last before a shrunk job grows into it."""
    retry: float = 10.0
    """Seconds between failed restore attempts, and between pods that never started."""


@dataclass(frozen=True)
class JobView:
    name: Annotated[str, At("metadata.name")]
    namespace: Annotated[str, At("metadata.namespace")]
    uid: Annotated[str, At("metadata.uid")]
    spec: Annotated[JobSpec, As(read_spec)]
    status: Annotated[JobRecord, As(parse_record)] = field(default_factory=JobRecord)
    generation: Annotated[int, At("metadata.generation")] = 0
    resource_version: Annotated[str, At("metadata.resourceVersion")] = ""
    deleting: Annotated[bool, At("metadata.deletionTimestamp")] = False
    finalizers: Annotated[tuple[str, ...], At("metadata.finalizers")] = ()
    queue_labels: Annotated[Mapping[str, str], At("metadata.labels"), As(queue_entries)] = field(
        default_factory=dict
    )
    """Labels of the job that its pods get, for a queue."""
    queue_annotations: Annotated[Mapping[str, str], At("metadata.annotations"), As(queue_entries)] = field(
        default_factory=dict
    )
    sidecar_image: Annotated[str, INTERNAL] = ""
    """The image of the job's sidecars, see `replacing.choose_sidecar_image`; empty: not known yet."""
    cluster: Annotated[str, INTERNAL] = ""
    """UID of the cluster's namespace kube-system, for the job's pods; empty: not known (yet)."""

    @property
    def identity(self) -> str:
        """The UID by which pods and sidecars identify the job: its own, or its owner's if it is attached.

        Attached pods are created before their job."""
        return self.uid if self.spec.attach is None else self.spec.attach.uid


class ContainerState(str, Enum):
    """The last state of a container that its kubelet reported; a dead kubelet leaves it as it was."""

    NOT_STARTED = "Unborn"
    """It has not run yet: its image is being pulled, or other containers run before it."""
    STARTING = "Starting"
    """It runs, and its startup probe has not passed."""
    UP = "Up"
    ENDED = "Ended"
    HELD_BACK = "HeldBack"
    """It has ended and waits for its restart: back-off, or an image that must be pulled again."""


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container of a pod, as the kubelet reports it."""

    restarts: int = 0
    ended_reason: str = ""
    """The reason of its last end: OOMKilled, Error, ...; empty: it has not ended yet."""
    ended_at: float | None = None
    exit_code: int | None = None
    memory_limit: str = ""
    """The memory limit as in the pod's spec; empty: none."""
    state: ContainerState = ContainerState.NOT_STARTED
    back_off: float = 0.0
    """Seconds from the last end to the next start, as the kubelet reports; 0: it names none."""
    restartable: bool = True
    """True if the kubelet restarts it after a failure."""
    since: float | None = None
    """Time since which the kubelet reports this state, by the operator's clock; None: not known."""

    @property
    def restarting(self) -> bool:
        """Returns whether it ran before and, by the kubelet's report, does not run again yet."""
        again = self.state is ContainerState.STARTING and self.restarts > 0
        return again or self.state in (ContainerState.ENDED, ContainerState.HELD_BACK)

    @property
    def oom_killed(self) -> bool:
        return self.ended_reason == "OOMKilled"


@dataclass(frozen=True, slots=True)
class PodView:
    name: str
    uid: str
    job_uid: str
    worker: int
    """The worker's index; SPARE: the pod is a spare that has no worker's identity yet."""
    incarnation: int
    node: str | None
    ip: str | None
    phase: str
    created: float
    namespace: str = ""
    attached: str = ""
    """The annotation of that name, an `Attachment`; empty: the operator made the pod."""
    deleting: bool = False
    deleted_at: float | None = None
    """The time when the deletion was requested (not when its grace period ends), by the operator's clock."""
    disruption: str = ""
    """Reason of the DisruptionTarget condition, or of the pod's status (Evicted, ...)."""
    message: str = ""
    """Kubernetes' explanation why the pod does not run; empty if there is none."""
    held: str = ""
    """The kubelet's reason in `message` for a container that does not start: ErrImagePull, ..."""
    unschedulable_since: float | None = None
    claimed: bool = True
    """True if its node's kubelet has accepted it, or it has no node yet."""
    sidecar_image: str = ""
    avoided: frozenset[str] = frozenset()
    trainer: ContainerView = ContainerView()
    sidecar: ContainerView = ContainerView()
    seen_since: float | None = None
    """Time since which the operator sees it, by its own clock; None: not known."""
    housed_since: float | None = None
    """Time since which it has its node, by the operator's clock; None: no node, or not known."""
    remade_since: float | None = None
    """Time since which its kubelet recreates its sandbox, by the operator's clock; None: it does not."""
    ill: str = ""
    """The kubelet's report of an unhealthy device of the pod, as a clause; empty: none."""
    gates: tuple[str, ...] = ()
    """Scheduling gates still on it: another controller, usually a queue, decides when to schedule it."""
    spare: int | None = None
    """Its number if it was created as a spare, even if it has become a worker."""
    resource_version: str = ""
    given_up: str = ""
    """A cause, a colon and the reason why the operator deleted the pod: its end alone does not show them."""
    first_port: int | None = None
    """The first of its sidecar's ports; None: the usual ones."""

    @property
    def address(self) -> str:
        """The address of its sidecar; empty: it has none yet."""
        return join_address(self.ip, self.first_port) if self.ip else ""

    @property
    def began(self) -> float:
        """The time when it was made, by the operator's clock if that is known."""
        return self.created if self.seen_since is None else self.seen_since

    @property
    def terminal(self) -> bool:
        return self.phase in ("Failed", "Succeeded")

    @property
    def is_spare(self) -> bool:
        return self.worker == SPARE

    @property
    def unschedulable(self) -> bool:
        """Returns whether the scheduler finds no node for it."""
        return self.node is None and self.unschedulable_since is not None


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    lost: str = ""
    """Why Kubernetes reports the node as down; empty: it does not. `lost_nodes` decides about its pods."""
    out_of_service: bool = False
    """True if an administrator has marked it as down for good."""
    kubelet: str = ""
    """The kubelet's version."""
    leaving: str = ""
    """The reason why its pods should leave it, as a clause; empty: they may stay."""
    conditions: Mapping[str, str] = field(default_factory=dict)
    """Status by type: Kubernetes' own conditions and those of hardware monitors."""
    schedulable: bool = True
    cordoned: bool = False
    """True if it is to be drained: it holds copies only if there is no other way."""

    @property
    def hostname(self) -> str:
        return self.labels.get("kubernetes.io/hostname", self.name)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server's last refusal of an action that has not succeeded since."""

    sentence: str
    again_at: float
    """Unix seconds of the next try."""
    tries: int = 1
    is_shown: bool = True
    """True if the status reports it: a brief problem is not reported."""


class HostProbe(str, Enum):
    """The result of a connection to the address of a sidecar that does not answer."""

    NOTHING = "Nothing"
    REFUSED = "Refused"
    """The host is alive, and no process listens on the port."""
    ACCEPTED = "Accepted"
    """The host is alive, and a process accepts connections but is overloaded or hangs."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The last report of one pod's sidecar. Times are unix seconds by the operator's `SteadyClock`."""

    report: Report | None
    answered_at: float | None
    silent_since: float | None
    """The time of the first failed call since the last answer; None: the last call was answered."""
    host: HostProbe = HostProbe.NOTHING
    """The sign of life from its host while it is silent."""
    failure: str = ""
    """The error of calls to it while it is silent, as a clause; empty: not known."""
    stepped_at: float | None = None
    """The time when its trainer was last reported to have made a step in the report's attempt."""
    held_at: float | None = None
    """The time when an earlier answer brought `report.holdings`; None: none did."""

    @property
    def holdings_at(self) -> float | None:
        """The time when it last reported its holdings; None: never, or they were dropped."""
        is_newest = self.report is not None and self.report.has_holdings
        return self.answered_at if is_newest else self.held_at


@dataclass(frozen=True)
class Observation:
    now: float
    job: JobView
    pods: tuple[PodView, ...]
    """The pods of workers."""
    nodes: Mapping[str, NodeView]
    reports: Mapping[str, WorkerReport]
    """The sidecars' reports, by pod UID."""
    placement: SavedPlacement | None
    spares: tuple[PodView, ...] = ()
    """Pods that have no worker's identity yet."""
    patience: Patience = Patience()
    unwelcome: frozenset[str] = frozenset()
    """Names of nodes that other jobs avoid: new pods go elsewhere if possible."""
    have_service: bool = True
    have_credentials: bool = True
    """True if the job's Secret exists."""
    knows_credentials: bool = True
    """True if the operator has the Secret's present or last contents."""
    have_gang: bool = False
    gang_problem: str = ""
    """The reason why there is no PodGroup, as a sentence."""
    kubelets: Mapping[str, float] = field(default_factory=dict)
    """Unix seconds of the kubelet's last lease renewal, by node where a pod is not accepted."""
    owner_size: int | None = None
    """The present number of workers of the attached workload; None: not known."""
    refused: Mapping[int | str, Refusal] = field(default_factory=dict)
    """Refused actions by `actions.subject_of`: a worker, SPARE, the UID of a pod."""
    names_taken: frozenset[str] = frozenset()
    """Names that pods of others in the namespace already have."""
    budget: int | None = None
    """minAvailable of the job's PodDisruptionBudget; None: there is none."""
    budget_problem: str = ""
    """The reason why the budget cannot be as required, or be used, as a sentence."""

    @cached_property
    def size(self) -> int:
        """The number of workers in use: that of the spec, or fewer while nodes are lacking."""
        size, asked = self.job.status.size, self.job.spec.workers
        return size.workers if size is not None and 0 < size.workers < asked else asked

    @cached_property
    def shrunk(self) -> bool:
        """Returns whether the job runs with fewer workers than its spec requests."""
        return self.size < self.job.spec.workers

    @cached_property
    def copies(self) -> int:
        """The number of copies of each worker's state: in a shrunk job at most one per other worker."""
        return min(self.job.spec.copies, self.size - 1) if self.shrunk else self.job.spec.copies

    @cached_property
    def wanted_spares(self) -> int:
        """The spec's number, and one for each worker that a shrunk job lacks: with these it grows back."""
        return self.job.spec.spares + self.job.spec.workers - self.size

    @property
    def all_pods(self) -> tuple[PodView, ...]:
        return (*self.pods, *self.spares)

    @cached_property
    def attempt_pods(self) -> frozenset[str]:
        """UIDs of the pods that the current attempt was placed with; empty: there is no attempt."""
        return (
            frozenset()
            if self.placement is None
            else frozenset(saved.pod_uid for saved in self.placement.members)
        )

    @cached_property
    def living(self) -> tuple[PodView, ...]:
        """Pods of workers that have not ended and are not being deleted."""
        return tuple(pod for pod in self.pods if not (pod.terminal or pod.deleting))

    @cached_property
    def current_reports(self) -> Mapping[str, Report]:
        """The newest reports that are of the current attempt, by pod UID."""
        attempt = self.job.status.attempt
        return {uid: report for uid, report in self.newest_reports.items() if report.attempt == attempt}

    @cached_property
    def all_attempt_reports(self) -> tuple[Report, ...]:
        """The current attempt's newest reports, lost pods' too, with the sidecars' own worker numbers."""
        found = (known.report for known in self.reports.values())
        return tuple(each for each in found if each is not None and each.attempt == self.job.status.attempt)

    @cached_property
    def newest_reports(self) -> Mapping[str, Report]:
        """The newest report of each sidecar, by pod UID, with the worker number of the pod."""
        found = {pod.uid: self.report(pod) for pod in self.all_pods}
        return {uid: report for uid, report in found.items() if report is not None}

    @cached_property
    def all_trainers_well(self) -> bool:
        """Returns whether no training command of the attempt has a problem.

        Problems: it failed, hangs, is stuck or unhealthy, or repeated a suspected step with other bits."""
        trainers = [report.trainer for report in self.current_reports.values()]
        failed = any(trainer.state is TrainerState.FAILED for trainer in trainers)
        stalled = any(trainer.stalled_since is not None for trainer in trainers)
        differed = any(trainer.resume is not None and trainer.resume.suspected for trainer in trainers)
        unfit = any(trainer.stuck or trainer.unhealthy for trainer in trainers)
        return not (failed or stalled or differed or unfit)

    @cached_property
    def conditions(self) -> Mapping[str, Condition]:
        """The conditions of the job's status, by type."""
        return {entry.type: entry for entry in self.job.status.conditions}

    def report(self, pod: PodView) -> Report | None:
        """Returns the sidecar's newest report with the pod's worker number, which it may not have yet."""
        known = self.reports.get(pod.uid)
        report = known.report if known else None
        if report is None or pod.worker in (SPARE, report.worker):
            return report
        return replace(report, worker=pod.worker)

    def why_leaving(self, pod: PodView) -> str:
        """Returns why the pod must leave, as a clause; empty: it need not."""
        node = self.nodes.get(pod.node) if pod.node else None
        if node is not None and node.leaving:
            return f"node {node.name} will be emptied: {node.leaving}"
        if pod.disruption and not pod.deleting and not pod.terminal:
            return f"Kubernetes is about to end it ({pod.disruption})"
        return ""


@dataclass(frozen=True)
class Findings:
    """The findings of this reconcile that the record does not hold."""

    unplaced: Finding | None = None
    """The reason why pods or copies have no place."""
    placed: Finding | None = None
    """The finding about a placement that was made in this reconcile."""
    waiting: Finding | None = None
    """The reason why the next attempt waits."""
    copied: bool = False
    """True if every copy that the placement requires is complete for some version."""
    suspended: bool = False
    suspending: bool = False
    completed: bool = False
    failed: Finding | None = None

    @property
    def over(self) -> bool:
        """Returns whether the job has ended."""
        return self.completed or self.failed is not None

    @property
    def idle(self) -> bool:
        """Returns whether no training is due."""
        return self.over or self.suspended or self.suspending


def soonest(*seconds: float | None) -> float | None:
    """Returns the least of those that are not None."""
    return min((entry for entry in seconds if entry is not None), default=None)
