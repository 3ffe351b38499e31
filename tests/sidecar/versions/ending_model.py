"""Models how a job ends: sidecars that are told, asked to go, killed and cut off in any order.

The coordinator and the rules are the sidecar's own (`coordinator`, `ending`); time, transfers and accidents
are made up here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from tests.sidecar.versions.reports import RankTiers, TierReport, written
from tiercheck.protocol.directive import Directive, Peer, Phase, Policy
from tiercheck.protocol.manifest import RankArtifact
from tiercheck.protocol.report import TrainerState
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.ending import WorkerEnd, is_final, may_go, owes_nothing
from tiercheck_sidecar.versions.words import TierAnswer

TICK = 0.5
JOB = "uid"
HISTORY = History((Branch(1, 0),))


@dataclass
class Plan:
    """What will happen to one worker, in seconds."""

    finish: float
    """It is told that the job is over."""
    trainer_ends: float
    asked: float
    """SIGTERM. A kubelet sends it after the trainer's end."""
    saves: dict[float, int]
    """When it seals the snapshot of which step."""
    upload: float
    """How long one takes."""
    killed: float = float("inf")


@dataclass
class Worker:
    number: int
    plan: Plan
    snapshots: set[Version] = field(default_factory=set)
    uploaded: Version | None = None
    uploading: tuple[Version, float] | None = None
    verdict: TierVerdict | None = None
    finishing: bool = False
    stored: Version | None = None
    """The newest that it knows to be in the remote tier."""
    caller: Caller | None = None
    """Its connection; None: it broke."""
    taken: TierReport | None = None
    failing_since: float | None = None
    gone_at: float | None = None
    killed: bool = False

    @property
    def there(self) -> bool:
        return self.gone_at is None


