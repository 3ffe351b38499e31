"""Deltas, parity, divergence and memory keep their promises when things break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.report import Problem
from tiercheck.protocol.version import Kind, Version
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.status import render_record


def running_world(steps: int = 9, racks: int = 2, nodes_per_rack: int = 2, **changes: object) -> World:
    """With deltas at every step and a snapshot every four steps."""
    spec = make_spec(**{"delta": DeltaMode.AUTO, "snapshot_every": None, **changes})
    world = World(spec, racks=racks, nodes_per_rack=nodes_per_rack)
    return world.running(steps)


@pytest.mark.parametrize(
    ("spec", "lost", "tiers", "rebuilt"),
    [
        ({}, None, {"local": 4, "peer": 0, "remote": 0}, 0),
        ({}, 3, {"local": 3, "peer": 1, "remote": 0}, 0),
        ({"copies": 0, "parity": (2, 1)}, 1, {"local": 3, "peer": 1, "remote": 0}, 1),
    ],
    ids=["crash", "a peer holds the chain", "parity"],
)
def test_no_step_is_lost_because_every_one_is_kept(
    spec: dict[str, Any], lost: int | None, tiers: dict[str, int], rebuilt: int
) -> None:
    world = running_world(**spec)
    placement = world.status.placement
    assert placement is not None
    assert not rebuilt or "any one host" in placement.tolerates
    last = world.newest_step()
    assert last % 4, "otherwise a snapshot alone would do"
    if lost is None:
        world.crash(2)
    else:
        world.kill_node(world.home(lost))
    summary = world.recovered()
    assert (summary["step"], summary["lostSteps"], summary["deltas"]) == (last, 0, last % 4)
    assert (summary["tiers"], summary["rebuilt"]) == (tiers, rebuilt)


def test_delta_that_one_rank_skipped_costs_the_steps_after_it_and_the_reason_says_so() -> None:
    world = running_world(steps=0)
    start = world.newest_step()
    gap = start + 6 - (start + 6) % 4 + 2
    world.skipped = {(1, gap)}
    world.tick_until(lambda: world.newest_step() > gap)
    summary = world.recovered(crash=0)
    assert summary["step"] == gap - 1
    assert f"rank 1 lacks the delta of step {gap}" in summary["reason"]


def test_gap_in_own_memory_is_filled_from_a_peer_when_steps_are_worth_it() -> None:
    world = running_world(steps=0)
    world.step_seconds = 60.0
    world.train(9)
    victim = world.sidecar(1)
    victim.own = {each for each in victim.own if each.kind is Kind.SNAPSHOT}
    last = world.newest_step()
    summary = world.recovered(crash=0)
    assert summary["step"] == last
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}


def test_snapshot_from_the_remote_tier_is_brought_forward_by_deltas_in_memory() -> None:
    world = running_world(remote=REMOTE, copies=0)
    last = world.newest_step()
    for sidecar in world.sidecars.values():
        sidecar.own = {each for each in sidecar.own if each.kind is Kind.DELTA}  # say, all were found bad
    summary = world.recovered(crash=0)
    assert summary["step"] == last
    assert summary["tiers"]["remote"] == 4
    assert summary["deltas"] == last - max(v.step for v in world.remote if v.attempt == 1 and v.step <= last)


def test_status_says_how_the_job_is_saved() -> None:
    world = running_world()
    known = world.status.checkpoint
    assert known is not None
    assert (known.deltas, known.deltas_reason) == ("EveryStep", "")
    assert world.told("DeltasActive")[:2] == (True, "EveryStep")
    world = running_world(delta=DeltaMode.NONE, snapshot_every=4)
    assert world.told("DeltasActive")[:2] == (False, "TurnedOff")
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.snapshot_every == 4


def test_part_of_a_sidecar_that_failed_unforeseen_is_told_unless_something_better_known_is() -> None:
    world = running_world()
    world.sidecar(0).problems = (Problem("InternalError", "its loop reclaim failed and began again"),)
    world.tick()
    said = "worker 0: its loop reclaim failed and began again"
    assert world.told("Protected") == (False, "InternalError", said)
    assert world.status.phase == "Running"
    world.sidecar(2).problems = (Problem("RemoteFull", "the bucket is full"),)
    world.tick()
    assert world.condition("Protected").reason == "RemoteFull"


@pytest.mark.parametrize(
    ("kind", "bad", "well", "of", "said"),
    [
        ("Throttled", "SidecarThrottled", "NotThrottled", "worker 2: ", "it used up its limit of 0.5 cores"),
        ("RemoteSafe", "RemoteNotSafe", "PromisesKept", "", "it ignores If-None-Match"),
    ],
)
def test_trouble_with_a_condition_of_its_own_is_named_until_it_is_over_and_the_job_stays_protected(
    kind: str, bad: str, well: str, of: str, said: str
) -> None:
    world, is_trouble = running_world(remote=REMOTE), kind == "Throttled"
    assert world.status.condition(kind) is None, "nothing is said of jobs that it never happened to"
    sidecar = world.sidecar(2 if of else 0)
    sidecar.problems = (Problem(bad, said),)
    world.tick()
    assert world.told(kind) == (is_trouble, bad, of + said)
    assert bad in world.notices
    assert world.status.holds("Protected")
    sidecar.problems = ()
    world.tick()
    assert world.told(kind)[:2] == (not is_trouble, well)


def test_worker_without_a_named_interface_is_named_and_the_job_stays_protected() -> None:
    world = running_world()
    before = world.condition("Protected")
    sidecar = world.sidecar(2)
    sidecar.problems = (Problem("InterfaceMissing", "this pod has no interface net1. It has eth0"),)
    world.tick()
    told = world.condition("Protected")
    assert (told.status, told.reason) == (True, "InterfaceMissing")
    assert told.message == f"{before.message}. Worker 2: this pod has no interface net1. It has eth0"
    assert "InterfaceMissing" in world.notices
    sidecar.problems = ()
    world.tick()
    assert world.condition("Protected").message == before.message


def test_interfaces_reach_every_sidecar_and_nonsense_is_refused_with_a_sentence() -> None:
    named = ("net1", "10.20.0.7/16", "fd00:20::/64")
    world = running_world(peer_interfaces=named)
    policies = [each.directive.policy for each in world.sidecars.values() if each.directive is not None]
    assert [policy.peer_interfaces for policy in policies] == [named] * 4
    world = World(make_spec(peer_interfaces=("net1", "1:2::3::4/64")))
    world.tick()
    placed = world.condition("Placed")
    assert (placed.status, placed.reason) == (False, "InvalidSpec")
    assert placed.message.startswith("spec.tiers.peer.interfaces: ")
    assert "1:2::3::4" in placed.message
    assert not world.pods


def test_optimizer_that_cannot_be_replayed_is_named_and_the_job_stays_protected() -> None:
    world = running_world()
    sidecar, said = world.sidecar(2), "the optimizer of rank 2 needs a closure"
    sidecar.trainer = replace(sidecar.trainer, no_deltas=said)
    world.tick()
    assert world.told("DeltasActive") == (False, "DeltasOff", f"worker 2: {said}")
    assert "DeltasOff" in world.notices
    assert world.status.holds("Protected")


# Parity


def parity_world(steps: int = 9, parity: tuple[int, int] = (2, 1), **changes: object) -> World:
    return running_world(steps, copies=0, parity=parity, **changes)


def test_no_copies_are_kept_with_parity() -> None:
    world = parity_world()
    assert not any(sidecar.hosted for sidecar in world.sidecars.values())
    holders = [sidecar for sidecar in world.sidecars.values() if sidecar.blocks]
    assert len(holders) == 2, "two groups of two, one block each"
    assert world.status.holds("Protected")


def test_two_losses_in_one_group_are_rebuilt_with_parity_of_two() -> None:
    world = parity_world(parity=(2, 2), workers=8, racks=4)
    group = world.saved.groups[0]
    for worker in group.members:
        world.kill_node(world.home(worker))
    last = world.newest_step()
    summary = world.recovered()
    assert (summary["step"], summary["lostSteps"]) == (last, 0)
    assert summary["rebuilt"] == 2


def test_more_losses_than_parity_go_back_to_the_remote_tier() -> None:
    world = parity_world(parity=(2, 1), remote=REMOTE, workers=6, racks=3, steps=12)
    for worker in world.saved.groups[0].members:
        world.kill_node(world.home(worker))
    stored = max(world.remote)
    summary = world.recovered()
    assert summary["step"] >= stored.step
    assert summary["tiers"]["remote"] > 0
    assert summary["rebuilt"] == 0


def test_lost_holder_costs_nothing_and_its_replacement_folds_again() -> None:
    world = parity_world()
    holder = world.saved.groups[0].holders[0]
    world.kill_node(world.home(holder))
    last = world.newest_step()
    assert world.recovered()["step"] == last
    world.train(6)
    kept = {
        (share.ranks, kind)
        for sidecar in world.sidecars.values()
        if world.live_sidecar(sidecar.worker) is sidecar
        for share, _, kind in sidecar.blocks
    }
    assert kept == {(group.members, kind) for group in world.saved.groups for kind in Kind}


def change(world: World, **fields: object) -> None:
    spec = replace(world.job.spec, **fields)  # type: ignore[arg-type]
    world.job = replace(world.job, spec=spec, generation=world.job.generation + 1)


def test_change_from_copies_to_parity_takes_effect_with_the_next_attempt_and_loses_nothing() -> None:
    world = running_world()
    change(world, copies=0, parity=(2, 1))
    world.train(3, attempt=1)
    assert all(sidecar.hosted for sidecar in world.sidecars.values()), "until then copies go on"
    assert world.status.holds("Protected")
    world.kill_node(world.home(3))
    last = world.newest_step()
    summary = world.recovered()
    assert (summary["step"], summary["lostSteps"], summary["rebuilt"]) == (last, 0, 0)
    world.train(8)
    assert not any(sidecar.hosted for sidecar in world.sidecars.values())
    world.kill_node(world.home(0))
    last = world.newest_step()
    summary = world.recovered(3)
    assert (summary["step"], summary["lostSteps"]) == (last, 0)
    assert summary["rebuilt"] >= 1


def test_change_from_parity_to_copies_still_rebuilds_from_the_blocks_once() -> None:
    world = parity_world()
    change(world, copies=1, parity=None)
    world.kill_node(world.home(1))
    last = world.newest_step()
    summary = world.recovered()
    assert (summary["step"], summary["lostSteps"], summary["rebuilt"]) == (last, 0, 1)
    world.train(8)
    assert not any(sidecar.blocks for sidecar in world.sidecars.values())
    assert all(world.placement.holders().values()) if world.placement else False


@pytest.mark.parametrize(
    "spec", [{"delta": DeltaMode.NONE, "snapshot_every": 2}, {}, {"copies": 0, "parity": (2, 1)}]
)
def test_released_attempt_gets_no_directive_twice_and_no_new_one(spec: dict[str, Any]) -> None:
    world = running_world(**spec)
    for _ in range(6):
        world.tick()
        assert not [action for action in world.last.after if isinstance(action, Push)]
        assert not world.last.before


# Divergence


def test_job_that_diverges_goes_back_to_the_last_good_version_and_it_counts() -> None:
    world = running_world(rollback_after=3)
    good = world.newest_step()
    world.poisoned = {1}
    world.train(2, attempt=1)
    summary = world.recovered_from("Diverged", "not finite for 3 steps in a row")
    assert summary["step"] == good
    assert "Diverged" in world.notices
    assert (world.status.crashes, world.status.disruptions) == (1, 0)
    world.train(20, attempt=2)


def test_job_that_diverges_again_and_again_is_given_up() -> None:
    world = running_world(rollback_after=2, max_restarts=2)
    world.poisoned = {1, 2, 3}
    world.until("Failed")
    world.assert_told("Failed", "MaxRestartsExceeded", "not finite")
    assert world.status.crashes == 2


def test_without_the_policy_a_job_that_diverged_trains_on() -> None:
    world = running_world()
    world.poisoned = {1}
    world.train(30, attempt=1)


# Replays that differ


@pytest.mark.parametrize("how", ["in place", "on a replaced worker", "unequal replicas"])
def test_state_that_is_not_what_was_saved_is_not_chosen_again_and_its_failure_is_no_crash(how: str) -> None:
    """A replay that differs goes back to the snapshot, also one from a peer. What led to a snapshot whose
    replicas held different bits, and on from it, counts no more."""
    world = running_world(max_restarts=1)
    last = world.newest_step()
    assert last % 4 >= 2
    back, said = (last - last % 4, 0), f"rank 2: replaying the delta of step {last - 1} did not give"
    if how == "on a replaced worker":
        world.bad_replays = {(3, Version(last, 1))}
        world.kill_node(world.home(3))
        said = "replaying the delta of step"
    elif how == "in place":
        world.bad_replays = {(2, Version(last - 1, 1))}
        world.crash(0)
    else:
        world.unequal = {Version(back[0], 1)}
        back, said = (back[0] - 1, 3), "replicas held different bits"
        world.crash(0)
    summary = world.recovered_from("RestoreFailed", said, attempt=3)
    assert (summary["step"], summary["deltas"]) == back
    struck = 0 if how == "on a replaced worker" else 1
    assert world.status.crashes == struck, "the exit after the replay is no other one"
    world.train(20, attempt=3)


# Memory


def test_job_that_cannot_fit_is_refused_with_numbers_before_any_pod_is_made() -> None:
    world = World(
        make_spec(delta=DeltaMode.AUTO, snapshot_every=None, state_size=300 * 2**20, size_limit="1Gi")
    )
    world.train(5)
    world.assert_told("Placed", (False, "MemoryTooSmall"), "1Gi", "at least 1.2 GiB")
    assert not world.created
    assert world.status.phase == "Pending"
    memory = world.status.memory
    assert memory is not None
    assert memory.limit == 2**30
    assert memory.needed == memory.local + memory.peer > memory.limit
    assert (memory.local, memory.peer) == pytest.approx(
        ((3 + 8 / 3) * 300 * 2**20, (2 + 8 / 3) * 300 * 2**20), rel=0.03
    )
    change(world, size_limit="4Gi")
    world.until("Running")


def test_parity_lets_a_job_fit_that_copies_do_not() -> None:
    size = {"state_size": 230 * 2**20, "size_limit": "1000Mi", "workers": 8}
    world = World(make_spec(copies=2, **size), racks=4)
    world.train(5)
    assert not world.created
    world = World(make_spec(copies=0, parity=(4, 2), **size), racks=4).running(0)
    assert world.status.memory is not None
    assert world.status.memory.peer < 3 * 230 * 2**20


def test_running_job_is_not_stopped_by_a_forecast() -> None:
    world = running_world()
    change(world, state_size=2**40)
    world.recovered(crash=0)


def test_status_of_a_thousand_workers_stays_small() -> None:
    workers = 1000
    spec = make_spec(
        workers=workers, delta=DeltaMode.AUTO, snapshot_every=None, state_size=2**20, size_limit="64Gi"
    )
    for shape in ({"copies": 2}, {"copies": 0, "parity": (8, 2)}):
        world = World(replace(spec, **shape), racks=20, nodes_per_rack=10)  # type: ignore[arg-type]
        world.until("Running", limit=30)
        for worker in range(0, workers, 3):
            world._gone(world.member(worker))
        world.tick()
        size = len(repr(render_record(world.status)))
        world.until("Running", limit=30, attempt=2)
        assert max(size, len(repr(render_record(world.status)))) < 20 * 1024
