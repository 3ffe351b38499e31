"""Sidecars end in any order, keep the last version if it can be kept, and do not stay.

The coordinator and the rules are the sidecar's own (`coordinator`, `ending`); time, transfers and accidents
are made up here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sidecar.stations import config_of, directive_of
from tests.sidecar.versions.reports import RankTiers, TierReport, written
from tests.sidecar.world import JOB_UID
from tiercheck.protocol.directive import Directive, Phase, Policy
from tiercheck.protocol.report import TrainerState
from tiercheck.protocol.version import RankArtifact, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.report_updates import TierAnswer
from tiercheck_sidecar.versions.watermark import GONE, WorkerEnd, is_all_stored, is_final, may_go

TICK = 0.5


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
        self.state = SidecarState(config_of(remote="{}"), clock=lambda: self.now)
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
                accepted=worker.taken is not None and worker.taken.done,
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
            job_uid=JOB_UID,
            attempt=1,
            worker=worker.number,
            placement="" if worker.finishing else "holders",
            ranks=(RankTiers(worker.number, snapshots=tuple(sorted(worker.snapshots)), uploaded=uploaded),),
            final=final,
            done=final and is_all_stored([max(worker.snapshots, default=None)], worker.stored),
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
        answer = self.coordinator.handle_update(worker.caller, message_of(report))
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
            self.coordinator.disconnect(worker.caller)
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
        verdict = self.coordinator.next_verdict()
        self.coordinator.deliver(self.coordinator._to_send({}))
        if verdict is not None:
            self.coordinator.record_sent(verdict)

    def _is_lost(self, worker: Worker) -> bool:
        return worker.number != 0 and self.rng.random() < self.losses

    def _directive(self, phase: Phase) -> Directive:
        self.directives += 1
        return directive_of(
            workers=len(self.workers),
            phase=phase,
            policy=Policy(10, 1_000_000, 5),
            placement="" if phase is Phase.FINISH else "holders",
            instance=self.state.instance,
            number=self.directives,
        )


message_of = lru_cache(1024)(written)


MOMENT = 3.0
"""Seconds: a word to the coordinator, one back."""
HORIZON = 600.0


@st.composite
def plans(draw: st.DrawFn, most: int = 5, kills: bool = False) -> list[Plan]:
    """Trainers end after they were told to; each had its snapshots, or skipped them."""
    seconds = st.integers(0, 40).map(lambda half: half / 2)
    found = []
    for _ in range(draw(st.integers(1, most))):
        finish = draw(seconds)
        trainer_ends = finish + draw(seconds)
        saves = {
            draw(seconds) % (trainer_ends + 0.5): step for step in (10, 20, 30) if draw(st.integers(0, 5))
        }
        killed = draw(st.none() | seconds.map(lambda later: later * 2)) if kills else None
        found.append(
            Plan(
                finish=finish,
                trainer_ends=trainer_ends,
                asked=trainer_ends + draw(seconds),
                saves=saves,
                upload=draw(seconds),
                killed=float("inf") if killed is None else killed,
            )
        )
    return found


@given(plans(), st.integers(0, 2**32))
@settings(max_examples=examples(300), deadline=None)
def test_last_version_is_in_the_remote_tier_and_all_are_gone_a_moment_later(
    those: list[Plan], seed: int
) -> None:
    model = Model(those, random.Random(seed))
    model.run(HORIZON)
    newest = model.newest_common()
    assert newest is None or model.remote[-1] == newest
    last = max(model.last_change, *(max(plan.asked, plan.finish) for plan in those))
    for worker in model.workers:
        assert worker.gone_at is not None
        assert worker.gone_at <= last + MOMENT


@given(plans(), st.integers(0, 2**32), st.floats(0.05, 0.4))
@settings(max_examples=examples(150), deadline=None)
def test_calls_that_get_no_answer_cost_no_version_and_little_time(
    those: list[Plan], seed: int, losses: float
) -> None:
    model = Model(those, random.Random(seed), losses)
    model.run(HORIZON)
    newest = model.newest_common()
    assert newest is None or model.remote[-1] == newest
    last = max(model.last_change, *(max(plan.asked, plan.finish) for plan in those))
    assert all(
        worker.gone_at is not None and worker.gone_at <= last + 2 * GONE + MOMENT for worker in model.workers
    )


@given(plans(kills=True), st.integers(0, 2**32))
@settings(max_examples=examples(300), deadline=None)
def test_who_is_killed_at_the_end_keeps_nobody_for_long(those: list[Plan], seed: int) -> None:
    model = Model(those, random.Random(seed))
    model.run(HORIZON)
    last = max(model.last_change, *(max(plan.asked, plan.finish) for plan in those))
    kills = [plan.killed for plan in those if plan.killed < HORIZON]
    uploads = sum(plan.upload for plan in those)
    for worker in model.workers:
        assert worker.gone_at is not None
        assert worker.gone_at <= max(last, *kills, 0.0) + uploads + 2 * GONE + MOMENT


def test_worker_whose_version_is_stored_does_not_wait_for_one_that_still_trains() -> None:
    quick = Plan(finish=0, trainer_ends=2, asked=2, saves={0.0: 10}, upload=1)
    slow = Plan(finish=0, trainer_ends=100, asked=100, saves={0.0: 10}, upload=1)
    model = Model([quick, quick, slow], random.Random(1))
    model.run(HORIZON)
    assert model.remote == [Version(10, 1)]
    coordinator, done, _ = (worker.gone_at or 0.0 for worker in model.workers)
    assert 2 <= done < 10
    assert coordinator >= 100, "who writes the manifest stays"


def end(**more: object) -> WorkerEnd:
    plain = {"final": True, "done": False, "accepted": False, "over": False, "unanswered": None}
    return WorkerEnd(**{**plain, **more})  # type: ignore[arg-type]


def test_nobody_goes_whose_trainer_may_still_add_something() -> None:
    assert not may_go(end(final=False, done=True, accepted=True, over=True, unanswered=1000.0))


def test_what_only_the_coordinator_knows_is_waited_for_until_the_coordinator_is_gone() -> None:
    assert not may_go(end())
    assert not may_go(end(unanswered=GONE - 1))
    assert may_go(end(unanswered=GONE))
    assert may_go(end(over=True))


def test_who_owes_nothing_tells_the_coordinator_or_finds_it_gone() -> None:
    assert not may_go(end(done=True))
    assert may_go(end(done=True, accepted=True))
    assert may_go(end(done=True, unanswered=0.0))


def test_worker_owes_nothing_if_one_of_its_ranks_has_nothing_newer_than_what_is_stored() -> None:
    assert is_all_stored([Version(7, 1), Version(8, 1)], Version(7, 1)), "8 can never be complete"
    assert is_all_stored([None, Version(8, 1)], None), "nor can it here"
    assert not is_all_stored([Version(8, 1)], Version(7, 1))
    assert not is_all_stored([Version(8, 1)], None)
