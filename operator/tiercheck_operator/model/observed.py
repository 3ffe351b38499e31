"""Holds what one reconcile observes of the job, its pods, the nodes and the sidecars' reports.

Nothing in it changes.

Decisions never meet a raw object; `parsing` makes these of them.
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
from tiercheck_operator.model.spec import JobSpec, queue_entries, read_spec
from tiercheck_operator.model.spelling import OURS, As, At
from tiercheck_operator.model.status import Condition, JobRecord, parse_record

ANNOTATION_AVOIDED = "tiercheck.io/avoided-nodes"
"""On pods: the nodes that it was told to stay away from, so that it can be freed when they are well."""
ANNOTATION_GIVEN_UP = "tiercheck.io/given-up"
"""On pods: `PodView.given_up`."""


@dataclass(frozen=True)
class Patience:
    """How long the controller waits for what, in seconds."""

    settle: float = 1.0
    """After a trainer failed, for a pod or node loss that explains it."""
    accused: float = 2.0
    """For a silent sidecar from whose host peers hear nothing either."""
    suspect: float = 10.0
    """For a silent sidecar while another worker's trainer has failed, or that peers say is closed."""
    silent: float = 60.0
    """For a silent sidecar when nothing else is wrong."""
    isolated: float = 30.0
    """For a node whose sidecars answer us while nobody else can reach them."""
    hand_over: float = 5.0
    """For a pod that is ending to bring its holders what they lack, before the next attempt refuses it."""
    unclaimed: float = 8.0
    """For a kubelet to take a new pod; one that lives does so in a second or two."""
    lease: float = 12.0
    """Since a kubelet renewed its lease, which it does every ten."""
    start: float = 120.0
    """For a pod on a node to get its address, where others have one: volumes may take their time."""
    start_said: float = 60.0
    """The same where Kubernetes says why it does not start."""
    place: float = 300.0
    """For a node to be well, on which a pod did not start or that it had to leave once."""
    unschedulable: float = 30.0
    """For a pod without a node, before the nodes it avoids are looked at again."""
    capacity: float = 300.0
    """For a node to take a pod before the job lacks capacity (`failurePolicy.capacityTimeoutSeconds`)."""
    suspend: float = 30.0
    """For pods that were told to finish to end by themselves, before they are deleted."""
    flush: float = 600.0
    """The same with a remote tier, to which they may still owe a version."""
    relocate: float = 5.0
    """For a reason to move copies to last before they move; twelve times that where nothing is at risk."""
    grow: float = 60.0
    """For room to last, before a job that went on smaller takes it."""
    retry: float = 10.0
    """Between attempts to restore that failed, and between pods that never came up."""


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
    queue_labels: Annotated[Mapping[str, str], At("metadata.labels"), As(queue_entries)] = field(
        default_factory=dict
    )
    """Of the job, to be handed on to its pods for a queue."""
    queue_annotations: Annotated[Mapping[str, str], At("metadata.annotations"), As(queue_entries)] = field(
        default_factory=dict
    )
    sidecar_image: Annotated[str, OURS] = ""
    """What the sidecars of this job are, see `replacing.choose_sidecar_image`; empty: not known yet."""
    cluster: Annotated[str, OURS] = ""
    """UID of the cluster's namespace kube-system, for its pods; empty: not known (yet)."""

    @property
    def identity(self) -> str:
        """What pods and sidecars know the job by: its UID, or if it is attached its owner's, because such
        pods come before it."""
        return self.uid if self.spec.attach is None else self.spec.attach.uid


