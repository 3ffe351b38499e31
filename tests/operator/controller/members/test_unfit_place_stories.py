"""A pod in which no attempt can begin is left, although Kubernetes calls it well.

Processes do not end there, commands do not start, or checks fail.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.directive import HealthCheck
from tiercheck.protocol.report import TrainerState
from tiercheck_operator.controller.members.membership import Loss, note_places
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.spec import ExitCodes, FailureRule, RuleAction


def crash_beside_undying(world: World, *workers: int) -> None:
    """Worker 3 fails, and the others' processes do not end."""
    world.undying |= {world.member(worker) for worker in workers}
    world.crash(3)


def test_worker_whose_processes_do_not_end_moves_to_another_node_and_nobody_starts_before() -> None:
    world = trained(6, max_restarts=1)
    old, node = world.member(2), world.home(2)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    world.grace = 1000.0  # what does not end keeps its pod
    crash_beside_undying(world, 2)
    world.until("Running", attempt=3)
    assert world.starts.keys() == {1, 3}, "nobody began attempt 2 beside the old rank"
    summary = world.summary
    world.assert_back_from("Stuck", "SIGKILL does not end process 7")
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert summary["lostSteps"] <= 1
    assert "Stuck" in world.notices
    assert (world.home(2) != node, world.pods[old].deleting) == (True, True)
    assert survivors <= set(world.pods)
    assert (world.status.crashes, world.status.disruptions) == (1, 1), "what does not end is nobody's crash"
    # As long as its pod is there, no other one goes to that node, and those of other jobs would rather not.
    assert [place.node for place in world.status.places] == [node]
    world.evict(world.member(3))
    world.recovered(4)
    assert world.home(3) != node


def test_processes_that_end_after_a_while_cost_a_wait_and_no_pod() -> None:
    world = trained(6)
    pods = set(world.pods)
    crash_beside_undying(world, 2)
    world.train(10, attempt=2)
    assert 2 not in world.starts
    world.assert_told(conditions.RESTORING, "", "worker 2 (1 in all) ends the command of attempt 1")
    world.undying.clear()
    assert world.recovered()["cause"] == "TrainerCrash"
    assert set(world.pods) == pods


def test_pods_that_all_have_processes_that_do_not_end_stay_because_no_node_is_to_blame() -> None:
    world = trained(6)
    pods = set(world.pods)
    crash_beside_undying(world, 0, 1, 2)
    world.tick_until(lambda: world.status.attempt != 1)
    sidecar = world.sidecar(3)
    world.undying.add(sidecar.pod)
    sidecar.killed_at = world.now  # what is left of the command that crashed
    world.train(100)
    assert set(world.pods) == pods
    assert "SIGKILL does not end process 7" in world.condition(conditions.RESTORING).message
    world.undying.clear()
    world.recovered()
    assert set(world.pods) == pods


@pytest.mark.parametrize("remote", [None, REMOTE])
def test_worker_whose_memory_nobody_has_stays_until_its_processes_end(
    remote: dict[str, object] | None,
) -> None:
    world = trained(6, copies=0, remote=remote)
    pods = set(world.pods)
    crash_beside_undying(world, 2)
    world.train(60)
    if remote is None:
        assert set(world.pods) == pods
        world.undying.clear()
        assert world.recovered()["tiers"] == {"local": 4, "peer": 0, "remote": 0}
    else:
        assert world.recovered(3)["tiers"]["remote"] == 1, "the bucket has what is needed to go on"


def test_two_such_workers_move_one_after_the_other_and_nothing_is_lost() -> None:
    """Each may be the one that keeps the other's copy."""
    world = trained(6)
    crash_beside_undying(world, 0, 1)
    world.until("Running", attempt=4)
    assert world.status.attempt == 4
    assert world.summary["lostSteps"] <= 1
    assert {pod.incarnation for pod in world.pods.values() if pod.worker < 2} == {1}


def test_what_a_failed_command_left_behind_is_left_with_its_pod() -> None:
    """Its command counts as running, so that nothing else would ever notice."""
    world = trained(6)
    sidecar = world.sidecar(2)
    world.undying.add(sidecar.pod)
    sidecar.trainer = replace(sidecar.trainer, stuck="SIGKILL does not end process 7")
    assert world.recovered()["cause"] == "Stuck"
    assert sidecar.pod not in world.pods


# Commands that fail before their first step.


def test_worker_whose_command_fails_twice_on_a_node_before_its_first_step_moves_and_spends_no_restarts() -> (
    None
):
    """As where a GPU cannot be initialised."""
    world = trained(6, max_restarts=2)
    node = world.home(2)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    world.bad_starts = {node}
    world.crash(2)
    summary = world.recovered_from("StartFailed", "exit code 1", attempt=4)
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert "StartFailed" in world.notices
    assert world.home(2) != node
    assert survivors <= set(world.pods)
    # The crash in training, and the first one at the start.
    assert (world.status.crashes, world.status.disruptions) == (2, 1)


