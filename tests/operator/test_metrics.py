"""A job's series say what its status says, count what has ended, and go when the job goes."""

from __future__ import annotations

import itertools
from dataclasses import replace

from tests.operator.world_in_memory import World, make_spec
from tiercheck_operator.controller.members.lost_nodes import find_silent_members
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model.status import PlacementRecord, SparesRecord


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"namespace": "ns", "tiercheck_job": "j", **labels})


def test_what_a_recovery_cost_is_counted_once() -> None:
    world, metrics = World(make_spec(workers=4)), Metrics()
    world.until("Running")
    world.train(7)
    before = world.job
    world.crash(1)
    attempt = world.status.attempt
    world.until("Running", attempt=attempt + 1)
    ended = world.status.last_recovery
    assert ended is not None
    metrics.status_written(before, world.status)
    metrics.status_written(world.job, world.status)
    assert value(metrics, "tiercheck_restores_total", cause="TrainerCrash") == 1
    assert value(metrics, "tiercheck_lost_steps_total") == ended["lostSteps"]
    assert value(metrics, "tiercheck_lost_seconds_total") == ended["lostSteps"] * (
        world.status.step_seconds or 0
    )
    assert value(metrics, "tiercheck_recovery_duration_seconds_count", phase="total") == 1


def test_placements_that_change_are_counted_and_the_first_one_is_no_change() -> None:
    world, metrics = World(), Metrics()
    placed = [PlacementRecord(name, "rack", (), 0) for name in ("a", "a", "b")]
    statuses = [replace(world.status, placement=placement) for placement in (None, *placed)]
    for old, new in itertools.pairwise(statuses):
        metrics.status_written(replace(world.job, status=old), new)
    ended = [replace(status, last_recovery={"cause": "x", "attempt": 1}) for status in statuses[:1]]
    metrics.status_written(world.job, ended[0])
    assert value(metrics, "tiercheck_placement_changes_total") == 1


def test_sidecars_that_do_not_answer_are_counted_until_they_do() -> None:
    world, metrics = World(), Metrics()
    world.until("Running")
    for killed in (False, True):
        if killed:
            world.kill_sidecar(world.member(1))
            world.poll()
        metrics.job_seen(world.job, len(find_silent_members(world.observe())))
        assert value(metrics, "tiercheck_sidecars_away") == killed


def test_no_series_of_a_job_outlives_it() -> None:
    world, metrics = World(), Metrics()
    world.until("Running")
    job = replace(world.job, status=replace(world.status, spares=SparesRecord(2, 1)))
    metrics.job_seen(job)
    assert value(metrics, "tiercheck_spares", state="ready") == 1
    assert b'tiercheck_job="j"' in metrics.text()
    metrics.job_gone("ns", "j")
    assert b'tiercheck_job="j"' not in metrics.text()


def test_first_recovery_is_an_increase_because_counters_begin_at_zero() -> None:
    world, metrics = World(), Metrics()
    metrics.job_seen(world.job)
    assert value(metrics, "tiercheck_restores_total", cause="TrainerCrash") == 0
    assert value(metrics, "tiercheck_lost_steps_total") == 0
    assert value(metrics, "tiercheck_restored_ranks_total", tier="peer") == 0
