"""A pod in which no attempt can begin is left, although Kubernetes calls it well.

Processes do not end there, commands do not start, or checks fail.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck.protocol.directive import HealthCheck
from tiercheck.protocol.report import TrainerState
from tiercheck_operator.model import conditions
from tiercheck_operator.model.spec import ExitCodes, FailureRule, RuleAction


def running_world(**changes: object) -> World:
    world = World(make_spec(**changes))
    world.until("Running")
    world.train(6)
    return world


def crash_beside_undying(world: World, *workers: int) -> None:
    """Worker 3 fails, and the others' processes do not end."""
    world.undying |= {world.member(worker) for worker in workers}
    world.crash(3)


def test_worker_whose_processes_do_not_end_moves_to_another_node_and_nobody_starts_before() -> None:
    world = running_world(max_restarts=1)
    old, node = world.member(2), world.home(2)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    world.grace = 1000.0  # what does not end keeps its pod
    crash_beside_undying(world, 2)
    world.until("Running", attempt=3)
    assert world.starts.keys() == {1, 3}, "nobody began attempt 2 beside the old rank"
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "Stuck"
    assert "SIGKILL does not end process 7" in summary["message"]
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
    world = running_world()
    pods = set(world.pods)
    crash_beside_undying(world, 2)
    world.train(10)
    assert world.status.attempt == 2
    assert 2 not in world.starts
    restoring = world.status.condition(conditions.RESTORING)
    assert restoring is not None
    assert "worker 2 (1 in all) ends the command of attempt 1" in restoring.message
    world.undying.clear()
    assert world.recovered()["cause"] == "TrainerCrash"
    assert set(world.pods) == pods


def test_pods_that_all_have_processes_that_do_not_end_stay_because_no_node_is_to_blame() -> None:
    world = running_world()
    pods = set(world.pods)
    crash_beside_undying(world, 0, 1, 2)
    while world.status.attempt == 1:
        world.tick()
    sidecar = world.live_sidecar(3)
    assert sidecar is not None
    world.undying.add(sidecar.pod)
    sidecar.killed_at = world.now  # what is left of the command that crashed
    world.train(100)
    assert set(world.pods) == pods
    restoring = world.status.condition(conditions.RESTORING)
    assert restoring is not None
    assert "SIGKILL does not end process 7" in restoring.message
    world.undying.clear()
    world.recovered()
    assert set(world.pods) == pods


@pytest.mark.parametrize("remote", [None, REMOTE])
def test_worker_whose_memory_nobody_has_stays_until_its_processes_end(
    remote: dict[str, object] | None,
) -> None:
    world = running_world(copies=0, remote=remote)
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
    world = running_world()
    crash_beside_undying(world, 0, 1)
    world.until("Running", attempt=4)
    assert world.status.attempt == 4
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["lostSteps"] <= 1
    assert {pod.incarnation for pod in world.pods.values() if pod.worker < 2} == {1}


def test_what_a_failed_command_left_behind_is_left_with_its_pod() -> None:
    """Its command counts as running, so that nothing else would ever notice."""
    world = running_world()
    sidecar = world.live_sidecar(2)
    assert sidecar is not None
    world.undying.add(sidecar.pod)
    sidecar.trainer = replace(sidecar.trainer, stuck="SIGKILL does not end process 7")
    summary = world.recovered()
    assert summary["cause"] == "Stuck"
    assert sidecar.pod not in world.pods


# Commands that fail before their first step.


def test_worker_whose_command_fails_twice_on_a_node_before_its_first_step_moves_and_spends_no_restarts() -> (
    None
):
    """As where a GPU cannot be initialised."""
    world = running_world(max_restarts=2)
    node = world.home(2)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    world.bad_starts = {node}
    world.crash(2)
    world.until("Running", attempt=4)
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "StartFailed"
    assert "exit code 1" in summary["message"]
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