def test_first_start_of_a_job_is_treated_alike_although_nobody_keeps_copies() -> None:
    """There is nothing to lose yet."""
    world = World(make_spec(copies=0))
    world.until("Starting")
    node = world.home(1)
    world.bad_starts = {node}
    world.until("Running")
    assert world.home(1) != node


@pytest.mark.parametrize(("bad", "made"), [({2}, 5), ({1, 2}, 4)])
def test_worker_that_fails_wherever_it_is_moves_once_unless_several_fail_and_then_spends_its_restarts(
    bad: set[str | int], made: int
) -> None:
    """It is the script, which does something there that it does nowhere else."""
    world = World(make_spec(max_restarts=5))
    world.bad_starts = bad
    world.until("Failed", limit=400)
    assert len(world.created) == made
    assert {action.worker for action in world.created if action.incarnation} == ({2} if made == 5 else set())
    assert world.status.counted == 5


def test_first_step_makes_forgotten_what_failed_before_it() -> None:
    world = trained(6)
    world.bad_starts = {2}
    world.crash(1)
    world.tick_until(lambda: world.status.failed_start is not None)
    assert (world.status.failed_start.worker, world.status.failed_start.times) == (2, 1)
    world.bad_starts = set()
    world.recovered(3)
    world.train(4)
    world.recovered(4, crash=1)
    assert world.status.failed_start is None


def test_user_who_calls_an_exit_code_final_is_obeyed_and_no_pod_moves() -> None:
    final = FailureRule("final", RuleAction.FAIL, ExitCodes(frozenset({9})))
    world = World(make_spec(rules=(final,)))
    world.bad_starts = {2}
    world.tick_until(lambda: world.status.failed_start is not None)
    while world.status.attempt == 2 and world.status.phase != "Failed":
        world.tick()
        sidecar = world.live_sidecar(2)
        if sidecar is not None and sidecar.trainer.state is TrainerState.FAILED:
            sidecar.trainer = replace(sidecar.trainer, exit_code=9)
    assert world.status.phase == "Failed"
    assert len(world.created) == 4


@settings(max_examples=examples(12), deadline=None)
@example(0, 1, {12: 1})  # between the new pod and the status that says why it is there
@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 60), st.integers(0, 6), max_size=4),
)
def test_one_bad_node_never_ends_a_job(node: int, restarts: int, kills: dict[int, int]) -> None:
    """Whatever the operator's own fate meanwhile. At most one restart is spent on it."""
    world = World(make_spec(max_restarts=restarts))
    world.bad_starts = {sorted(world.nodes)[node]}
    world.until("Running", kills=kills)
    assert world.status.phase == "Running"
    assert world.status.counted == 1
    assert len({(action.worker, action.incarnation) for action in world.created}) == 5


# Health checks.

CHECK = HealthCheck(("sh", "-c", "check"), 60.0)


def told_while_all_stay(world: World, pods: set[str]) -> str:
    """What the job says of a failed check; nobody was moved for it."""
    assert set(world.pods) == pods
    restoring = world.condition(conditions.RESTORING)
    assert restoring.reason == "HealthCheckFailed"
    return restoring.message


def test_worker_whose_node_fails_the_users_check_moves_before_anybody_has_started() -> None:
    world = trained(6, health_check=CHECK, max_restarts=0)
    node = world.home(2)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    world.unhealthy = {node}
    world.evict(world.member(3))
    world.until("Running", attempt=3)
    assert world.starts.keys() == {1, 3}
    summary = world.summary
    world.assert_back_from("HealthCheckFailed", "ended with exit code 3: no GPU")
    assert summary["tiers"]["remote"] == 0
    assert summary["lostSteps"] <= 2
    assert "HealthCheckFailed" in world.notices
    assert world.home(2) != node
    assert survivors - {world.member(3)} - set(world.pods) <= {max(survivors)}
    assert world.status.crashes == 0


def test_first_attempt_leaves_all_unhealthy_nodes_at_once_because_there_is_nothing_to_lose() -> None:
    world = World(make_spec(health_check=CHECK, copies=0))
    world.unhealthy = {"n00", "n11"}
    world.until("Running")
    assert world.status.attempt == 2
    assert not {world.home(worker) for worker in range(4)} & world.unhealthy


def test_worker_whose_check_fails_on_every_node_does_not_rush_from_one_to_the_next() -> None:
    world = trained(6, health_check=CHECK)
    world.unhealthy = {2}
    world.crash(1)
    world.train(120)
    moves = len([action for action in world.created if action.worker == 2]) - 1
    assert 2 <= moves <= 12, "one in ten seconds at most"
    world.unhealthy = set()
    world.until("Running", attempt=2)


