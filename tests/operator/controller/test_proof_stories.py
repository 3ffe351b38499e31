"""The status says how old the proof is that a job would come back, and whether its resume was exact."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.operator.api_model import ApiModel
from tests.operator.controller.test_job_loop import StandIn, new_job, surroundings
from tests.operator.kubernetes.test_api_calls import JOB
from tests.operator.test_metrics import value
from tests.operator.world_in_memory import REMOTE, START, World, make_spec, trained
from tiercheck.protocol.directive import DeltaMode, Tier
from tiercheck.protocol.report import Exact, Problem, Proof, Report, ResumeProof
from tiercheck.protocol.version import Artifact, Version
from tiercheck_local.controlplane import write_kubeconfig
from tiercheck_operator import metrics as metrics_module
from tiercheck_operator.controller.reconciler import JobLoop
from tiercheck_operator.controller.status.saving import notices
from tiercheck_operator.kubernetes.api_server import PODS, ApiFailure
from tiercheck_operator.kubernetes.client import FencedServer, Kube
from tiercheck_operator.kubernetes.events import EventPoster, ObjectEvents, without_credentials
from tiercheck_operator.kubernetes.object_reader import Access
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Notice, ProbeSidecar, Push
from tiercheck_operator.model.limits import bytes_of, fit_status
from tiercheck_operator.model.observed import Observation, WorkerReport
from tiercheck_operator.model.parsing import parse_job
from tiercheck_operator.model.status import JobRecord, parse_record, parse_time, render_record

BAD = (
    "the snapshot of rank 2, step 4 (attempt 1), would not come back from worker 3: chunk 7 does not "
    "match its digest. "
    "A restore goes round it as long as there is another copy"
)


def prove(world: World, workers: Iterable[int], tier: Tier, step: int, at: float) -> None:
    for sidecar in map(world.sidecar, workers):
        others = tuple(proof for proof in sidecar.proofs if proof.tier is not tier)
        sidecar.proofs = (*others, Proof(tier, Version(step, 1), at, 1.0, 1000))


def last_proof(world: World) -> dict[str, object]:
    found: dict[str, object] = render_record(world.status).get("restore", {}).get("lastProof", {})
    return found


def test_proof_of_a_tier_is_as_old_as_that_of_the_rank_whose_newest_is_the_oldest() -> None:
    world = trained()
    for worker in range(4):
        prove(world, [worker], Tier.PEER, 6 if worker == 2 else 8, START + 100 + worker)
    prove(world, range(3), Tier.LOCAL, 8, START + 100)
    world.tick()
    assert set(world.status.proofs) == {"peer"}, "of the local tier one worker has no proof yet"
    prove(world, [3], Tier.LOCAL, 8, START + 170)
    world.tick()
    proofs = world.status.proofs
    assert (proofs["peer"].step, parse_time(proofs["peer"].time)) == (6, START + 100)
    assert (proofs["local"].step, parse_time(proofs["local"].time)) == (8, START + 100)
    assert last_proof(world)["step"] == 6
    assert parse_record(render_record(world.status)) == world.status


def test_sidecar_that_was_started_again_forgets_its_proof_and_the_status_does_not() -> None:
    world = trained()
    prove(world, range(4), Tier.PEER, 6, START + 100)
    world.tick()
    before = last_proof(world)
    assert before
    sidecar = world.sidecar(1)
    sidecar.proofs = ()
    world.tick()
    assert last_proof(world) == before
    prove(world, [1], Tier.PEER, 8, START + 300)
    world.tick()
    assert last_proof(world) == before, "the others' are older"


def test_what_memory_held_is_proved_no_more_once_the_pods_are_gone() -> None:
    world = trained(remote=REMOTE)
    for tier in Tier:
        prove(world, range(4), tier, 4, START + 100)
    world.tick()
    assert set(world.status.proofs) == {"local", "peer", "remote"}
    world.change(suspend=True)
    world.train(80)
    assert set(world.status.proofs) == {"remote"}


def test_tier_that_would_not_come_back_takes_the_protection_away_and_is_told_unless_other_trouble_is() -> (
    None
):
    world = trained()
    assert world.status.holds(conditions.PROTECTED)
    sidecar, other = world.sidecar(2), world.sidecar(3)
    sidecar.problems = (Problem(conditions.REHEARSAL_FAILED, BAD),)
    world.tick()
    assert world.told(conditions.PROTECTED) == (False, "RehearsalFailed", f"worker 2: {BAD}")
    assert "RehearsalFailed" in world.notices
    assert world.status.attempt == 1, "training goes on"
    other.problems = (Problem(conditions.CANNOT_SAVE, "m"),)
    world.tick()
    assert world.told(conditions.PROTECTED) == (False, conditions.CANNOT_SAVE, "worker 3: m")
    sidecar.problems = other.problems = ()
    world.tick()
    assert world.status.holds(conditions.PROTECTED)


def test_sidecars_are_told_how_often_unless_it_is_turned_off() -> None:
    spec = {"workers": 1, "template": {}}
    metadata = {"name": "j", "namespace": "ns", "uid": "u"}

    def every(**restore: object) -> float | None:
        return parse_job({"metadata": metadata, "spec": {**spec, "restore": restore}}).spec.rehearse_every

    assert every() == 600
    assert every(rehearseEvery="1h30m") == 5400
    assert every(rehearseEvery="Off") is every(rehearseEvery="0") is None
    for wanted in (5400.0, None):
        world = trained(rehearse_every=wanted)
        sidecar = world.sidecar(1)
        assert sidecar.told.policy.rehearse_every == wanted


def test_without_rehearsals_nothing_is_said_of_proofs() -> None:
    world, metrics = trained(rehearse_every=None), Metrics()
    prove(world, range(4), Tier.PEER, 6, START + 100)
    world.tick()
    assert last_proof(world) == {}
    metrics.job_seen(world.job)
    assert value(metrics, "tiercheck_restore_proof_age_seconds", tier="peer") is None


def test_age_of_a_proof_grows_between_two_looks_and_counts_from_the_start_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [START + 700.0]
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(time=lambda: now[0]))
    world, metrics = trained(), Metrics()
    prove(world, range(4), Tier.PEER, 6, START + 100)
    world.tick()
    metrics.job_seen(world.job)
    for passed in (0.0, 50.0):
        now[0] = START + 700 + passed
        assert value(metrics, "tiercheck_restore_proof_age_seconds", tier="peer") == 600 + passed
        started = parse_time(world.status.started)
        assert started is not None
        assert value(metrics, "tiercheck_restore_proof_age_seconds", tier="local") == now[0] - started
    assert value(metrics, "tiercheck_restore_proof_age_seconds", tier="remote") is None, "it holds nothing"
    world.change(rehearse_every=None)
    metrics.job_seen(world.job)
    assert value(metrics, "tiercheck_restore_proof_age_seconds", tier="peer") is None


SECRET = "gh" + "p_" + "0f9a" * 9
SAID = f"the trainer of worker 1 ended with exit code 1: clone of https://bob:{SECRET}@git.example failed"


def test_no_text_of_a_status_holds_a_credential() -> None:
    status: dict[str, Any] = {
        "conditions": [{"type": "Protected", "status": "False", "reason": "RemoteOther", "message": SAID}],
        "recovery": {
            "cause": "ProcessFailed",
            "message": SAID,
            "reasons": [SAID],
            "detectedAt": "2026-01-01T00:00:00Z",
        },
        "recoveries": [{"message": SAID, "sources": [{"reason": SAID}]}],
        "checkpoint": {"deltas": "Off", "deltasReason": SAID},
        "placement": {"hash": "0f9a4c21", "unprotectedReason": SAID},
        "sidecarImage": "registry.example/sidecar@sha256:" + "0f9a4c21" * 8,
    }
    shown = without_credentials(status)
    assert SECRET not in str(shown)
    assert shown["conditions"][0]["message"].startswith(
        "the trainer of worker 1 ended with exit code 1: clone of https://"
    )
    assert shown["sidecarImage"] == status["sidecarImage"]
    assert without_credentials(shown) == shown, "else it would be written again at every look"
    assert SECRET in str(status), "what decisions go by is left as it is"


def test_text_full_of_credentials_is_no_longer_than_the_api_server_lets_it_be() -> None:
    shown = without_credentials({"message": "://a@" * 800})
    assert len(shown["message"]) <= 4000
    assert without_credentials(shown) == shown


def test_ordinary_status_is_written_as_it_is() -> None:
    world = trained(0)
    for fail in (lambda: world.crash(0), lambda: world.evict(world.member(1)), lambda: world.kill_node("n0")):
        fail()
        world.train(30)
        status = render_record(world.status)
        assert status["conditions"]
        assert without_credentials(status) == status


async def test_refusal_of_the_api_server_reaches_the_status_without_the_credential_in_it() -> None:
    kube = StandIn(new_job())
    kube.refused["POST"] = ApiFailure(403, SAID)  # as an admission plug-in that quotes the pod
    loop = JobLoop(new_job(), surroundings(kube))
    for _ in range(2):  # the second look tells what became of the first
        with contextlib.suppress(ApiFailure):
            await loop._reconcile()
    assert "clone of https://" in str(kube.job["status"])
    assert SECRET not in str(kube.job["status"])


async def test_token_that_no_header_can_hold_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9", "plainword\nmore")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    kube = Kube(FencedServer(Access()))
    try:
        with pytest.raises(ApiFailure) as failure:
            await kube.find(PODS, "default", "p")
    finally:
        kube.close()
    assert "plainword" not in str(failure.value)
    assert failure.value.__suppress_context__, "a traceback would show what it came from"


async def test_no_event_holds_a_credential() -> None:
    server = ApiModel()
    poster = EventPoster(server)
    for again in range(3):
        await poster.post(JOB, [Notice("Warning", "TrainerFailed", SAID)], now=20.0 * again)
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": "a", "name": "p", "uid": "u"}
    await ObjectEvents(server).warn(about, "NotAttached", SAID)
    assert len(server.objects) == 2
    assert SECRET not in str(server.objects)


@pytest.mark.parametrize("length", [900, 1000, 1024, 1030])
async def test_credential_at_the_end_of_what_fits_an_event_is_not_shown_in_part(length: int) -> None:
    server = ApiModel()
    message = "x " * (length // 2) + SECRET
    await EventPoster(server).post(JOB, [Notice("Warning", "Any", message)], now=0.0)
    assert SECRET[:10] not in str(server.objects)


def back_again(prove_steps: int = 0) -> World:
    world = trained(workers=4, prove_steps=prove_steps, delta=DeltaMode.AUTO)
    world.recovered(crash=1)
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
    world.recovered(3, crash=0)
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
    world.recovered(crash=1)
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
    world.recovered(crash=1)
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
    return replace(known, report=replace(report, holdings=(), has_holdings=False))


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
    assert ProbeSidecar(silent) in world.last.before
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
