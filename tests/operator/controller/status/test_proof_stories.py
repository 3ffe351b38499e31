"""How old the proof is that a job would come back, and what is said when it would not."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from tests.operator.test_metrics import value
from tests.operator.world_in_memory import REMOTE, START, World, trained
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Problem, Proof
from tiercheck.protocol.version import Version
from tiercheck_operator import metrics as metrics_module
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model import conditions
from tiercheck_operator.model.parsing import parse_job
from tiercheck_operator.model.status import parse_record, parse_time, render_record

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
        assert sidecar.directive is not None
        assert sidecar.directive.policy.rehearse_every == wanted


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