def test_worker_that_fails_wherever_it_is_moves_once_and_then_spends_its_restarts() -> None:
    """It is the script, which does something there that it does nowhere else."""
    world = World(make_spec(max_restarts=5))
    world.bad_starts = {2}
    world.until("Failed", limit=400)
    assert [action.incarnation for action in world.created if action.worker == 2] == [0, 1]
    assert world.status.counted == 5


def test_worker_that_is_one_of_several_that_fail_stays() -> None:
    world = World(make_spec(max_restarts=4))
    world.bad_starts = {1, 2}
    world.until("Failed", limit=400)
    assert len(world.created) == 4


def test_first_step_makes_forgotten_what_failed_before_it() -> None:
    world = running_world()
    world.bad_starts = {2}
    world.crash(1)
    while world.status.failed_start is None:
        world.tick()
    assert (world.status.failed_start.worker, world.status.failed_start.times) == (2, 1)
    world.bad_starts = set()
    world.recovered(3)
    world.train(4)
    world.crash(1)
    world.recovered(4)
    assert world.status.failed_start is None


def test_user_who_calls_an_exit_code_final_is_obeyed_and_no_pod_moves() -> None:
    final = FailureRule("final", RuleAction.FAIL, ExitCodes(frozenset({9})))
    world = World(make_spec(rules=(final,)))
    world.bad_starts = {2}
    while world.status.failed_start is None:
        world.tick()
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
    restoring = world.status.condition(conditions.RESTORING)
    assert restoring is not None
    assert restoring.reason == "HealthCheckFailed"
    return restoring.message


def test_worker_whose_node_fails_the_users_check_moves_before_anybody_has_started() -> None:
    world = running_world(health_check=CHECK, max_restarts=0)
    node = world.home(2)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    world.unhealthy = {node}
    world.evict(world.member(3))
    world.until("Running", attempt=3)
    assert world.starts.keys() == {1, 3}
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "HealthCheckFailed"
    assert "ended with exit code 3: no GPU" in summary["message"]
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


def test_check_that_fails_everywhere_moves_nobody_and_is_told_until_it_passes() -> None:
    world = running_world(health_check=CHECK)
    pods = set(world.pods)
    world.unhealthy = {0, 1, 2, 3}
    world.crash(1)
    world.train(60)
    said = told_while_all_stay(world, pods)
    assert "worker 0 (4 in all): failurePolicy.healthCheck (sh) ended with exit code 3" in said
    world.unhealthy = set()
    assert world.recovered()["cause"] == "TrainerCrash"


def test_worker_whose_check_fails_on_every_node_does_not_rush_from_one_to_the_next() -> None:
    world = running_world(health_check=CHECK)
    world.unhealthy = {2}
    world.crash(1)
    world.train(120)
    moves = len([action for action in world.created if action.worker == 2]) - 1
    assert 2 <= moves <= 12, "one in ten seconds at most"
    world.unhealthy = set()
    world.until("Running", attempt=2)


def test_worker_whose_memory_nobody_has_stays_however_its_check_ends() -> None:
    world = running_world(health_check=CHECK, copies=0)
    pods = set(world.pods)
    world.unhealthy = {world.home(2)}
    world.crash(1)
    world.train(60)
    told_while_all_stay(world, pods)


@settings(max_examples=examples(12), deadline=None)
@given(
    st.sets(st.sampled_from(["n00", "n01", "n10", "n11"]), min_size=1, max_size=3),
    st.dictionaries(st.integers(0, 60), st.integers(0, 6), max_size=4),
)
def test_whichever_nodes_are_unhealthy_the_job_trains_on_the_others(
    nodes: set[str], kills: dict[int, int]
) -> None:
    """That nobody starts on one of them, `World.started` asserts."""
    world = running_world(health_check=CHECK)
    world.unhealthy = {*nodes}
    world.crash(0)
    began = world.newest_step()
    world.until("Running", limit=400, attempt=2, kills=kills)
    assert world.status.phase == "Running"
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["step"] >= began - 4, "no memory was given up that nobody else had"
