"""Runs the whole in one thread: the operator's real decisions, and a process per sidecar.

Kubelets, scheduler and API are those of `World` (`tests/operator/world_in_memory.py`), nodes and networks
too. Sidecars are real but for their wires (`process.py`), trainers are a model (`trainer.py`). Everything
random comes from one seed. What happens is written into `history`, and nothing is judged here: `checker.py`
reads it afterwards.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.operator.world_in_memory import START, World
from tests.simulation.faults import Raw, heal, strike, with_neighbours
from tests.simulation.plan import Fault, Plan
from tests.simulation.process import Process, in_simulation
from tests.simulation.staying import StayingLauncher
from tests.simulation.store import Bucket, Volumes
from tests.simulation.trainer import Launcher
from tiercheck.clocks import SteadyClock
from tiercheck.protocol.directive import Directive
from tiercheck.protocol.report import Report
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import DeletePod, EnsureCredentials, ProbeSidecar, Push
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord
from tiercheck_operator.report_bounds import to_operator_clock
from tiercheck_sidecar.exchange.frames import PeerSilent, WireBroken

Entry = tuple[float, str, dict[str, Any]]
LIVES_WITHIN = 900.0
"""Simulated seconds after everything is healed in which training must go on: two back-offs of a kubelet, and
what follows."""
_GLANCE = 0.25
"""Seconds between looks whether a small schedule may go on, or is over."""


class Pod:
    """What runs in one pod; in `World`'s table of sidecars."""

    def __init__(self, world: Simulation, uid: str, worker: int) -> None:
        self._world, self.uid, self.pod = world, uid, uid
        self.born_as, self.credentials = worker, world.credentials
        self.lives = itertools.count()
        self.folder = Path("/memory") / uid
        kind = Launcher if world.plan.notices is None else StayingLauncher
        self.launcher = kind(world, self)
        self.process: Process | None = None
        self.reachable, self.closed, self.hung = True, False, False

    @property
    def node(self) -> str:
        return self._world.pods[self.uid].node or "" if self.uid in self._world.pods else ""

    @property
    def worker(self) -> int:
        return self.process.state.config.worker if self.process else self.born_as

    def start(self) -> None:
        self.process = Process(self._world, self, self.born_as)
        held = tuple((s.tier, s.rank, s.kind, s.version) for s in self.process.vault.held())
        self._world.record("inventory", pod=self.uid, held=held)
        self.launcher.connect(self.process)

    def kill(self) -> None:
        """Its sidecar's process. Its memory stays."""
        if self.process is not None:
            self._world.record("down", pod=self.uid)
            self.process.die()
            self.born_as = self.process.state.config.worker
            self.process = None

    def vanish(self) -> None:
        self.kill()
        self.launcher.vanish()
        self._world.volumes.drop(self.folder)
        self._world.record("gone", pod=self.uid)