class ContainerState(str, Enum):
    """The kubelet's last word about a container. A kubelet that has died takes nothing back."""

    UNBORN = "Unborn"
    """It has not run yet: its image is being pulled, others run before it."""
    STARTING = "Starting"
    """It runs, and its startup probe has not passed."""
    UP = "Up"
    ENDED = "Ended"
    HELD_BACK = "HeldBack"
    """It has ended, and waits to be started again: back-off, an image that has to be pulled anew."""


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container of a pod, as the kubelet reports it."""

    restarts: int = 0
    ended_reason: str = ""
    """Of its last end: OOMKilled, Error, ...; empty: it has not ended yet."""
    ended_at: float | None = None
    exit_code: int | None = None
    memory_limit: str = ""
    """As the pod's spec has it; empty: none."""
    state: ContainerState = ContainerState.UNBORN
    back_off: float = 0.0
    """Seconds from the last end to the next start, as the kubelet says; 0: it names none."""
    restartable: bool = True
    """When it fails, the kubelet is to start it again."""
    since: float | None = None
    """Since when the kubelet says all this, by the operator's clock; None: not known."""

    @property
    def restarting(self) -> bool:
        """It ran before, and the kubelet says that it is not back yet."""
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
    """SPARE: the pod is a spare that has no worker's identity yet."""
    incarnation: int
    node: str | None
    ip: str | None
    phase: str
    created: float
    namespace: str = ""
    attached: str = ""
    """Its annotation of that name, which tells what it was attached to; empty: it is a pod of our own."""
    deleting: bool = False
    deleted_at: float | None = None
    """When the deletion was asked for (not when its grace ends)."""
    disruption: str = ""
    """Reason of the DisruptionTarget condition, or of the pod's status (Evicted, ...)."""
    message: str = ""
    """What Kubernetes says about why the pod does not run; empty if nothing."""
    held: str = ""
    """The kubelet's word for why a container of it does not start, which stands in the message: ErrImagePull,
    CreateContainerConfigError, ..."""
    unschedulable_since: float | None = None
    claimed: bool = True
    """Its node's kubelet has taken it, or it has no node yet."""
    sidecar_image: str = ""
    avoided: frozenset[str] = frozenset()
    trainer: ContainerView = ContainerView()
    sidecar: ContainerView = ContainerView()
    housed_since: float | None = None
    """Since when it has its node, by the operator's clock; None: it has none, or that is not known."""
    remade_since: float | None = None
    """Since when its kubelet makes its sandbox anew, by the operator's clock; None: it does not."""
    ill: str = ""
    """What its kubelet says of a device of it that is not well, as a clause."""
    gates: tuple[str, ...] = ()
    """Scheduling gates still on it: somebody else, usually a queue, decides when it may be scheduled."""
    spare: int | None = None
    """Its number, if it was made as a spare, whether it is one still or not."""
    resource_version: str = ""
    given_up: str = ""
    """A cause, a colon, why we gave the pod up: noted when we deleted it, as its end looks like any other."""
    first_port: int | None = None
    """Of its sidecar's, where they are not the usual ones."""

    @property
    def address(self) -> str:
        """By which its sidecar is reached; empty: it has none yet."""
        return join_address(self.ip, self.first_port) if self.ip else ""

    @property
    def terminal(self) -> bool:
        return self.phase in ("Failed", "Succeeded")

    @property
    def is_spare(self) -> bool:
        return self.worker == SPARE

    @property
    def unschedulable(self) -> bool:
        """The scheduler finds no node for it."""
        return self.node is None and self.unschedulable_since is not None


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    lost: str = ""
    """Why Kubernetes does not trust the node; empty: it does. `lost_nodes` says if its pods are lost."""
    out_of_service: bool = False
    """An admin says that it is down for good."""
    kubelet: str = ""
    """Its version."""
    leaving: str = ""
    """Why its pods had better leave it, as a clause; empty: they may stay."""
    conditions: Mapping[str, str] = field(default_factory=dict)
    """Status by type: those of Kubernetes, and of whatever watches the hardware."""
    schedulable: bool = True
    cordoned: bool = False
    """Somebody means to empty it: it keeps no copies if there is another way."""

    @property
    def hostname(self) -> str:
        return self.labels.get("kubernetes.io/hostname", self.name)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the API server answered to an action that it has not taken since."""

    sentence: str
    again_at: float
    """Unix seconds when it is asked again."""
    tries: int = 1
    told: bool = True
    """Whether it is worth a word in the status: a moment of trouble is not."""


class HostSign(str, Enum):
    """What came back from where a sidecar that does not answer should be."""

    NOTHING = "Nothing"
    REFUSED = "Refused"
    """Its host lives, and nobody listens there."""
    ACCEPTED = "Accepted"
    """Its host lives, and so does a process that has no time, or hangs."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What is known from one pod's sidecar. Times are unix seconds by the operator's `SteadyClock`."""

    report: Report | None
    answered_at: float | None
    silent_since: float | None
    """First call in vain since the last answer; None: the last call was answered."""
    host: HostSign = HostSign.NOTHING
    """While it is silent."""
    failure: str = ""
    """The same: what becomes of calls to it, as a clause; empty: not known."""
    stepped_at: float | None = None
    """When its trainer was last heard to have made a step in the attempt of the report."""
    held_at: float | None = None
    """When `report.holdings` were told, if an earlier answer did."""

    @property
    def holdings_at(self) -> float | None:
        """When it last told what it holds; None: never, or that was forgotten."""
        told = self.report is not None and self.report.tells_holdings
        return self.answered_at if told else self.held_at


