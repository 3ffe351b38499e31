"""The simulation asks the planner's own code and agrees with the published formulas."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.planning.clusters import Cluster, example, racks
from tiercheck.protocol.directive import Tier
from tiercheck_cli.simulate.play import (
    SCRATCH,
    HeldSteps,
    JobLife,
    ResumePoint,
    Run,
    Simulation,
    Survival,
    exact_ettr,
    find_resume_point,
    play,
)
from tiercheck_cli.simulate.scenario import FailureRates, RecoveryTimes, Saving, Scenario
from tiercheck_operator.planning.parity.parity import ParityPolicy, place_parity
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, place
from tiercheck_operator.planning.recovery.recovery import RestoreSeconds

RACK_COPY = PlacementPolicy(1, "rack", required=False)
DAY = 86400.0


def job(*sizes: int, policy=RACK_COPY, **settings) -> Scenario:  # type: ignore[no-untyped-def]
    return scenario_on(racks(*sizes), policy, **settings)


def scenario_on(cluster: Cluster, policy, **settings) -> Scenario:  # type: ignore[no-untyped-def]
    """As the operator would place the job."""
    how = place_parity if isinstance(policy, ParityPolicy) else place
    placement = how(cluster.sites, cluster.topology, policy)
    assert isinstance(placement, Placement)
    return Scenario(cluster.sites, cluster.topology, placement, **settings)


def simulate(scenario: Scenario, *, days: float, runs: int = 20, seed: int = 0) -> Simulation:
    return play(scenario, days=days, runs=runs, seed=seed)


def comeback(scenario: Scenario, lost: Collection[int] = (), step: int = 125) -> ResumePoint:
    """From the loss of these workers, after `step`."""
    saving = scenario.saving
    held = {Tier.LOCAL: saving.local(step), Tier.PEER: saving.peer(step)}
    if saving.remote_every is not None:
        held[Tier.REMOTE] = saving.remote(step)
    return find_resume_point(scenario.placement, HeldSteps(step, held, scenario.step_seconds), lost)


def losses_of(scenario: Scenario, level: str) -> dict[str, ResumePoint]:
    """What the loss of each domain of that level would lead to."""
    return {domain: comeback(scenario, workers) for domain, workers in scenario.domains(level).items()}


def replay(scenario: Scenario, *failures: tuple[float, str, tuple[int, ...]], seconds: float) -> Run:
    """The one life in which exactly this happens: moment, kind and lost workers of each failure."""
    life = JobLife(scenario)
    for failure in failures:
        life.fail(*failure)
    return life.ended(seconds)


def first_order_ettr(failures_per_second: float, interval: float, overhead: float) -> float:
    """Where failures are rare, half an interval and the overhead are lost per failure on average.

    A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024
    (arXiv:2410.21680), without time in the queue; in essence J. W. Young, "A first order approximation to the
    optimum checkpoint interval", CACM 17(9), 1974. Seconds throughout.
    """
    return 1.0 - failures_per_second * (overhead + interval / 2.0)


def test_a_crash_costs_no_step_with_deltas() -> None:
    assert comeback(job(2, 2), step=120) == ResumePoint(120, {Tier.LOCAL: (0, 1, 2, 3)})


def test_a_lost_rack_comes_back_from_the_other_one() -> None:
    found = comeback(job(2, 2), lost=[0, 1], step=100)
    assert found == ResumePoint(99, {Tier.LOCAL: (2, 3), Tier.PEER: (0, 1)})


def test_workers_that_keep_each_others_copies_need_the_remote_tier() -> None:
    scenario = job(2, 2, saving=Saving(remote_every=50))
    assert scenario.placement.holders[0] == (2,)
    assert comeback(scenario, lost=[0, 2], step=120) == ResumePoint(100, {Tier.REMOTE: (0, 1, 2, 3)})


def test_without_a_remote_tier_that_loss_is_the_end() -> None:
    found = comeback(job(2, 2), lost=[0, 2], step=120)
    assert (found, found.farthest) == (ResumePoint(0, {}), None)


def test_parity_brings_back_one_lost_rack() -> None:
    scenario = job(2, 2, 2, policy=ParityPolicy(2, 1, "rack", required=True), saving=Saving(remote_every=50))
    assert {found.farthest for found in losses_of(scenario, "rack").values()} == {Tier.PEER}
    assert comeback(scenario, lost=range(4)).farthest is Tier.REMOTE


def test_a_spare_shortens_the_way_back() -> None:
    lives = (replay(job(2, 2, spares=spares), (100.0, "pod", (0,)), seconds=1000.0) for spares in (0, 1))
    without, with_one = (life.down_seconds for life in lives)
    times = RecoveryTimes()
    assert without - with_one == times.replace - times.spare


def test_what_one_level_would_cost_is_told_by_domain() -> None:
    cluster = example("uneven-racks.yaml", "generic")
    scenario = scenario_on(cluster, RACK_COPY, saving=Saving(remote_every=100))
    found = losses_of(scenario, "rack")
    assert {name: each.farthest for name, each in found.items()} == {
        "zone-a/rack-0": Tier.REMOTE,
        "zone-a/rack-1": Tier.PEER,
    }


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 2), st.booleans(), st.data())
def test_the_fast_answer_is_that_of_the_whole_decision(sizes, copies, coded, data) -> None:  # type: ignore[no-untyped-def]
    """What many losses are judged by is, for any one loss, what the recovery decides over every rank."""
    workers = sum(sizes)
    policy = PlacementPolicy(min(copies, workers - 1), "rack", required=False)
    if coded and workers >= 4:
        policy = ParityPolicy(2, 1 + copies % 2, "rack", required=False)  # type: ignore[assignment]
    scenario = job(*sizes, policy=policy, saving=Saving(remote_every=40, peer_lag=2))
    lost = data.draw(st.sets(st.integers(0, workers - 1), max_size=workers - 1))
    found = comeback(scenario, lost, step=90)
    survives = Survival(scenario.placement).in_memory(lost, ())
    expected = Tier.LOCAL if not lost else Tier.PEER if survives else Tier.REMOTE
    assert found.farthest is expected


# The published formulas


def remote_only(workers: int, per_day: float, interval: int, overhead: float) -> Scenario:
    """Every failure is a node's, and every node comes back from a store that has a version every `interval`
    seconds."""
    return job(
        *[1] * workers,
        policy=PlacementPolicy(0, "host", required=False),
        saving=Saving(snapshot_every=interval, deltas=False, remote_every=interval),
        times=RecoveryTimes(detect=0, restart=0, replace=0, restore=RestoreSeconds(remote=overhead)),
        rates=FailureRates(domains={"host": per_day / 24.0 / workers}),
    )


@pytest.mark.parametrize(
    ("per_day", "interval", "overhead"), [(2.0, 3600, 300.0), (24.0, 600, 120.0), (100.0, 900, 300.0)]
)
def test_agrees_with_dalys_exact_formula(per_day: float, interval: int, overhead: float) -> None:
    found = simulate(remote_only(20, per_day, interval, overhead), days=60, runs=40, seed=7)
    assert found.ettr == pytest.approx(exact_ettr(per_day / DAY, interval, overhead), rel=0.01)


def test_agrees_with_the_first_order_formula_where_failures_are_rare() -> None:
    found = simulate(remote_only(20, 2.0, 3600, 300.0), days=60, runs=40, seed=7)
    assert found.ettr == pytest.approx(first_order_ettr(2.0 / DAY, 3600, 300.0), rel=0.01)


def test_the_two_formulas_meet_for_rare_failures() -> None:
    assert exact_ettr(0.1 / DAY, 600, 60) == pytest.approx(first_order_ettr(0.1 / DAY, 600, 60), rel=1e-4)
    assert exact_ettr(0.0, 600, 60) == 1.0


# Lives


BUSY = FailureRates(process=0.02, domains={"host": 0.01, "rack": 0.005})


def test_a_job_that_nothing_befalls_trains_all_the_time() -> None:
    found = simulate(job(2, 2), days=1, runs=3)
    assert (found.ettr, found.recoveries, found.lost_steps, found.down_seconds) == (1.0, {}, 0, 0)


def test_the_same_seed_gives_the_same_lives() -> None:
    scenario = job(2, 2, rates=BUSY, saving=Saving(remote_every=500))
    assert simulate(scenario, days=5, runs=4, seed=3) == simulate(scenario, days=5, runs=4, seed=3)
    assert simulate(scenario, days=5, runs=4, seed=3) != simulate(scenario, days=5, runs=4, seed=4)


def test_copies_are_worth_what_they_cost() -> None:
    remote = Saving(remote_every=3600)
    with_copies = simulate(job(4, 4, rates=BUSY, saving=remote), days=20, runs=5)
    bare = PlacementPolicy(0, "rack", required=False)
    without = simulate(job(4, 4, policy=bare, rates=BUSY, saving=remote), days=20, runs=5)
    assert with_copies.ettr > without.ettr
    assert with_copies.recoveries["peer"] > 10 * with_copies.recoveries.get("remote", 0)
    assert "peer" not in without.recoveries


def test_a_second_loss_before_the_copies_are_complete_needs_the_remote_tier() -> None:
    rates = FailureRates(domains={"host": 0.5})
    slow, quick = (
        simulate(
            job(4, 4, rates=rates, saving=Saving(remote_every=600), times=RecoveryTimes(protect=seconds)),
            days=5,
            runs=3,
        )
        for seconds in (3600.0, 1.0)
    )
    assert slow.recoveries["remote"] > quick.recoveries.get("remote", 0)


def test_what_is_lost_without_any_tier_is_everything() -> None:
    bare = PlacementPolicy(0, "rack", required=False)
    found = simulate(job(2, 2, policy=bare, rates=FailureRates(domains={"host": 0.05})), days=10, runs=2)
    assert set(found.recoveries) == {SCRATCH}
    assert found.ettr < 0.2


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 0.5), st.floats(0, 0.5), st.integers(0, 3))
def test_time_adds_up(seed: int, process: float, host: float, spares: int) -> None:
    """What is trained, what is trained again and what stands still make up the run, but for the step that a
    failure cuts."""
    rates = FailureRates(process=process, domains={"host": host})
    found = simulate(
        job(2, 2, rates=rates, spares=spares, saving=Saving(remote_every=100)), days=0.5, runs=1, seed=seed
    ).runs[0]
    spent = found.ettr * 0.5 * DAY + found.lost_steps + found.down_seconds
    assert 0.5 * DAY - sum(found.failures.values()) - 1 <= spent <= 0.5 * DAY + 1e-6
    assert sum(found.failures.values()) == sum(found.recoveries.values())


PARTS = ("detect", "restart", "spare", "replace", "protect", "local", "peer", "remote")


def stretched(times: RecoveryTimes, part: str, by: float) -> RecoveryTimes:
    if part in ("local", "peer", "remote"):
        return replace(times, restore=replace(times.restore, **{part: getattr(times.restore, part) * by}))
    return replace(times, **{part: getattr(times, part) * by})


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(0, 10_000), st.sampled_from(PARTS), st.floats(1.0, 20.0), st.booleans(), st.integers(0, 2)
)  # fmt: skip
def test_no_part_of_a_recovery_can_take_longer_and_ettr_rise(
    seed: int, part: str, by: float, deltas: bool, spares: int
) -> None:
    """Whatever the lives: each meets the same failures."""
    saving = Saving(snapshot_every=20, deltas=deltas, remote_every=200)
    base = job(2, 2, 2, rates=BUSY, saving=saving, spares=spares)
    slower = replace(base, times=stretched(base.times, part, by))
    before, after = (simulate(each, days=0.5, runs=2, seed=seed).runs for each in (base, slower))
    for quick, slow in zip(before, after, strict=True):
        assert slow.failures == quick.failures
        # Later, a save may have come between; that is worth less than one interval for each failure.
        slack = sum(quick.failures.values()) * 20 / (0.5 * DAY)
        assert slow.ettr <= quick.ettr + slack


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["process", "pod", "host", "rack"]))
def test_ettr_falls_with_every_failure_rate(seed: int, kind: str) -> None:
    means = []
    for rate in (0.02, 0.06, 0.18):
        rates = (
            FailureRates(**{kind: rate}) if kind in ("process", "pod") else FailureRates(domains={kind: rate})
        )
        scenario = job(3, 3, rates=rates, saving=Saving(remote_every=500))
        means.append(simulate(scenario, days=10, runs=8, seed=seed).ettr)
    assert means == sorted(means, reverse=True)


def test_a_pod_that_is_moved_costs_its_memory_and_nobody_elses() -> None:
    found = simulate(job(2, 2, rates=FailureRates(pod=0.02)), days=5, runs=2)
    assert set(found.failures) == {"pod"}
    assert found.recoveries["peer"] > 5


def test_each_kind_of_failure_takes_its_own_time() -> None:
    quick = RecoveryTimes(detect=1, restart=2, restore=RestoreSeconds(local=3))
    times = RecoveryTimes(detect=100, kinds={"process": quick})
    life = replay(job(2, 2, times=times), (500.0, "process", ()), seconds=1000.0)
    assert life.down_seconds == 6.0
    assert life.ettr == pytest.approx(0.994)


def test_a_known_failure_costs_what_its_parts_add_up_to() -> None:
    times = RecoveryTimes(detect=1, restart=2, replace=30, restore=RestoreSeconds(peer=4))
    scenario = job(2, 2, times=times, saving=Saving(peer_lag=3))
    life = replay(scenario, (100.0, "host", (0,)), (500.0, "rack", (0, 1)), seconds=1000.0)
    assert life.down_seconds == 2 * (1 + 30 + 4 + 2)
    assert life.lost_steps == 2 * 3
    assert life.recoveries == {"peer": 2}


def test_a_second_loss_does_not_hasten_the_first_ones_successor() -> None:
    """Three at once have no spares; one that is lost a moment later has, and they are waited for still."""
    times = RecoveryTimes(replace=300, spare=5)
    scenario = job(3, 3, spares=2, times=times)
    rack = (100.0, "rack", (0, 1, 2))
    alone = replay(scenario, rack, seconds=3600.0)
    both = replay(scenario, rack, (130.0, "process", ()), seconds=3600.0)
    assert both.down_seconds >= alone.down_seconds


def test_ten_thousand_nodes_are_simulated_in_seconds() -> None:
    """Meta's RSC-1 saw 6.5 failures per 1,000 node-days (arXiv:2410.21680): 65 a day here, and three crashes
    for each."""
    scenario = job(
        *[16] * 625, spares=32,
        saving=Saving(remote_every=500),
        rates=FailureRates(process=0.0065 * 3 / 24, domains={"host": 0.0065 / 24, "rack": 0.0001 / 24}),
    )  # fmt: skip
    found = simulate(scenario, days=30, runs=3)
    assert 5000 < sum(found.failures.values()) < 12000
    assert found.recoveries["peer"] > found.recoveries.get("remote", 0)
    assert 0.5 < found.ettr < 1.0
