"""Whether a resume was exact is told everywhere; directives may arrive in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.world_in_memory import World, make_spec, trained
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.report import Exact, Report, ResumeProof
from tiercheck.protocol.version import Artifact, Version
from tiercheck_operator.controller.status.saving import notices
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import ProbeSidecar, Push
from tiercheck_operator.model.limits import bytes_of, fit_status
from tiercheck_operator.model.observed import Observation, WorkerReport
from tiercheck_operator.model.status import JobRecord, parse_record, render_record


def back_again(prove_steps: int = 0) -> World:
    world = trained(workers=4, prove_steps=prove_steps, delta=DeltaMode.AUTO)
    world.crash(1)
    world.until("Running", attempt=2)
    return world


def compare(world: World, **by_worker: tuple[Exact, str]) -> JobRecord:
    """The status once these workers (`w0`) have said what their ranks found."""
    for name, (exact, message) in by_worker.items():
        worker = int(name[1:])
        sidecar = world.sidecars[world.member(worker)]
        proof = ResumeProof(worker, world.summary["step"], exact, 1, message)
        sidecar.trainer = replace(sidecar.trainer, resume=proof)
    world.train(1)
    return world.status


def exact_of(record: JobRecord) -> tuple[str | None, bool | str | None]:
    condition = record.condition(conditions.EXACT)
    last = record.last_recovery or {}
    assert condition is None or condition.reason == last.get("exact")
    assert all(entry.get("exact") == last.get("exact") for entry in record.recoveries[:1])
    return last.get("exact"), "no condition" if condition is None else condition.status


SAME, UNLIKE, NOTHING = (
    (Exact.PROVEN, ""),
    (Exact.DIFFERS, "loss 2.5, was 2.25"),
    (Exact.NOT_COMPARABLE, "no journal"),
)


@pytest.mark.parametrize("heard", [1, 4])
def test_resume_is_proven_although_some_ranks_could_not_compare(heard: int) -> None:
    world = back_again()
    assert exact_of(world.status) == (None, "no condition")
    assert exact_of(compare(world, w1=NOTHING)) == (None, "no condition"), "others may have compared"
    found = compare(world, **{f"w{worker}": SAME for worker in (2, 3, 0)[:heard]})
    assert exact_of(found) == ("Proven", True)
    assert "1 step trained again, bitwise equal" in str((found.last_recovery or {})["exactMessage"])


def test_one_rank_that_differs_is_named_with_what_differs_and_stays_known() -> None:
    world = back_again()
    assert exact_of(compare(world, w0=SAME, w3=UNLIKE)) == ("Differs", False)
    assert world.summary["exactMessage"] == (
        f"attempt 2, worker 3, rank 3, back at step {world.summary['step']}: loss 2.5, was 2.25"
    )
    for uid in (world.member(worker) for worker in range(4)):  # as after a restart of every sidecar
        world.sidecars[uid].trainer = replace(world.sidecars[uid].trainer, resume=None)
    assert exact_of(compare(world, w0=SAME)) == ("Differs", False)


def test_nothing_was_comparable_once_every_worker_has_said_so() -> None:
    world = back_again()
    assert exact_of(compare(world, w0=NOTHING, w1=NOTHING, w2=NOTHING))[0] is None
    found = compare(world, w3=NOTHING)
    assert exact_of(found) == ("NotComparable", None)
    _, raw = fit_status(found)
    (told,) = (entry for entry in raw["conditions"] if entry["type"] == "Exact")
    assert told["status"] == "Unknown"
    assert parse_record(raw) == parse_record(render_record(found))
    assert parse_record(raw).condition("Exact") == found.condition("Exact")


def test_next_resume_is_compared_anew_and_until_then_the_last_result_stands() -> None:
    world = back_again()
    compare(world, w2=UNLIKE)
    world.crash(0)
    world.until("Running", attempt=3)
    assert (world.status.last_recovery or {}).get("exact") is None
    assert world.status.condition(conditions.EXACT) is not None
    assert world.status.holds(conditions.EXACT) is False
    assert exact_of(compare(world, w2=SAME)) == ("Proven", True)


def test_difference_is_one_event_and_every_result_is_counted_once() -> None:
    world, metrics, told = back_again(), Metrics(), []
    before = world.job
    for found in (SAME, UNLIKE, UNLIKE):
        compare(world, w1=found)
        metrics.job_seen(world.job)
        metrics.status_written(before, world.status)
        told += [each for each in notices(before.status, world.status) if each.reason == "Differs"]
        before = world.job
    assert [each.type for each in told] == ["Warning"]
    assert "loss 2.5, was 2.25" in told[0].message

    def count(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"namespace": "ns", "tiercheck_job": "j", **labels})

    results = [count("tiercheck_resumes_total", result=exact.value) for exact in Exact]
    assert results == [1, 0, 1]
    assert count("tiercheck_job_condition", type="Exact") == 0
    assert count("tiercheck_restores_total", cause="TrainerCrash") == 0, "no recovery has ended since"


def test_start_from_scratch_has_nothing_to_compare() -> None:
    world = trained(0, workers=4)
    world.crash(1)
    world.until("Running", attempt=2)
    assert (world.status.last_recovery or {"step": 0})["step"] == 0
    if world.status.last_recovery:
        assert exact_of(compare(world, w0=SAME)) == (None, "no condition")


def test_job_gives_up_a_step_for_the_proof_only_if_it_is_asked_to() -> None:
    plain, proving = back_again(), back_again(prove_steps=1)
    lost = [world.summary["lostSteps"] for world in (plain, proving)]
    assert lost == [0, 1]


def test_long_word_of_a_trainer_leaves_the_status_small() -> None:
    found = compare(back_again(), w1=(Exact.DIFFERS, "x" * 1000))
    assert bytes_of(fit_status(found)[1]) < 16 * 1024
    assert len(str(found.recoveries[0]["exactMessage"])) <= 160


def test_newest_version_still_counts_if_the_older_one_that_was_to_prove_it_is_gone() -> None:
    """It was chosen by reports, and may be freed before the sidecars are asked for it."""
    world = World(make_spec(workers=4, prove_steps=1, delta=DeltaMode.AUTO)).running(0)
    while world.newest_step() < 12:
        world.train(1)
    world.crash(1)
    world.tick_until(lambda: world.status.attempt >= 2)
    assert world.status.restored_version == Version(11, 1)
    for sidecar in world.sidecars.values():
        sidecar.own = {Artifact(sidecar.worker, Version(12, 1))}
        sidecar.hosted = {Artifact(each.rank, Version(12, 1)) for each in sidecar.hosted}
    world.until("Running", attempt=3)
    assert world.starts[3] == dict.fromkeys(range(4), Version(12, 1))
    assert 2 not in world.starts
    assert parse_record(render_record(world.status)).history == world.status.history
    assert world.status.history.owner(12) == 1
    assert world.status.history.owner(13) == 3


class Listening(World):
    """Keeps what was sent, with what was known of the sidecar then."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Push] = []

    def observe(self) -> Observation:
        self.known = super().observe()
        return self.known

    def _do(self, item: object) -> None:
        if isinstance(item, Push):
            known = self.known.reports[item.pod_uid].report
            assert known is not None
            assert (item.directive.instance, item.directive.number) == (known.instance, known.followed + 1)
            self.sent.append(item)
        super()._do(item)  # type: ignore[arg-type]