@dataclass(frozen=True)
class Observation:
    now: float
    job: JobView
    pods: tuple[PodView, ...]
    """Of workers."""
    nodes: Mapping[str, NodeView]
    reports: Mapping[str, WorkerReport]
    """By pod UID."""
    placement: SavedPlacement | None
    spares: tuple[PodView, ...] = ()
    """Pods that are no worker's yet."""
    patience: Patience = Patience()
    unwelcome: frozenset[str] = frozenset()
    """Names of nodes that other jobs avoid: new pods go elsewhere if that is possible."""
    have_service: bool = True
    have_credentials: bool = True
    """Whether the job's Secret is there."""
    knows_credentials: bool = True
    """Whether the operator has what is in it, or was."""
    have_gang: bool = False
    gang_problem: str = ""
    """Why it cannot be had, as a sentence."""
    kubelets: Mapping[str, float] = field(default_factory=dict)
    """By node: when its kubelet, which does not take a pod, was heard of by its lease, unix seconds."""
    owner_size: int | None = None
    """Workers that the workload has now to which the job is attached; None: not known."""
    refused: Mapping[int | str, Refusal] = field(default_factory=dict)
    """By `actions.subject_of`: a worker, SPARE, the UID of a pod."""
    names_taken: frozenset[str] = frozenset()
    """Names of pods that are not this job's."""
    budget: int | None = None
    """minAvailable of the job's PodDisruptionBudget; None: there is none."""
    budget_problem: str = ""
    """Why it cannot be as wanted, as a sentence."""

    @cached_property
    def size(self) -> int:
        """Workers that the job goes on with: those of its spec, or fewer while no node takes the others."""
        size, asked = self.job.status.size, self.job.spec.workers
        return size.workers if size is not None and 0 < size.workers < asked else asked

    @cached_property
    def shrunk(self) -> bool:
        """Whether the job goes on with fewer workers than its spec asks for."""
        return self.size < self.job.spec.workers

    @cached_property
    def copies(self) -> int:
        """Of each worker's state: in a smaller job at most as many as there are others."""
        return min(self.job.spec.copies, self.size - 1) if self.shrunk else self.job.spec.copies

    @cached_property
    def wanted_spares(self) -> int:
        """Those of the spec, and one for each worker that a smaller job lacks: with these it grows back."""
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
        """Pods of workers that have not ended, and that nobody ends."""
        return tuple(pod for pod in self.pods if not (pod.terminal or pod.deleting))

    @cached_property
    def current_reports(self) -> Mapping[str, Report]:
        """The newest reports that are of the current attempt, by pod UID."""
        attempt = self.job.status.attempt
        return {uid: report for uid, report in self.newest_reports.items() if report.attempt == attempt}

    @cached_property
    def last_words(self) -> tuple[Report, ...]:
        """The newest reports that are of the current attempt, those of lost pods too, under the numbers that
        sidecars have of themselves."""
        found = (known.report for known in self.reports.values())
        return tuple(each for each in found if each is not None and each.attempt == self.job.status.attempt)

    @cached_property
    def newest_reports(self) -> Mapping[str, Report]:
        """The newest report of each sidecar, by pod UID, as that of the worker that the pod is."""
        found = {pod.uid: self.report(pod) for pod in self.all_pods}
        return {uid: report for uid, report in found.items() if report is not None}

    @cached_property
    def all_trainers_well(self) -> bool:
        """Whether no training command of the attempt failed, stands still, finds no place to begin in, or
        gave other bits for a step that it had suspected."""
        trainers = [report.trainer for report in self.current_reports.values()]
        failed = any(trainer.state is TrainerState.FAILED for trainer in trainers)
        stalled = any(trainer.stalled_since is not None for trainer in trainers)
        differed = any(trainer.resume is not None and trainer.resume.suspected for trainer in trainers)
        unfit = any(trainer.stuck or trainer.unhealthy for trainer in trainers)
        return not (failed or stalled or differed or unfit)

    @cached_property
    def conditions(self) -> Mapping[str, Condition]:
        """Those that the job has been told to have, by type."""
        return {entry.type: entry for entry in self.job.status.conditions}

    def report(self, pod: PodView) -> Report | None:
        """The newest report of the pod's sidecar, as of the worker that the pod is: it may not know yet."""
        known = self.reports.get(pod.uid)
        report = known.report if known else None
        if report is None or pod.worker in (SPARE, report.worker):
            return report
        return replace(report, worker=pod.worker)

    def why_leaving(self, pod: PodView) -> str:
        """Why the pod will have to go, as a clause; empty: it need not."""
        node = self.nodes.get(pod.node) if pod.node else None
        if node is not None and node.leaving:
            return f"node {node.name} will be emptied: {node.leaving}"
        if pod.disruption and not pod.deleting and not pod.terminal:
            return f"Kubernetes is about to end it ({pod.disruption})"
        return ""


@dataclass(frozen=True)
class Findings:
    """What this reconcile found out, beyond the record itself."""

    unplaced: Finding | None = None
    """Why pods or copies have no place."""
    placed: Finding | None = None
    """Set when the placement was made in this reconcile."""
    waiting: Finding | None = None
    """What the next attempt waits for."""
    copied: bool = False
    """Every copy that the placement asks for has been made, of some version."""
    suspended: bool = False
    suspending: bool = False
    completed: bool = False
    failed: Finding | None = None

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.completed or self.failed is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is to be trained now."""
        return self.over or self.suspended or self.suspending


def soonest(*seconds: float | None) -> float | None:
    """The least of those that are given."""
    return min((entry for entry in seconds if entry is not None), default=None)