class Model:
    """`plans`: by worker; worker 0 is the coordinator. One rank each. `losses`: the part of all calls that
    get no answer."""

    def __init__(
        self, plans: list[Plan], rng: random.Random, losses: float = 0.0, commit: float = 0.5
    ) -> None:
        self.now, self.rng, self.losses, self.commit_seconds = 0.0, rng, losses, commit
        self.workers = [Worker(number, plan) for number, plan in enumerate(plans)]
        self.state = SidecarState(_config(), clock=lambda: self.now)
        self.coordinator = Coordinator(self.state, clock=lambda: self.now)
        self.directives = 0
        self.state.accept(self._directive(Phase.RELEASE))
        self.remote: list[Version] = []
        self.committing: tuple[Version, float] | None = None
        self.last_change = 0.0
        """When the remote tier got its newest version."""

    def run(self, seconds: float) -> None:
        while self.now < seconds and any(worker.there for worker in self.workers):
            self.tick()
            self.now += TICK

    def newest_common(self) -> Version | None:
        """The newest version that every worker holds."""
        return max(set.intersection(*(worker.snapshots for worker in self.workers)), default=None)

    def tick(self) -> None:
        for worker in self.rng.sample(self.workers, len(self.workers)):
            if worker.there:
                self._live(worker)
        if self.workers[0].there:
            self._coordinate()

    def _live(self, worker: Worker) -> None:
        plan = worker.plan
        if self.now >= plan.killed:
            worker.gone_at, worker.killed = self.now, True
            return
        worker.snapshots |= {Version(step, 1) for moment, step in plan.saves.items() if moment <= self.now}
        if self.now >= plan.finish and not worker.finishing:
            worker.finishing, worker.verdict = True, None
            if worker.number == 0:
                self.state.accept(self._directive(Phase.FINISH))
        self._upload(worker)
        self._tell(worker)
        if self.now >= plan.asked and self._may_go(worker):
            worker.gone_at = self.now

    def _may_go(self, worker: Worker) -> bool:
        if not worker.finishing:
            return False
        if worker.number == 0:
            return self.coordinator.may_go
        report, since = self._report(worker), worker.failing_since
        return may_go(
            WorkerEnd(
                final=report.final,
                done=report.done,
                told=worker.taken is not None and worker.taken.done,
                over=worker.verdict is not None and worker.verdict.over,
                unanswered=None if since is None else self.now - since,
            )
        )

    def _report(self, worker: Worker) -> TierReport:
        plan = worker.plan
        trainer = TrainerState.ABSENT if self.now >= plan.trainer_ends else TrainerState.RUNNING
        final = (
            is_final(self._directive(Phase.FINISH), trainer, self.now >= plan.asked, set())
            and worker.finishing
        )
        wanted = worker.verdict.upload if worker.verdict else None
        uploaded = (RankArtifact(worker.number, wanted, ""),) if wanted and worker.uploaded == wanted else ()
        return TierReport(
            job_uid=JOB,
            attempt=1,
            worker=worker.number,
            placement="" if worker.finishing else "holders",
            ranks=(RankTiers(worker.number, snapshots=tuple(sorted(worker.snapshots)), uploaded=uploaded),),
            final=final,
            done=final and owes_nothing([max(worker.snapshots, default=None)], worker.stored),
        )

    def _tell(self, worker: Worker) -> None:
        worker.taken = None
        if not self.workers[0].there or self._is_lost(worker):
            worker.failing_since = self.now if worker.failing_since is None else worker.failing_since
            return
        worker.failing_since = None
        report = self._report(worker)
        if worker.caller is None:
            worker.caller = Caller(lambda answer: self._receive(worker, answer))
            self.coordinator.connect(worker.caller)
        answer = self.coordinator.hear_news(worker.caller, written(report))
        if answer.refused:
            return
        worker.taken = report
        for each in self.coordinator.replies(worker.caller, answer):
            self._take(worker, each)

    def _receive(self, worker: Worker, answer: TierAnswer) -> None:
        """What is lost on its way breaks the connection."""
        if worker.there and not self._is_lost(worker):
            self._take(worker, answer)
        elif worker.caller is not None:
            self.coordinator.hang_up(worker.caller)
            worker.caller = None

    def _take(self, worker: Worker, answer: TierAnswer) -> None:
        verdict = answer.verdict
        if verdict is None or verdict.placement != ("" if worker.finishing else "holders"):
            return
        worker.verdict = verdict
        if verdict.watermarks.remote is not None:
            worker.stored = max(self.remote)  # it lists what is there when that changes

    def _upload(self, worker: Worker) -> None:
        wanted = worker.verdict.upload if worker.verdict else None
        if worker.uploading is not None:
            version, ready = worker.uploading
            if self.now < ready:
                return
            worker.uploaded, worker.uploading = version, None
        if wanted is not None and wanted in worker.snapshots and worker.uploaded != wanted:
            worker.uploading = wanted, self.now + worker.plan.upload

    def _coordinate(self) -> None:
        if self.committing is not None and self.now >= self.committing[1]:
            self.remote.append(self.committing[0])
            self.last_change, self.committing = self.now, None
            self.coordinator.stored(tuple(self.remote))
        if self.committing is None and (manifest := self.coordinator.manifest()) is not None:
            self.committing = manifest.version, self.now + self.commit_seconds
        verdict = self.coordinator.news()
        self.coordinator.deliver(self.coordinator._to_send({}))
        if verdict is not None:
            self.coordinator.announced(verdict)

    def _is_lost(self, worker: Worker) -> bool:
        return worker.number != 0 and self.rng.random() < self.losses

    def _directive(self, phase: Phase) -> Directive:
        self.directives += 1
        return Directive(
            job_uid=JOB,
            worker=0,
            workers=len(self.workers),
            procs_per_worker=1,
            attempt=1,
            phase=phase,
            history=HISTORY,
            policy=Policy(10, 1_000_000, 5),
            restore=None,
            holders=(),
            hosted=(),
            coordinator=Peer(0, "0"),
            master_host="0",
            master_port=1,
            placement="" if phase is Phase.FINISH else "holders",
            instance=self.state.instance,
            number=self.directives,
        )


def _config() -> SidecarConfig:
    return SidecarConfig(
        job="default/gpt",
        job_uid=JOB,
        worker=0,
        procs_per_worker=1,
        pod_uid="",
        pod_ip="0",
        memory_dir=Path(),
        memory_limit=1,
        run_dir=Path(),
        credentials_dir=Path(),
        remote="{}",
        token="",
    )