@pytest.mark.parametrize("everywhere", [True, False])
def test_check_that_fails_everywhere_or_where_the_only_memory_is_moves_nobody_and_is_told_until_it_passes(
    everywhere: bool,
) -> None:
    world = trained(6, health_check=CHECK, copies=int(everywhere))
    pods = set(world.pods)
    world.unhealthy = {0, 1, 2, 3} if everywhere else {world.home(2)}
    world.crash(1)
    world.train(60)
    said = told_while_all_stay(world, pods)
    who = "worker 0 (4 in all)" if everywhere else "worker 2 (1 in all)"
    assert f"{who}: failurePolicy.healthCheck (sh) ended with exit code 3" in said
    world.unhealthy = set()
    assert world.recovered()["cause"] == "TrainerCrash"


@settings(max_examples=examples(12), deadline=None)
@given(
    st.sets(st.sampled_from(["n00", "n01", "n10", "n11"]), min_size=1, max_size=3),
    st.dictionaries(st.integers(0, 60), st.integers(0, 6), max_size=4),
)
def test_whichever_nodes_are_unhealthy_the_job_trains_on_the_others(
    nodes: set[str], kills: dict[int, int]
) -> None:
    """That nobody starts on one of them, `World.started` asserts."""
    world = trained(6, health_check=CHECK)
    world.unhealthy = {*nodes}
    world.crash(0)
    began = world.newest_step()
    world.until("Running", limit=400, attempt=2, kills=kills)
    assert world.status.phase == "Running"
    assert world.summary["step"] >= began - 4, "no memory was given up that nobody else had"


# Nodes on which pods do not start.


NO_DEVICE = "Allocate failed due to no healthy devices present for nvidia.com/gpu"
REFUSED = ("Failed", "UnexpectedAdmissionError", NO_DEVICE)
NO_IMAGE = ("Pending", "", "container trainer: ImagePullBackOff: Back-off pulling image")
SILENT = ("Pending", "", "")


def lose_on_bad_node(how: tuple[str, str, str], **changes: object) -> World:
    """A job that trains; then worker 1's node, which the scheduler likes best, starts no pod any more."""
    world = trained(nodes_per_rack=3, **changes)
    world.liked = world.home(1)
    world.not_starting[world.liked] = how
    world.end_gracefully(world.member(1))
    return world


def tried(world: World) -> Counter[str]:
    """How many pods of worker 1 were made for each list of nodes that they avoid."""
    return Counter(",".join(action.avoid) for action in world.created if action.worker == 1)


@pytest.mark.parametrize("how", [REFUSED, NO_IMAGE, SILENT])
def test_node_that_starts_no_pod_is_tried_twice_at_most(how: tuple[str, str, str]) -> None:
    world = lose_on_bad_node(how)
    world.until("Running", attempt=2, limit=400)
    assert world.home(1) != world.liked
    assert tried(world) == {"": 3, world.liked: 1}
    assert world.notices.count("NodeAvoided") == 1