def test_each_directive_follows_what_the_sidecar_has_said_whoever_leads() -> None:
    world = Listening()
    world.until("Running")
    world.crash(1)
    world.recovered()
    world.evict(world.member(2))
    world.forget()  # the operator was started again
    world.recovered(attempt=3)
    uid = world.member(0)
    told = [push.directive for push in world.sent if push.pod_uid == uid]
    assert [each.number for each in told] == list(range(1, len(told) + 1))
    assert len(told) >= 5


def test_directive_is_the_same_however_often_it_is_decided_upon() -> None:
    """The answer to it may have been lost."""
    world = Listening()
    world.tick_until(lambda: world.sent)
    told = list(world.sent)
    world.reconcile()  # nothing was heard since
    assert world.sent == [*told, *told]


# No version is chosen before all have said what they hold.


def bare(known: WorkerReport) -> WorkerReport:
    report = known.report
    assert isinstance(report, Report)
    return replace(known, report=replace(report, holdings=(), tells_holdings=False))


class Terse(World):
    """Some sidecars answer, and do not say what they hold."""

    terse: frozenset[str] = frozenset()

    def observe(self) -> Observation:
        seen = super().observe()
        reports = {
            uid: bare(known) if uid in self.terse and known.report is not None else known
            for uid, known in seen.reports.items()
        }
        return replace(seen, reports=reports)


def test_no_attempt_begins_before_a_sidecar_that_answers_has_said_what_it_holds() -> None:
    world = Terse().running(5)
    attempt, silent = world.status.attempt, world.member(0)
    world.terse = frozenset({silent})
    world.crash(1)
    world.train(10, attempt=attempt)
    assert ProbeSidecar(silent) in world.last.after
    world.terse = frozenset()
    world.recovered(attempt=attempt + 1)
    assert world.summary["lostSteps"] <= 1


def test_answer_counts_for_what_is_held_from_when_that_was_told() -> None:
    world = trained(0)
    known = world.reports[world.member(0)]
    assert known.holdings_at == known.answered_at
    later = replace(bare(known), held_at=known.answered_at, answered_at=(known.answered_at or 0.0) + 60)
    assert later.holdings_at == known.answered_at
    assert replace(later, held_at=None).holdings_at is None
