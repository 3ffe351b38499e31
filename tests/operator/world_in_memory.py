"""A cluster in memory for the operator's decisions, one tick at a time.

Kubelets, scheduler and trainers stand around the model of a sidecar.

It plays what the real parts promise, no more: pods get addresses, trainers go in lock-step. The controller
under test is `decide` alone; its memory is the status, written through its API spelling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from tests.operator.kubelet_words import SidecarContainer, sidecar_view
from tests.operator.sidecar_model import SidecarModel, by_age
from tiercheck.clocks import SteadyClock
from tiercheck.protocol.directive import DeltaMode, Directive, ParityGroup, Source, Tier
from tiercheck.protocol.report import SPARE, ConnectionFailure, Report, TrainerState, Unreachable
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_operator.controller.decide import decide
from tiercheck_operator.controller.execute import RefusalMemory
from tiercheck_operator.controller.members.replacing import choose_sidecar_image
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.kubernetes.client import NameTaken
from tiercheck_operator.manifests.owned import pod_name
from tiercheck_operator.model.actions import (
    Action,
    CreatePod,
    CreateSpare,
    Decision,
    DeleteJob,
    DeletePod,
    EnsureBudget,
    EnsureCredentials,
    EnsureGang,
    EnsureService,
    Promote,
    Push,
    RemoveBudget,
    RemoveGang,
    SavePlacement,
)
from tiercheck_operator.model.limits import fit_status
from tiercheck_operator.model.observed import (
    HostProbe,
    JobView,
    NodeView,
    Observation,
    Patience,
    PodView,
    SavedPlacement,
    WorkerReport,
)
from tiercheck_operator.model.spec import JobSpec
from tiercheck_operator.model.status import Condition, JobRecord, parse_record, render_record

TEMPLATE = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["python", "train.py"]}]}}
START = 1_800_000_000.0


def make_spec(**changes: object) -> JobSpec:
    """A job of four workers with one copy, a snapshot every two steps, no deltas and no remote tier."""
    spec = JobSpec(
        workers=4,
        procs_per_worker=1,
        suspend=False,
        managed_by="tiercheck.io/controller",
        template=TEMPLATE,
        topology_preset="generic",
        topology_levels=None,
        size_limit="1Gi",
        copies=1,
        spread_level=None,
        spread_required=False,
        snapshot_every=2,
        remote=None,
        restore_step=None,
        max_restarts=10,
        ttl_seconds=None,
        delta=DeltaMode.NONE,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


REMOTE = {"directory": {"volume": {"emptyDir": {}}}, "everySteps": 4, "keep": 3}


class World:
    """The whole. `tick` moves everything by one second and lets the controller look once."""

    def __init__(
        self, spec: JobSpec | None = None, racks: int = 2, nodes_per_rack: int = 2, steps: int = 10**6
    ) -> None:
        self._wall, self._passed = START, 0.0
        self._clock = SteadyClock(lambda: self._wall, lambda: self._passed)
        self.liked = ""
        """The scheduler's favourite node."""
        self.not_starting: dict[str, tuple[str, str, str]] = {}
        """Nodes on which no new pod starts: phase, reason and message of such pods."""
        self.beside = False
        """Whether a container of the user's runs on in each pod when the others have ended."""
        self.nodes = {
            f"n{rack}{index}": NodeView(
                f"n{rack}{index}",
                {"kubernetes.io/hostname": f"n{rack}{index}", "topology.kubernetes.io/rack": f"r{rack}"},
            )
            for rack in range(racks)
            for index in range(nodes_per_rack)
        }
        self.job = JobView("j", "ns", "job-uid", spec or make_spec(), generation=1, resource_version="1")
        self.pods: dict[str, PodView] = {}
        self.sidecars: dict[str, SidecarModel] = {}
        self.reports: dict[str, WorkerReport] = {}
        self.placement: SavedPlacement | None = None
        self.remote: set[Version] = set()
        self.made: dict[Version, int] = {}
        """By how many workers each snapshot was made."""
        self.bad_remote: set[Version] = set()
        self.bad_copies: set[tuple[int, Artifact]] = set()
        """(holder, what it keeps)."""
        self.bad_replays: set[tuple[int, Version]] = set()
        """(rank, version of a delta): its replay gives another state than was recorded."""
        self.unequal: set[Version] = set()
        """Snapshots whose replicas did not hold the same, which only trainers find out."""
        self.skipped: set[tuple[int, int]] = set()
        """(worker, step): deltas that are not taken."""
        self.poisoned: set[int] = set()
        """Attempts whose loss is not finite any more."""
        self.remote_up = True
        self.remote_said = "the bucket does not answer."
        """While it is not up."""
        self.committed: Version | None = None
        self.copied: dict[tuple[int, str], Version] = {}
        """By attempt and placement, the newest version that all its holders have."""
        self.position: dict[str, int] = {}
        self.total_steps = steps
        self.step_seconds = 1.0
        """What trainers report."""
        self.hung: tuple[int, int | None] | None = None
        """(attempt, worker): in that attempt all wait for the worker (None: for each other) and no step is
        made."""
        self.moved_at = START
        """When the last step was made."""
        self.stillborn = False
        """Whether every training command fails before its first step."""
        self.stillborn_code = 1
        self.bad_starts: set[str | int] = set()
        """Nodes, and workers, whose training commands fail before their first step, while all others wait for
        them."""
        self.slow_trainers: set[int] = set()
        """Workers whose trainer container is not up yet."""
        self.unhealthy: set[str | int] = set()
        """Nodes, and workers, where health checks fail."""
        self.hanging: set[str | int] = set()
        """Nodes, and workers, whose sidecars hang in a restore."""
        self.dead_mounts: set[str | int] = set()
        """Nodes, and workers, where nothing comes from the remote tier's mount, which is all that a restore
        there could read."""
        self.slow: set[str | int] = set()
        """Nodes, and workers, where bytes come, but so slowly that a restore takes `slow_for` seconds."""
        self.slow_for = 0.0
        self.staying = False
        """Whether scripts have a loop whose process stays."""
        self.refusal = ""
        """Why they would not, although they have one."""
        self.late: dict[int | None, str] = {}
        """By worker: why its rank does not stay this time."""
        self.undying: set[str] = set()
        """Pods (UIDs) of whose training command SIGKILL does not end everything."""
        self.flush_seconds = 0
        """How long sidecars bring what they owe to the remote tier, once told to finish; 0: they end at once,
        and owe nothing."""
        self.dying: dict[str, float] = {}
        """When the pod (UID) that is being deleted will be gone."""
        self.grace = 2.0
        """Seconds that a pod takes to end when it is deleted."""
        self.ends_as = "Failed"
        """Phase of such a pod once its containers have ended, a moment before it is gone; Succeeded where
        launchers exit with 0."""
        self.dead_nodes: dict[str, float] = {}
        self.image = "sidecar:1"
        """Which the operator is told to use."""
        self.node_grace = 5.0
        """Seconds after which Kubernetes says that a dead node is not ready."""
        self.cut: set[frozenset[str]] = set()
        """Pairs of nodes, or of a node and "controller", between which nothing gets through."""
        self.fabric = False
        """Whether trainers talk over a network of their own, which `cut` does not touch."""
        self.containers: dict[str, SidecarContainer] = {}
        self.start_seconds = 0.0
        """What sidecars need from the start of their container until they listen."""
        self.stopped_kubelets: dict[str, float] = {}
        """Nodes on which everything else lives, and since when."""
        self.refusing: set[str] = set()
        """Dead nodes whose kernel still says that nobody is there."""
        self.heartbeats = False
        """Whether sidecars say which neighbours they miss."""
        self.missed: dict[tuple[str, str], float] = {}
        """Since when a pod (UID) misses another one (IP address)."""
        self.starts: dict[int, dict[int, Version | None]] = {}
        self.crashes = 0
        self.notices: list[str] = []
        self.created: list[CreatePod] = []
        self.unwelcome_to: dict[str, tuple[str, ...]] = {}
        """By pod name, the nodes that it would rather not be on."""
        self.deleted: list[DeletePod] = []
        self.deleted_job = False
        self.last: Decision = Decision()
        self.have_service = self.have_credentials = self.knows_credentials = False
        self.owner_size: int | None = None
        self.kubelets: dict[str, float] = {}
        self.refusals = RefusalMemory()
        self.refuses: Callable[[Action], str] = lambda action: ""
        """What the API server says to an action that it refuses."""
        self.strangers: set[str] = set()
        """Names of pods that are not the job's."""
        self.budget: int | None = None
        self.budget_problem = ""
        self.have_gang = False
        self.gang_problem = ""
        self.uids = 0

    # The controller

    @property
    def by_operator(self) -> float:
        """The time as the operator has it."""
        return self.now

    @property
    def status(self) -> JobRecord:
        return self.job.status

    def condition(self, kind: str) -> Condition:
        """Returns a condition that the status has."""
        found = self.status.condition(kind)
        assert found is not None, f"nothing is said of {kind}"
        return found

    def told(self, kind: str) -> tuple[bool | None, str, str]:
        """Returns status, reason and message of a condition that the status has."""
        found = self.condition(kind)
        return found.status, found.reason, found.message

    def assert_told(self, kind: str, wanted: str | tuple[bool | None, str], *parts: str) -> None:
        """Fails unless the condition has that reason (or status and reason; empty: any), and these parts."""
        found = self.condition(kind)
        assert wanted in ("", found.reason, (found.status, found.reason)), found
        assert not [part for part in parts if part not in found.message], found.message

    @property
    def summary(self) -> dict[str, Any]:
        """`status.lastRecovery`, which there is."""
        assert self.status.last_recovery is not None
        return dict(self.status.last_recovery)

    @property
    def saved(self) -> SavedPlacement:
        """The placement that was written down, which there is."""
        assert self.placement is not None
        return self.placement

    def change(self, **spec: object) -> None:
        """The owner changes the job's spec."""
        self.job = replace(self.job, spec=replace(self.job.spec, **spec))  # type: ignore[arg-type]

    def observe(self) -> Observation:
        image = choose_sidecar_image(self.job.status, self.pods.values(), self.image)
        return Observation(
            now=self.now,
            job=replace(self.job, sidecar_image=image),
            pods=tuple(pod for pod in self.pods.values() if not pod.is_spare),
            spares=tuple(pod for pod in self.pods.values() if pod.is_spare),
            nodes=self.nodes,
            reports=dict(self.reports),
            placement=self.placement,
            patience=Patience(),
            have_service=self.have_service,
            have_credentials=self.have_credentials,
            knows_credentials=self.knows_credentials,
            have_gang=self.have_gang,
            gang_problem=self.gang_problem,
            kubelets=self.kubelets,
            owner_size=self.owner_size,
            refused=self.refusals.known,
            names_taken=self.refusals.names_taken,
            budget=self.budget,
            budget_problem=self.budget_problem,
        )

    def reconcile(self, killed_after: int | None = None) -> None:
        """One look. `killed_after`: the operator dies after so many actions (the status write counts as
        one).
        """
        observed = self.observe()
        decision = self.last = decide(observed)
        due = self.refusals.due(decision.before, self.now)
        work: list[Action | JobRecord] = [*due]
        if decision.status is not None:
            work.append(decision.status)
        work += decision.after
        failures = []
        for done, item in enumerate(work):
            if killed_after is not None and done >= killed_after:
                self.forget()
                return
            failure = None if isinstance(item, JobRecord) else self._refused(item)
            if failure is None:
                self._do(item)
            else:
                failures.append((item, failure))
        self.refusals.note(decision.before, failures, self.now)
        self.notices += [notice.reason for notice in decision.notices]

    def forget(self) -> None:
        """What a restarted operator knows of the sidecars, and of what was refused: nothing yet."""
        self.reports = {}
        self.refusals = RefusalMemory()

    def _refused(self, action: Action) -> ApiFailure | None:
        name = pod_name(self.job, action.worker, action.incarnation) if isinstance(action, CreatePod) else ""
        if name in self.strangers:
            return NameTaken(name, f"Pod {name} is not this job's")
        said = self.refuses(action)
        return ApiFailure(403, said) if said else None

    def _do(self, item: Action | JobRecord) -> None:
        match item:
            case JobRecord():
                if item != self.status:  # as the operator's loop, which writes no status that is the same
                    self.job = replace(self.job, status=parse_record(fit_status(item)[1]))
            case CreatePod():
                self.created.append(item)
                self._create(item)
            case CreateSpare(number, avoid, _):
                self._make(f"j-spare-{number}", SPARE, 0, avoid, number)
            case Promote(pod, worker, incarnation):
                if self.pods.get(pod.uid) == pod:  # else the resourceVersion does not match
                    self.pods[pod.uid] = replace(pod, worker=worker, incarnation=incarnation)
            case DeletePod():
                assert item.why.startswith(f"pod {item.name}"), f"nobody is told why {item.name} goes"
                assert ": " in item.why
                self.deleted.append(item)
                self._delete(item)
            case SavePlacement(placement):
                self.placement = placement
            case Push(uid, directive):
                assert directive.attempt == self.status.attempt, "sent before it was written"
                if self._reaches(uid):
                    self.sidecars[uid].accept(directive)
            case EnsureService():
                self.have_service = True
            case EnsureCredentials():
                self.have_credentials = self.knows_credentials = True
            case EnsureGang():
                self.have_gang = not self.gang_problem
            case RemoveGang():
                self.have_gang = False
            case EnsureBudget(min_available):
                if not self.budget_problem:
                    self.budget = min_available
            case RemoveBudget():
                self.budget = None
            case DeleteJob():
                self.deleted_job = True

    # Kubernetes

    def _create(self, action: CreatePod) -> None:
        name = f"j-{action.worker}-{action.incarnation}"
        self._make(name, action.worker, action.incarnation, action.avoid)
        self.unwelcome_to[name] = action.unwelcome

    def _make(
        self, name: str, worker: int, incarnation: int, avoid: tuple[str, ...], spare: int | None = None
    ) -> None:
        if any(pod.name == name for pod in self.pods.values()):
            return
        self.uids += 1
        uid = f"pod-{self.uids}"
        self.pods[uid] = PodView(
            name, uid, self.job.uid, worker, incarnation, None, None, "Pending", self.now,
            avoided=frozenset(avoid), spare=spare, resource_version="1",
            sidecar_image=choose_sidecar_image(self.job.status, self.pods.values(), self.image),
        )  # fmt: skip

    def _delete(self, action: DeletePod) -> None:
        pod = self.pods.get(action.uid)
        if pod is None:
            return
        if action.force:
            self._gone(action.uid)
        elif not pod.deleting:
            self.pods[action.uid] = replace(pod, given_up=action.given_up)
            self.end_gracefully(action.uid)

    def end_gracefully(self, uid: str, disruption: str = "") -> None:
        """As `kubectl delete pod` does it: the containers end one after the other, the pod turns Failed, and
        then it is gone."""
        self.pods[uid] = replace(self.pods[uid], deleting=True, deleted_at=self.now, disruption=disruption)
        self.dying[uid] = self.now + self.grace

    def _gone(self, uid: str) -> None:
        self._vanish(uid)
        for table in (self.pods, self.dying):
            table.pop(uid, None)

    def _kubelets(self) -> None:
        for uid, at in list(self.dying.items()):
            pod = self.pods[uid]
            if pod.node in self.dead_nodes or pod.node in self.stopped_kubelets or at - 1 > self.now:
                continue
            if at <= self.now:
                self._gone(uid)
            elif pod.ip is not None and not pod.terminal:
                self.pods[uid] = replace(pod, phase=self.ends_as)
                self._vanish(uid)
        for name, at in {**self.dead_nodes, **self.stopped_kubelets}.items():
            if name in self.nodes and at + self.node_grace <= self.now and not self.nodes[name].lost:
                self.nodes[name] = replace(self.nodes[name], lost="node is not ready (NodeStatusUnknown)")
        used = Counter(pod.node for pod in self.pods.values() if pod.node and not pod.deleting)
        for uid, pod in list(self.pods.items()):
            if pod.deleting or pod.terminal:
                continue
            if pod.node is None:
                fit = [
                    n
                    for n in self.nodes.values()
                    if not n.lost and n.hostname not in pod.avoided and n.schedulable
                ]
                if not fit:
                    since = pod.unschedulable_since or self.by_operator
                    self.change_pod(uid, unschedulable_since=since, message="Unschedulable: 0 nodes fit")
                    continue
                unwelcome = self.unwelcome_to.get(pod.name, ())
                order = [(n.name != self.liked, n.hostname in unwelcome, used[n.name], n.name) for n in fit]
                node = min(order)[-1]
                used[node] += 1
                self.change_pod(
                    uid, node=node, unschedulable_since=None, claimed=False, message="",
                    housed_since=self.by_operator,
                )  # fmt: skip
            elif pod.ip is None and pod.node in self.not_starting:
                phase, reason, words = self.not_starting[pod.node]
                self.change_pod(uid, claimed=True, phase=phase, disruption=reason, message=words)
            elif pod.ip is None and not self._no_kubelet(pod.node):
                address = f"127.0.0.{int(uid[4:])}"
                self.pods[uid] = replace(pod, ip=address, phase="Running", claimed=True)
                self.sidecars[uid] = self.make_sidecar(uid, pod.worker)
                self.containers[uid] = SidecarContainer(self.now, self.start_seconds)
                self._publish(uid)
        for uid in list(self.containers):
            if uid in self.pods and not self._no_kubelet(self.pods[uid].node):
                self.containers[uid].tick(self.now)
                self._publish(uid)

    def make_sidecar(self, uid: str, worker: int) -> SidecarModel:
        """Of a pod that has begun to run. A spare's learns its worker from a directive."""
        return SidecarModel(self, uid, worker)

    def _no_kubelet(self, node: str | None) -> bool:
        return node in self.dead_nodes or node in self.stopped_kubelets

    def _publish(self, uid: str) -> None:
        """What the operator's watch makes of the kubelet's word."""
        container = self.containers[uid]
        if container.status != container.published:
            container.published = container.status
            said = replace(sidecar_view(container.status), since=self.now)
            self.pods[uid] = replace(self.pods[uid], sidecar=said)

    def change_pod(self, pod: str | int, **changes: object) -> None:
        """`pod`: its UID, or the worker whose newest one it is."""
        uid = self.member(pod) if isinstance(pod, int) else pod
        self.pods[uid] = replace(self.pods[uid], **changes)  # type: ignore[arg-type]

    def change_nodes(self, *names: str, **changes: object) -> None:
        """Those nodes; all of them if none is named."""
        for name in names or tuple(self.nodes):
            self.nodes[name] = replace(self.nodes[name], **changes)  # type: ignore[arg-type]

    def sidecar(self, worker: int) -> SidecarModel:
        """Returns the reachable sidecar of the worker's newest pod, which there is."""
        found = self.live_sidecar(worker)
        assert found is not None
        return found

    def live_sidecar(self, worker: int | None) -> SidecarModel | None:
        """The reachable sidecar of the worker's newest pod."""
        found = [
            s
            for uid, s in self.sidecars.items()
            if s.worker == worker and s.reachable and not self._dead(uid)
        ]
        return max(found, key=lambda s: int(s.pod[4:]), default=None)

    def _dead(self, uid: str) -> bool:
        pod = self.pods.get(uid)
        return pod is None or pod.node in self.dead_nodes

    def offered(self, source: Source, rank: int, asking: SidecarModel) -> list[Artifact]:
        """What a sidecar finds at a source when it asks there."""
        if source.tier is Tier.REMOTE:
            versions = self.remote - self.bad_remote if self.remote_up else set()
            return [Artifact(rank, version) for version in sorted(versions)]
        if source.parity is not None:
            return self.rebuildable(source.parity, rank, asking)
        peer = source.peer.worker if source.peer else None
        holder = asking if source.tier is Tier.LOCAL else self.live_sidecar(peer)
        if holder is None:
            return []
        held = holder.own if source.tier is Tier.LOCAL else holder.own | holder.hosted
        return sorted((each for each in held if each.rank == rank), key=by_age)

    def rebuildable(self, group: ParityGroup, rank: int, asking: SidecarModel) -> list[Artifact]:
        """What the group's blocks and the other members give of the rank. One rank per worker; those that are
        no more lie at whom the group names."""
        ranks = group.ranks or tuple(peer.worker for peer in group.members)
        keepers = [self.live_sidecar(peer.worker) if peer.host else None for peer in group.holders]
        there = Counter(
            (version, kind)
            for index, keeper in enumerate(keepers)
            if keeper is not None
            for share, version, kind in keeper.blocks
            if share == Share(index, ranks)
        )
        there.update(
            (artifact.version, artifact.kind)
            for peer, other in zip(group.members, ranks, strict=True)
            if peer.host and other != rank
            for artifact in self.offered(Source(Tier.PEER, peer), other, asking)
        )
        return [Artifact(rank, *key) for key, count in sorted(there.items(), key=repr) if count >= len(ranks)]

    # Faults

    def kill_node(self, name: str) -> None:
        self.dead_nodes.setdefault(name, self.now)

    def kill_processes(self, name: str) -> None:
        """Everything on the node dies, the kubelet too, and its kernel goes on: connections break at once,
        and so does training."""
        self.kill_node(name)
        self.refusing.add(name)
        here = {uid for uid, pod in self.pods.items() if pod.node == name}
        for uid, sidecar in self.sidecars.items():
            if uid not in here and sidecar.trainer.state is TrainerState.RUNNING:
                sidecar.fail()

    def stop_kubelets(self, *names: str) -> None:
        """Those of these nodes; all of them if none is named."""
        for name in names or self.nodes:
            self.stopped_kubelets.setdefault(name, self.now)

    def start_kubelets(self, *names: str) -> None:
        for name in names or self.nodes:
            if self.stopped_kubelets.pop(name, None) is not None:
                self.nodes[name] = replace(self.nodes[name], lost="")

    def kill_sidecar(self, uid: str) -> None:
        if uid in self.containers:
            self.containers[uid].kill(self.now)

    def revive_node(self, name: str) -> None:
        self.refusing.discard(name)
        if self.dead_nodes.pop(name, None) is not None:
            self.nodes[name] = replace(self.nodes[name], lost="")
            for uid, pod in list(self.pods.items()):
                if pod.node == name:
                    self._gone(uid)

    def cut_off(self, node: str, *others: str) -> None:
        """Nothing gets through between it and those (all other nodes and "controller" if none is named)."""
        ends = others or (*self.nodes, "controller")
        self.cut |= {frozenset((node, other)) for other in ends if other != node}

    def evict(self, uid: str) -> None:
        pod = self.pods.get(uid)
        if pod is not None and not pod.deleting:
            self.end_gracefully(uid, "EvictionByEvictionAPI")

    def crash(self, worker: int, code: int = 1, reason: str = "Crashed", message: str = "") -> bool:
        sidecar = self.live_sidecar(worker)
        if sidecar is None or sidecar.trainer.state is not TrainerState.RUNNING:
            return False
        sidecar.fail(code, reason, message=message)
        return True

    def spoil_copies(self, worker: int) -> None:
        """All that its holder has of it now goes bad."""
        holder = self.sidecar(worker).told.holders[0].worker
        self.bad_copies |= {(holder, each) for each in self.sidecar(holder).hosted if each.rank == worker}

    def member(self, worker: int) -> str:
        """UID of the worker's newest pod."""
        return max(
            (uid for uid, pod in self.pods.items() if pod.worker == worker), key=lambda uid: int(uid[4:])
        )

    # Sidecars and trainers

    def started(self, attempt: int, worker: int, version: Version | None, directive: Directive) -> None:
        for uid, other in self.sidecars.items():
            beside = (
                other.killed_at is not None
                and other.directive is not None
                and other.directive.attempt == attempt
            )
            assert not beside or self.pods[uid].deleting, (
                f"attempt {attempt} began beside a rank of an older one"
            )
        place = {worker, self.pods[self.member(worker)].node}
        assert directive.policy.health_check is None or not place & self.unhealthy, (
            "began in an unhealthy place"
        )
        starts = self.starts.setdefault(attempt, {})
        starts[worker] = version
        assert len({*starts.values()}) == 1, f"attempt {attempt} started from different versions: {starts}"

    def finished(self, uid: str) -> None:
        self.pods[uid] = replace(self.pods[uid], phase="Succeeded")
        self._vanish(uid)

    def _vanish(self, uid: str) -> None:
        for table in (self.sidecars, self.reports, self.position, self.containers):
            table.pop(uid, None)

    def _training(self) -> None:
        crew = [s for uid, s in self.sidecars.items() if not self._dead(uid) and s.reachable]
        running = [s for s in crew if s.trainer.state is TrainerState.RUNNING and s.directive is not None]
        attempt = max((s.directive.attempt for s in running if s.directive), default=0)
        team = {s.worker: s for s in running if s.directive and s.directive.attempt == attempt}
        ended = [
            s
            for s in crew
            if s.trainer.state is TrainerState.FAILED and s.directive and s.directive.attempt == attempt
        ]
        ill = [s for s in team.values() if {s.worker, self.pods[s.pod].node} & self.bad_starts]
        ill = [s for s in ill if s.trainer.first_step_at is None]
        for s in ill:
            s.fail()
        failed = any({s.worker, self.pods[s.pod].node}.isdisjoint(self.bad_starts) for s in ended)
        if ill or (ended and not failed):
            return  # the others have not met yet
        if failed or self.stillborn:
            for s in team.values():  # a broken collective brings the others down
                if s.pod not in self.undying and not (self.staying and failed):
                    s.fail(self.stillborn_code if self.stillborn else 1)
            return
        if not team or any(len(team) < s.directive.workers for s in team.values() if s.directive):
            return
        nodes = {self.pods[s.pod].node for s in team.values()}
        if not self.fabric and any(pair <= nodes for pair in self.cut):
            return  # a collective that waits
        step = min(self.position[s.pod] for s in team.values()) + 1
        if self.hung is not None and self.hung[0] == attempt:
            self._stall(team, step - 1)
            return
        self.moved_at = self.now
        for s in team.values():
            self.position[s.pod] = step
            first = s.trainer.first_step_at or self.now
            s.trainer = replace(s.trainer, step=step, first_step_at=first, step_seconds=self.step_seconds)
            if step >= self.total_steps:
                s.trainer = replace(s.trainer, state=TrainerState.SUCCEEDED, exit_code=0)
        if attempt in self.poisoned:
            for s in team.values():
                s.trainer = replace(s.trainer, not_finite=s.trainer.not_finite + 1)
            return
        if not all(self.listens(s.pod) for s in team.values()):
            return  # no version is complete without that one's part
        version = Version(step, attempt)
        if self.job.spec.delta is not DeltaMode.NONE:
            self._save(team, version, Kind.DELTA)
        if step % (self.job.spec.snapshot_every or 4) == 0:
            self._save(team, version, Kind.SNAPSHOT)
            self._complete(team, version)

    def _stall(self, team: dict[int, SidecarModel], step: int) -> None:
        """What the sidecars say once their limit has passed."""
        assert self.hung is not None
        for worker, s in team.items():
            limits = s.directive.policy.hang if s.directive else None
            if limits is not None and self.now - self.moved_at > limits.seconds:
                slowest = step - (worker == self.hung[1])
                s.trainer = replace(
                    s.trainer, stalled_since=self.moved_at, slowest_rank=worker, slowest_step=slowest
                )

    def _save(self, team: dict[int, SidecarModel], version: Version, kind: Kind) -> None:
        """Each has its own and its holders a copy; a block is complete when every member's is in it."""
        for sidecar in team.values():
            if kind is Kind.DELTA and (sidecar.worker, version.step) in self.skipped:
                continue
            artifact = Artifact(sidecar.worker, version, kind)
            sidecar.own.add(artifact)
            sidecar.captured_deltas += kind is Kind.DELTA
            for holder in sidecar.told.holders:
                if holder.worker in team:
                    team[holder.worker].hosted.add(artifact)
        for sidecar in team.values():
            for group in sidecar.told.folded:
                ranks = tuple(peer.worker for peer in group.members)
                if all(each in team and Artifact(each, version, kind) in team[each].own for each in ranks):
                    index = [peer.worker for peer in group.holders].index(sidecar.worker)
                    sidecar.blocks.add((Share(index, ranks), version, kind))

    def _complete(self, team: dict[int, SidecarModel], version: Version) -> None:
        """All have the snapshot: older ones go, and it may go to the remote tier."""
        self.made[version] = len(team)
        self.committed = version
        for directive in {s.told.placement: s.told for s in team.values()}.values():
            if directive.holders or directive.parity:
                self.copied[directive.attempt, directive.placement] = version
        for sidecar in team.values():
            sidecar.free(version.step - (self.job.spec.snapshot_every or 4))
        remote = self.job.spec.remote
        if remote is not None and version.step % remote["everySteps"] == 0 and self.remote_up:
            self.remote = set(sorted({*self.remote, version})[-remote["keep"] :])

    def are_cut(self, one: str, other: str) -> bool:
        """Between two pods (UIDs), or a pod and "controller"."""
        ends = [name if name == "controller" else (self.pods[name].node or "") for name in (one, other)]
        return frozenset(ends) in self.cut

    def missed_by(self, sidecar: SidecarModel) -> tuple[Unreachable, ...]:
        """What its pulses say: neighbours on dead or cut off nodes are silent, closed ones refuse."""
        directive = sidecar.directive
        if not self.heartbeats or directive is None:
            return ()
        ips = {pod.ip: uid for uid, pod in self.pods.items()}
        found = []
        for peer in {*directive.holders, *directive.hosted, directive.coordinator}:
            uid, key = ips.get(peer.host), (sidecar.pod, peer.host)
            if peer.worker == sidecar.worker:
                continue
            silent = uid is None or self._mute(uid) or self.are_cut(sidecar.pod, uid)
            silent = silent or (uid in self.sidecars and self.sidecars[uid].hung)
            if not silent and uid in self.sidecars and self.listens(uid):
                self.missed.pop(key, None)
                continue
            since = self.missed.setdefault(key, self.now)
            if self.now - since >= 3:
                how = ConnectionFailure.SILENT if silent else ConnectionFailure.REFUSED
                found.append(Unreachable(peer.worker, peer.host, since, how))
        return tuple(sorted(found, key=lambda each: each.worker))

    def newest_step(self) -> int:
        return max((sidecar.trainer.step or 0 for sidecar in self.sidecars.values()), default=0)

    def poll(self) -> None:
        """The operator's long polls."""
        for uid, pod in self.pods.items():
            if pod.ip is None or pod.terminal:
                continue
            if self._reaches(uid):
                self._heard(uid, self.sidecars[uid].report(), self.now)
            else:
                self._unheard(uid, self.now)

    def _heard(self, uid: str, report: Report, now: float) -> None:
        known = self._known(uid)
        before = (
            known.report.trainer.step if known.report and known.report.attempt == report.attempt else None
        )
        stepped = before is not None and (report.trainer.step or 0) > before
        self.reports[uid] = WorkerReport(report, now, None, stepped_at=now if stepped else known.stepped_at)

    def _unheard(self, uid: str, now: float) -> None:
        known = self._known(uid)
        since = now if known.silent_since is None else known.silent_since
        self.reports[uid] = replace(known, silent_since=since, host=self._sign(uid))

    def _known(self, uid: str) -> WorkerReport:
        return self.reports.get(uid, WorkerReport(None, None, None))

    def _sign(self, uid: str) -> HostProbe:
        sidecar = self.sidecars.get(uid)
        if sidecar is None or not sidecar.reachable or self._mute(uid) or self.are_cut("controller", uid):
            return HostProbe.NOTHING
        return HostProbe.ACCEPTED if sidecar.hung else HostProbe.REFUSED

    def listens(self, uid: str) -> bool:
        """Whether the pod's sidecar takes calls, from whoever gets through to it."""
        sidecar, container = self.sidecars.get(uid), self.containers.get(uid)
        up = container is None or container.listening
        return sidecar is not None and up and not (sidecar.closed or sidecar.hung or self._dead(uid))

    def _reaches(self, uid: str) -> bool:
        """Whether the controller gets through to the pod's sidecar."""
        return self.listens(uid) and self.sidecars[uid].reachable and not self.are_cut("controller", uid)

    def _mute(self, uid: str) -> bool:
        """Nothing comes back from its host, not even a refusal."""
        node = self.pods[uid].node
        return node in self.dead_nodes and node not in self.refusing

    @property
    def now(self) -> float:
        """By the operator's clock. To set it is a step of its machine's wall clock."""
        return self._clock()

    @now.setter
    def now(self, wall: float) -> None:
        self._wall = wall

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self._wall, self._passed = self._wall + seconds, self._passed + seconds

    def tick(self, killed_after: int | None = None) -> None:
        self.wait(1)
        self._kubelets()
        for sidecar in list(self.sidecars.values()):
            if not self._dead(sidecar.pod):
                sidecar.tick()
        self._training()
        self.poll()
        self.reconcile(killed_after)

    def until(
        self, what: str, limit: int = 200, attempt: int = 0, kills: Mapping[int, int] | None = None
    ) -> None:
        """Tick until the phase is `what`, in that attempt or a later one. `kills`: by tick, after how many
        actions the operator dies."""
        for moment in range(limit):
            settled = what != "Running" or self.status.recovery is None
            if self.status.phase == what and settled and self.status.attempt >= attempt:
                return
            self.tick((kills or {}).get(moment))
        raise AssertionError(f"never {what}: {render_record(self.status)}")

    def tick_until(self, condition: Callable[[], object], limit: int = 400) -> None:
        for _ in range(limit):
            if condition():
                return
            self.tick()
        raise AssertionError(f"in vain: {render_record(self.status)}")

    def starts_until_failed(self) -> list[float]:
        """Tick until the job is given up; when each new attempt began."""
        began: list[float] = []
        while self.status.phase != "Failed":
            attempt = self.status.attempt
            self.tick()
            if self.status.attempt > attempt:
                began.append(self.now)
        return began

    def train(self, steps: int, attempt: int | None = None) -> None:
        """Fails unless that is the attempt then."""
        for _ in range(steps):
            self.tick()
        assert attempt in (None, self.status.attempt), f"it is in attempt {self.status.attempt}"

    def running(self, steps: int = 9) -> Self:
        """Tick until it runs, and so many steps more. Returns the world."""
        self.until("Running")
        self.train(steps)
        return self

    def recovered(self, attempt: int = 2, limit: int = 200, crash: int | None = None) -> dict[str, Any]:
        """Tick until training goes on in that attempt; `status.lastRecovery` then. `crash`: the worker whose
        command ends first."""
        if crash is not None:
            self.crash(crash)
        self.tick()
        self.until("Running", limit, attempt)
        return self.summary

    def recovered_from(self, cause: str, *parts: str, attempt: int = 2) -> dict[str, Any]:
        """The same; fails unless that was the cause, and its message has these parts."""
        self.recovered(attempt)
        self.assert_back_from(cause, *parts)
        return self.summary

    def assert_back_from(self, cause: str, *parts: str) -> None:
        """Fails unless the last recovery had that cause, and its message has these parts."""
        assert self.summary["cause"] == cause, self.summary
        assert not [part for part in parts if part not in self.summary["message"]], self.summary["message"]

    def suspended(self) -> None:
        """Tick until the job, which its owner suspends, has given its pods back."""
        self.change(suspend=True)
        self.until("Suspended")

    def home(self, worker: int) -> str:
        """Name of the node that the worker's pod is on."""
        node = self.pods[self.member(worker)].node
        assert node is not None
        return node

    def lose_all(self) -> None:
        """Every pod vanishes at once."""
        for uid in list(self.pods):
            self._gone(uid)

    def spares(self) -> list[PodView]:
        return [pod for pod in self.pods.values() if pod.is_spare]


def trained(steps: int = 9, racks: int = 2, nodes_per_rack: int = 2, **spec: object) -> World:
    """Returns a world whose job, of that spec, runs and has made so many steps."""
    return World(make_spec(**spec), racks, nodes_per_rack).running(steps)


def watched(node_grace: float = 1e9, **spec: object) -> World:
    """The same, with heartbeats: sidecars say whom they miss, and Kubernetes takes `node_grace` to notice."""
    world = World(make_spec(**spec))
    world.heartbeats, world.node_grace = True, node_grace
    return world.running()