@pytest.mark.parametrize("skew", [-600.0, 600.0])
def test_clock_of_the_api_server_neither_delays_nor_hastens_the_next_pod(
    monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    make = World._make

    def make_by_another_clock(world: World, *arguments: Any) -> None:
        before = set(world.pods)
        make(world, *arguments)
        for uid in world.pods.keys() - before:
            world.change_pod(uid, created=world.now + skew, seen_since=world.now)

    monkeypatch.setattr(World, "_make", make_by_another_clock)
    world = lose_on_bad_node(REFUSED)
    lost = world.now
    world.until("Running", attempt=2, limit=60)
    assert tried(world) == {"": 3, world.liked: 1}
    assert world.now - lost > 10.0, "as long as with equal clocks"


def test_pods_that_somebody_deletes_before_they_come_up_are_made_with_a_pause() -> None:
    world = trained(6)
    world.evict(world.member(1))
    world.grace = 30.0
    for _ in range(60):
        world.tick()
        for pod in [pod for pod in world.pods.values() if pod.ip is None and not pod.deleting]:
            world.end_gracefully(pod.uid)
    assert 5 <= tried(world).total() <= 8, "and not sixty"
    world.until("Running", attempt=2)


def test_what_the_kubelet_said_stands_in_the_condition_with_the_node() -> None:
    world = lose_on_bad_node(REFUSED)
    world.train(5)
    world.assert_told(
        "Placed", "", f"node {world.liked} is avoided: the pod failed (UnexpectedAdmissionError) {NO_DEVICE}"
    )


@pytest.mark.parametrize("heeds", [True, False])
def test_scheduler_that_heeds_a_preference_needs_no_second_try_nor_does_an_operator_that_died(
    heeds: bool,
) -> None:
    world = lose_on_bad_node(REFUSED)
    if heeds:
        world.train(3)
        world.liked = ""
    else:
        world.tick_until(lambda: world.status.places)
        for _ in range(40):
            world.forget()
            world.tick()
    world.until("Running", attempt=2)
    assert tried(world) == {"": 3} if heeds else tried(world)[""] <= 3


def test_two_nodes_that_refuse_in_turn_are_both_left() -> None:
    world = trained(nodes_per_rack=2, workers=2)
    for name in sorted(world.nodes):
        if name not in (world.home(0), "n11"):
            world.not_starting[name] = REFUSED
    world.liked = world.home(1)
    world.end_gracefully(world.member(1))
    world.until("Running", attempt=2, limit=400)
    assert len(tried(world)) >= 2


def test_only_node_that_is_left_is_tried_again_and_used_when_it_is_well() -> None:
    world = trained()
    bad = world.home(1)
    world.not_starting[bad] = REFUSED
    for name in world.nodes:
        world.change_nodes(name, schedulable=name == bad)
    world.end_gracefully(world.member(1))
    world.train(120)
    placed = world.condition("Placed")
    made = len(world.created)
    said = set()
    for _ in range(120):
        world.tick()
        placed = world.condition("Placed")
        said.add((placed.reason, f"It avoids {bad} until" in placed.message))
    assert (conditions.UNSCHEDULABLE, True) in said
    assert 2 <= len(world.created) - made <= 6
    world.not_starting.clear()
    world.until("Running", attempt=2)
    assert world.home(1) == bad


def test_image_that_no_node_can_pull_moves_no_pod() -> None:
    world = World(make_spec())
    world.not_starting = dict.fromkeys(world.nodes, NO_IMAGE)
    world.train(300)
    assert len(world.created) == 4
    assert not world.status.places


def test_pod_that_waits_for_a_node_is_made_again_only_if_it_would_avoid_fewer() -> None:
    """As after a quick reboot of the only node that fits: its old pod is still ending there."""
    world = trained()
    node = world.home(1)
    for name in world.nodes:
        world.change_nodes(name, schedulable=name == node)
    world.grace = 100.0
    uid = world.member(1)
    world.undying.add(uid)
    world.crash(3)
    world.train(90)
    assert [action.avoid for action in world.created if action.worker == 1][1:] == [(node,)]
    world._gone(uid)
    world.until("Running", attempt=3)
    assert [action.avoid for action in world.created if action.worker == 1][1:] == [(node,), ()]


def test_device_that_is_ill_is_told_once_and_a_worker_that_fails_there_moves() -> None:
    world = trained(nodes_per_rack=3)
    uid, node = world.member(1), world.home(1)
    world.change_pod(uid, ill="device gpu-7 (nvidia.com/gpu) is Unhealthy")
    world.train(5)
    assert world.told("Placed")[:2] == (True, conditions.DEVICE_UNHEALTHY)
    assert world.notices.count("DeviceUnhealthy") == 1
    summary = world.recovered(crash=1)
    assert (summary["cause"], world.home(1) != node) == ("GPUFault", True)
    assert [place.node for place in world.status.places] == [node]
    world.train(620)
    assert not world.status.places


def test_spare_that_is_refused_at_its_node_is_made_elsewhere() -> None:
    world = World(make_spec(spares=1), nodes_per_rack=4)
    world.liked = "n03"
    world.not_starting["n03"] = REFUSED
    world.running(60)
    assert world.condition("SparesReady").status


def test_node_is_remembered_longer_each_time_and_once_for_all_pods_that_it_lost_together() -> None:
    def lost(created: float, node: str = "n1") -> Loss:
        pod = PodView("j-1-0", f"u{created}", "job-uid", 1, 0, node, None, "Failed", created)
        return Loss(1, Cause.POD_FAILED, "m", pod, None, None, "it did not start", of_place=True)

    places = note_places((), [lost(7.0), lost(5.0), lost(6.0)], 10.0, 300.0)
    assert [(place.times, place.created) for place in places] == [(1, 7.0)]
    assert note_places(places, [lost(7.0), lost(5.0)], 20.0, 300.0) == places, "the same pods, seen again"
    assert note_places(places, [], 309.0, 300.0) == places
    assert note_places(places, [], 310.0, 300.0) == ()
    for times in range(2, 9):
        places = note_places(places, [lost(10.0 * times)], 10.0 * times, 300.0)
        assert places[0].times == times
    assert note_places(places, [], 80.0 + 3599.0, 300.0) == places
    assert note_places(places, [], 80.0 + 3600.0, 300.0) == ()
    many = [lost(1.0, f"n{number}") for number in range(99)]
    assert len(note_places((), many, 0.0, 300.0)) == 8