class Simulation(World):
    """`play` it once."""

    now: float = START
    """Of all; events set it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.spec, racks=2, nodes_per_rack=plan.nodes_per_rack)
        self.plan, self.rng = plan, random.Random(f"world {plan.seed}")
        self.history: list[Entry] = []
        self.volumes = Volumes()
        self.bucket = Bucket(self.record, lambda: self.now, random.Random(f"bucket {plan.seed}"))
        self.fabric, self.start_seconds, self.grace = plan.fabric, plan.start_seconds, 3.0
        self.skew: dict[str, float] = {}
        self._jump = 0.0
        """Seconds by which the clock of the operator's node is ahead."""
        self._steady: SteadyClock | None = None
        """The operator's, once that has made a step."""
        self.credentials = 0
        """Which the operator issued last."""
        self.neighbours: list[Raw] = []
        self.storeless: set[str] = set()
        """Nodes from which the bucket cannot be reached."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._awaited: list[Fault] = []
        self._seen_of_it = 0
        """How often what the first of them waits for has been recorded."""
        self._struck_at = START
        self._due = 0
        """Strikes whose moment has come, but not their time."""
        self.look_within = (0.05, 0.6)
        """Seconds from a change until a process gets to look at it."""
        self._seconds = 0
        self._healed = 0
        """Where that stands in the history."""
        self._wake = 0.0
        self._seen: tuple[Any, ...] = ()
        self._asked: set[str] = set()
        self._verdicts: dict[str, Any] = {}
        self._told: Any = None
        self._heard_since: dict[str, float] = {}
        """Since when each pod (UID) has answered whenever it was asked."""

    # Time

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), what))

    def advance(self, until: float) -> None:
        """Let everything happen up to then. May be called by what happens."""
        while self._events and self._events[0][0] <= until:
            at, _, what = heapq.heappop(self._events)
            self.now = max(self.now, at)
            what()
        self.now = max(self.now, until)

    def step_clock(self, ahead: float) -> None:
        """The wall clock of the operator's node shows so many seconds more than it should."""
        if self._steady is None and ahead:
            self._start_clock()
        self._jump = ahead

    def _start_clock(self) -> None:
        self._steady = SteadyClock(lambda: self.now + self._jump, lambda: self.now)

    @property
    def by_operator(self) -> float:
        return self.now if self._steady is None else self._steady()

    def forget(self) -> None:
        super().forget()
        self.knows_credentials = self.have_credentials
        if self._steady is not None:
            self._start_clock()

    def stroll(self, process: Process) -> None:
        """Sometimes a transfer takes a while."""
        if self.rng.random() < 0.2:
            process.wait(self.rng.uniform(0.05, 1.5))

    def record(self, what: str, /, **fields: Any) -> None:
        self.history.append((round(self.now - START, 3), what, fields))
        if self._awaited and self._awaited[0].moment == (
            f"sealed {fields['what'][0].value}" if what == "sealed" else what
        ):
            self._seen_of_it += 1
            if self._seen_of_it == self._awaited[0].count:
                fault, self._seen_of_it = self._awaited.pop(0), 0
                self._due += 1
                self.later(fault.at, lambda: self._strike_in_time(fault))

    def _strike_in_time(self, fault: Fault) -> None:
        self._due -= 1
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        strike(self, fault)
        self._struck_at = self.now

    def play(self) -> list[Entry]:
        """The schedule, then everything is healed, and then it must go on."""
        with in_simulation(self):
            spec = self.plan.spec
            keep = spec.remote["keep"] if spec.remote else 0
            self.record(
                "begins",
                plan=str(self.plan),
                workers=spec.workers,
                copies=spec.copies,
                keep=keep,
                prove=spec.prove_steps,
            )
            self.later(1.0, self._second)
            for fault in self.plan.faults:
                if fault.moment:
                    self._awaited.append(fault)
                else:
                    self.later(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
            if self.plan.lull is None:
                self.advance(START + self.plan.seconds)
            else:
                self._wait_for_strikes(self.plan.lull)
            pause = 1.0 if self.plan.lull is None else _GLANCE
            heal(self)
            self._healed = len(self.history)
            self.record("healed")
            end = self.now + LIVES_WITHIN
            while self.now < end and not self._settled():
                self.advance(self.now + pause)
            self.record("over")
        return self.history

    def _wait_for_strikes(self, lull: float) -> None:
        """Until the last one is some time ago. One whose moment never comes strikes at the end."""
        end = START + self.plan.seconds
        while self._awaited or self._due or self.now < self._struck_at + lull:
            if self._awaited and self.now >= end:
                self._strike(self._awaited.pop(0))
            self.advance(self.now + _GLANCE)

    def _settled(self) -> bool:
        """Everybody trains, and something that was trained since is complete again."""
        if self.status.phase != "Running" or self.status.recovery is not None:
            return False
        protected = self.status.condition(conditions.PROTECTED)
        lasting = (conditions.UNPROTECTED_WORKERS, conditions.NO_COPIES)
        if protected is None or not (protected.status or protected.reason in lasting):
            return False
        since, attempt, least, marks = self.history[self._healed][0], self.status.attempt, 0, None
        for at, what, f in itertools.islice(self.history, self._healed, None):
            if what == "step" and f["attempt"] == attempt and not least:
                least = f["step"]
            elif what == "verdict" and at > since and (f["attempt"] == attempt or not self.plan.brisk):
                marks = f
        if not least or marks is None:
            return False
        bare = protected.reason in lasting
        named = ["local", *(["peer"] if not bare else []), *(["remote"] if self.plan.spec.remote else [])]
        if not self.plan.brisk:
            least += 1
        return all(marks[name] is not None and marks[name].step >= least for name in named)

    # Every second

    def _second(self) -> None:
        self.later(1.0, self._second)
        self._seconds += 1
        if self.job.spec.attach is not None:
            self._look_after_owned()
        self._kubelets()
        self._look_after_pods()
        self._training()
        self.poll()
        self._maybe_reconcile()

    def _look_after_pods(self) -> None:
        for uid, pod in list(self.sidecars.items()):
            assert isinstance(pod, Pod)
            if self._dead(uid):
                continue
            if pod.process is None and self.containers[uid].listening:
                pod.start()
            if self.pods[uid].deleting and pod.launcher.running:
                pod.launcher.stop()
            if pod.process is not None:
                process = pod.process
                self.later(self.rng.uniform(0.0, 0.9), process.every_second)
            pod.launcher.follow()

    def _look_after_owned(self) -> None:
        """As the controller that owns an attached job's pods, none of which starts without the Secret."""
        if not self.have_credentials:
            return
        size = self.job.spec.workers if self.owner_size is None else self.owner_size
        taken = {pod.worker for pod in self.pods.values() if not (pod.deleting or pod.terminal)}
        for worker in set(range(size)) - taken:
            self._make(f"train-{worker}-{self.uids}", worker, 0, ())
        for uid, pod in list(self.pods.items()):
            if pod.worker >= size and not pod.deleting:
                self.end_gracefully(uid)

    def _training(self) -> None:
        crews = [pod.launcher for uid, pod in self.sidecars.items() if not self._dead(uid)]
        attempt = max((each.attempt for each in crews if each.running), default=0)
        team = {each.rank: each for each in crews if each.running and each.attempt == attempt}
        if not team:
            return
        first = next(iter(team.values()))
        assert first.order is not None
        size = first.order.workers
        broken = any(each.attempt == attempt and (each.failed or each.leaves) for each in crews)
        if broken or (
            len(team) < size and any(each.loaded for each in team.values()) and self._lacks(attempt, team)
        ):
            for each in team.values():
                self.later(self.rng.uniform(0.0, 1.0), partial(each.lose_peer, attempt))
            return
        if len(team) < size or not all(each.loaded for each in team.values()):
            return
        uids = [each.pod.uid for each in team.values()]
        if not self.fabric and any(self.are_cut(one, other) for one in uids for other in uids):
            return
        for rank in sorted(team):
            team[rank].step()

    def _lacks(self, attempt: int, team: dict[int, Launcher]) -> bool:
        """Whether somebody who was there is gone: the others' collective breaks."""
        began = {
            f["rank"] for _, what, f in self.history[-400:] if what == "started" and f["attempt"] == attempt
        }
        return bool(began - set(team))

    def poll(self) -> None:
        """The operator's long polls: news at once, the rest every five seconds."""
        if not self.knows_credentials:
            return  # it speaks to nobody
        eager, now = self.status.recovery is not None, self.by_operator
        there = [uid for uid in self.sidecars if self._reaches(uid)]
        self._heard_since = {uid: self._heard_since.get(uid, self.now) for uid in there}
        for uid, view in list(self.pods.items()):
            if view.ip is None or view.terminal:
                continue
            known = self._known(uid)
            pod = self.sidecars.get(uid)
            if self._reaches(uid) and pod is not None and pod.process is not None:
                stale = known.answered_at is None or now - known.answered_at >= 5.0
                wanted = stale or eager or uid in self._asked or known.silent_since is not None
                if not wanted and pod.process.told_all:
                    continue
                report = pod.process.report()
                new = (
                    known.report is None
                    or report.serial != known.report.serial
                    or report.instance != known.report.instance
                )
                if not (new or wanted):
                    continue
                self._heard(uid, report, now)
                continue
            if self.rng.random() < self.plan.loss and known.silent_since is None:
                continue
            self._unheard(uid, now)
        self._asked.clear()

    def _heard(self, uid: str, report: Report, now: float) -> None:
        ahead = self.now + self.skew.get(self.sidecars[uid].node, 0.0) - now
        super()._heard(uid, to_operator_clock(report, ahead if abs(ahead) > 2.0 else 0.0), now)

    def _maybe_reconcile(self) -> None:
        """The loop of a job is woken by what changed, or when the last decision asked for it."""
        seen = (
            tuple(self.pods.values()),
            tuple(self.nodes.values()),
            tuple((uid, known.report and (known.report.instance, known.report.serial), known.silent_since,
                known.host)
                  for uid, known in self.reports.items()),
            self.status,
        )  # fmt: skip
        if seen == self._seen and self.now < self._wake:
            return
        self._seen = seen
        kill = self.plan.operator_kills.get(self._seconds)
        self.reconcile(kill)
        wake = self.last.wake_after
        self._wake = self.now + min(20.0, wake if wake is not None else 20.0)
        if kill is not None:
            self.record("fault", name="operator killed", after=kill)
            self._wake, self._seen = self.now, ()

    def observe(self) -> Observation:
        found = replace(super().observe(), now=self.by_operator)
        return with_neighbours(found, self.neighbours) if self.neighbours else found

    # What the operator does

    def _do(self, item: Any) -> None:
        before = self.status
        match item:
            case ProbeSidecar(uid):
                self._asked.add(uid)
                return
            case Push(uid, directive):
                pod = self.sidecars.get(uid)
                if self._reaches(uid) and isinstance(pod, Pod) and pod.process is not None:
                    pod.process.accept(directive)
                    self._heard(uid, pod.process.report(), self.by_operator)
                if self.rng.random() < self.plan.echo:
                    self.later(self.rng.uniform(0.0, 12.0), lambda: self._echo(uid, directive))
                return
            case EnsureCredentials() if not self.knows_credentials:
                self.credentials += 1
            case DeletePod():
                self.record("deletes", pod=item.uid, why=item.why, force=item.force)
        super()._do(item)
        if isinstance(item, JobRecord):
            self._note_status(before)

    def _echo(self, uid: str, directive: Directive) -> None:
        """A call that was given up arrives after all, or an operator that is none any more has sent it."""
        pod = self.sidecars.get(uid)
        if isinstance(pod, Pod) and pod.process is not None and self._reaches(uid):
            pod.process.accept(directive)

    def _note_status(self, before: JobRecord) -> None:
        now = self.status
        if now.attempt != before.attempt:
            heard = tuple(
                uid
                for uid, since in self._heard_since.items()
                if self.now - since >= 3.0 and self._stays(uid)
            )
            self.record(
                "attempt", number=now.attempt, version=now.restored_version, base=now.base, heard=heard
            )
        if before.is_restoring and not now.is_restoring:
            self.record("released", number=now.attempt)
        protected = now.condition(conditions.PROTECTED)
        bare = now.placement.unprotected_workers if now.placement else 0
        told = (now.phase, protected and protected.status, protected and protected.reason, bare)
        if told != self._told:
            self._told = told
            self.record("told", phase=told[0], protected=told[1], reason=told[2], bare=bare)

    def _stays(self, uid: str) -> bool:
        """What its kubelet ends, or no longer answers for, may be gone at any moment, and is not relied
        on.
        """
        pod = self.pods[uid]
        return not pod.deleting and pod.node in self.nodes and not self.nodes[pod.node].lost

    def record_verdict(self, process: Process, verdict: Any) -> None:
        """What a coordinator says, whenever that changes."""
        name = process.state.instance
        if self._verdicts.get(name) == verdict:
            return
        self._verdicts[name] = verdict
        marks = verdict.watermarks
        self.record(
            "verdict", by=name, attempt=verdict.attempt, placement=verdict.placement, local=marks.local,
            peer=marks.peer,
            remote=marks.remote, snapshot=marks.snapshot, floor=verdict.floor,
        )  # fmt: skip

    # Pods

    def make_sidecar(self, uid: str, worker: int) -> Any:
        pod = Pod(self, uid, worker)
        self.record("pod", pod=uid, worker=worker, node=self.pods[uid].node)
        return pod

    def _vanish(self, uid: str) -> None:
        pod = self.sidecars.get(uid)
        if isinstance(pod, Pod):
            pod.vanish()
        super()._vanish(uid)

    def kill_node(self, name: str) -> None:
        if name in self.dead_nodes:
            return
        for uid, pod in self.sidecars.items():
            if self.pods[uid].node == name and isinstance(pod, Pod):
                pod.vanish()
        super().kill_node(name)

    def kill_sidecar(self, uid: str) -> None:
        pod = self.sidecars.get(uid)
        if isinstance(pod, Pod) and not self._dead(uid):
            pod.kill()
            super().kill_sidecar(uid)

    def crash(self, worker: int, code: int = 1, reason: str = "Crashed") -> bool:
        pod = self.live_sidecar(worker)
        return isinstance(pod, Pod) and pod.launcher.crash(code)

    def frozen(self, uid: str) -> bool:
        pod = self.sidecars.get(uid)
        return pod is None or pod.hung or self._dead(uid)

    def _reaches(self, uid: str) -> bool:
        pod = self.sidecars.get(uid)
        ours = isinstance(pod, Pod) and pod.process is not None and pod.credentials == self.credentials
        return ours and super()._reaches(uid)

    # Wires

    def no_store(self, uid: str) -> bool:
        return uid not in self.pods or (self.pods[uid].node or "") in self.storeless

    def connect(self, mine: str, host: str, worker: int) -> Process:
        """The process that answers at the address. Raises WireBroken."""
        uid = next((uid for uid, view in self.pods.items() if view.ip == host), None)
        if uid is None or mine not in self.pods or self._mute(uid) or self.are_cut(mine, uid):
            raise PeerSilent("no progress in time")
        pod = self.sidecars.get(uid)
        if not isinstance(pod, Pod) or pod.process is None or not self.containers[uid].listening:
            raise WireBroken("connection refused")
        if self.frozen(uid) or (mine != uid and self.rng.random() < self.plan.loss):
            raise PeerSilent("no progress in time")
        return pod.process

    def post(self, mine: str, host: str, what: Callable[[Process], None]) -> None:
        """A message that arrives some time, after later ones perhaps, or never."""

        def arrive() -> None:
            try:
                what(self.connect(mine, host, 0))
            except WireBroken:
                return

        self.later(self.rng.uniform(0.0, self.plan.delay), arrive)
