"""Who trains is left alone, whatever is said of sidecars, kubelets and nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.kubelet_words import ended as has_ended
from tests.operator.kubelet_words import held_back, node, starting, trainer_view, up
from tests.operator.world_in_memory import World, make_spec, watched
from tiercheck_operator.controller.members.lost_nodes import why_lost
from tiercheck_operator.model.observed import Observation, PodView


def assert_trains_on(world: World, seconds: int) -> None:
    """Nobody is deleted, no attempt is spent, and steps are made."""
    attempt, step, members = world.status.attempt, world.newest_step(), set(world.pods)
    world.train(seconds)
    assert world.deleted == []
    assert set(world.pods) == members
    assert world.status.attempt == attempt
    assert world.newest_step() >= step + seconds - 1, "it trains"


def die_often(world: World, uid: str, times: int) -> None:
    """The pod's sidecar is killed so often, each time once its kubelet has started it again."""
    for _ in range(times):
        world.kill_sidecar(uid)
        world.tick_until(lambda: world.containers[uid].listening)


# Sidecars that start.


@pytest.fixture
def world() -> World:
    """A job of four that trains, on nodes of which Kubernetes notices a loss after 40 s."""
    return watched(node_grace=40)


def test_replacement_whose_sidecar_still_starts_is_waited_for(world: World) -> None:
    """On a busy node python takes longer than the 10 s after which a silent sidecar is given up while
    training stands still."""
    world.start_seconds = 25
    world.crash(0)  # the others' collectives broke, as they do when a pod is evicted
    world.evict(world.member(3))
    world.until("Running", attempt=2)
    assert world.deleted == []
    assert len(world.created) == 4 + 1, "one replacement, and it was given its time"


def test_first_pods_that_start_slowly_are_waited_for() -> None:
    world = World()
    world.start_seconds = 100
    world.until("Running", limit=150)
    assert world.deleted == []
    assert world.status.attempt == 1


def test_sidecar_that_has_never_answered_although_its_startup_probe_ran_out_is_replaced(world: World) -> None:
    world.start_seconds = 1e9
    world.evict(world.member(3))
    world.train(100)
    assert world.deleted == []
    world.start_seconds = 0.0
    world.until("Running", attempt=2)


# Sidecars that end.


def test_killed_sidecar_on_a_busy_node_is_waited_for_while_training_goes_on(world: World) -> None:
    uid = world.member(1)
    world.containers[uid].start_seconds = 30
    world.kill_sidecar(uid)
    assert_trains_on(world, 60)
    kept = world.committed
    world.train(5)
    assert world.committed != kept, "and what it does is kept again"


@pytest.mark.parametrize("deaths", [2, 3, 5, 8])
def test_sidecar_that_the_kubelet_holds_back_costs_no_step_however_often_it_died(deaths: int) -> None:
    world = watched(node_grace=40)
    uid = world.member(1)
    world.containers[uid].start_seconds = 3
    die_often(world, uid, deaths - 1)
    world.kill_sidecar(uid)
    back_off = min(300, 10 * 2 ** (deaths - 2))
    assert_trains_on(world, back_off + 15)
    assert world.listens(uid), "the kubelet has started it again"


def test_job_says_within_a_step_that_it_is_unprotected_and_how_long_the_kubelet_will_wait() -> None:
    world = watched(node_grace=40)
    uid = world.member(1)
    killed_twice(world, uid)
    world.train(1)
    assert world.told("Protected")[:2] == (False, "SidecarRestarting"), (
        "at once, before its kubelet has said for how long"
    )
    world.train(2)
    holds, reason, message = world.told("Protected")
    assert (holds, reason) == (False, "SidecarRestarting")
    assert "worker 1" in message
    assert "10 s" in message
    assert "Training goes on" in message
    assert "SidecarRestarting" in world.notices
    settled = message
    world.train(4)
    assert world.told("Protected")[2] == settled, "a status that changes every second would tell nothing more"
    world.train(15)
    assert world.told("Protected")[0], "made good"


def test_first_end_of_a_sidecar_is_told_while_it_starts_again() -> None:
    world = watched(node_grace=40, snapshot_every=20)
    uid = world.member(2)
    world.containers[uid].start_seconds = 6
    world.kill_sidecar(uid)
    reasons = []
    for _ in range(12):
        world.train(1)
        reasons.append(world.told("Protected")[1])
    assert reasons[0] == "SidecarRestarting"
    assert "SidecarRestarted" in reasons, "what it missed is told until a version is complete"


@pytest.mark.parametrize("how", ["closed", "hung"])
def test_sidecar_that_answers_nobody_is_told_and_left_alone_although_its_kubelet_calls_it_well(
    world: World, how: str
) -> None:
    setattr(world.sidecars[world.member(1)], how, True)
    assert_trains_on(world, 4)
    assert not world.told("Protected")[0]
    assert_trains_on(world, 120)
    world.assert_told("Protected", (False, "SidecarNotAnswering"), "worker 1")


def killed_twice(world: World, uid: str) -> None:
    """Its kubelet will hold it back."""
    world.kill_sidecar(uid)
    world.train(5)
    world.kill_sidecar(uid)


def test_sidecar_that_nobody_reaches_is_left_alone_as_long_as_training_makes_steps(world: World) -> None:
    """Its kubelet says that it is well, and no call gets through: the network of the pods is away, that of
    the trainers is not."""
    world.fabric = True
    node_3 = world.home(3)
    world.cut_off(node_3)
    assert_trains_on(world, 120)


def test_crash_while_a_sidecar_is_held_back_for_seconds_waits_for_it(world: World) -> None:
    uids = {world.member(worker) for worker in range(4)}
    killed_twice(world, world.member(1))
    world.train(3)
    world.recovered(crash=2)
    assert {world.member(worker) for worker in range(4)} == uids, "its memory is worth ten seconds"
    assert world.deleted == []


def long_held_back(world: World, uid: str) -> None:
    """The sidecar has died so often that its kubelet waits for minutes."""
    die_often(world, uid, 6)
    world.kill_sidecar(uid)
    world.train(5)
    assert world.pods[uid].sidecar.back_off >= 160


def test_crash_while_a_sidecar_is_held_back_for_minutes_replaces_its_pod_as_others_keep_what_it_held(
    world: World,
) -> None:
    uid, where = world.member(1), world.home(1)
    long_held_back(world, uid)
    world.crash(2)
    began = world.now
    world.until("Running", attempt=2)
    assert world.now - began < 30
    assert world.member(1) != uid
    assert where not in world.pods[world.member(1)].avoided, "its node is well"
    summary = world.summary
    assert summary["lostSteps"] <= 8
    assert "start" in summary["message"]


def test_crash_while_the_only_copy_is_held_back_for_minutes_waits_for_it() -> None:
    world = watched(node_grace=40, copies=0)
    uid = world.member(1)
    long_held_back(world, uid)
    world.crash(2)
    world.until("Running", limit=400, attempt=2)
    assert world.member(1) == uid
    assert world.deleted == []


def test_word_of_the_kubelet_that_comes_before_the_first_answer_is_no_reason_to_give_up(world: World) -> None:
    """`started` may be told before our next call gets through: the back-off before that is not held against
    it."""
    uid = world.member(1)
    killed_twice(world, uid)
    world.crash(2)
    world.sidecars[uid].closed = True  # for calls, a moment longer than for probes
    while not world.containers[uid].listening:
        world.train(1)
    world.train(3)
    world.sidecars[uid].closed = False
    world.until("Running", attempt=2)
    assert world.deleted == []


def test_host_that_dies_while_its_sidecar_is_held_back_is_left_in_seconds(world: World) -> None:
    uid = world.member(1)
    long_held_back(world, uid)
    died = world.now
    world.kill_node(world.home(1))
    world.until("Running", attempt=2)
    assert world.now - died < 20


# Nodes that are not ready.


def test_all_nodes_not_ready_while_every_sidecar_answers_costs_nothing(world: World) -> None:
    world.stop_kubelets()
    assert_trains_on(world, 115)
    assert all(each.lost for each in world.nodes.values())
    world.assert_told(
        "Placed",
        (True, "NodeNotReady"),
        "train on",
        "node is not ready (NodeStatusUnknown), and so it is with those of",
    )
    assert "NodeNotReady" in world.notices
    world.start_kubelets()
    world.train(2)
    assert world.told("Placed")[1] == "AllPlaced"


def test_placement_that_was_worth_less_before_such_an_outage_is_so_afterwards(world: World) -> None:
    world.nodes = {
        name: replace(each, labels={"kubernetes.io/hostname": name}) for name, each in world.nodes.items()
    }
    world.train(20)
    before = world.told("Placed")
    assert before[1] == "NodesUnlabelled"
    world.stop_kubelets()
    world.train(60)
    assert world.told("Placed")[1] == "NodeNotReady"
    world.start_kubelets()
    world.train(2)
    assert world.told("Placed") == before


def test_operator_that_restarts_in_such_an_outage_deletes_nobody_and_a_crash_restarts_in_place() -> None:
    world = watched(node_grace=40)
    world.stop_kubelets()
    world.train(60)
    for _ in range(5):
        world.forget()
        world.reconcile()
        world.train(3, attempt=1)
    world.recovered(crash=2)
    assert world.deleted == []


def test_node_whose_kubelet_has_stopped_for_good_is_told_avoided_and_left_when_kubernetes_evicts() -> None:
    world = watched(node_grace=40)
    node_3 = world.home(3)
    world.stop_kubelets(node_3)
    assert_trains_on(world, 300)
    assert node_3 in world.told("Placed")[2]
    world.evict(world.member(0))
    world.until("Running", attempt=2)
    assert world.home(0) != node_3
    old = world.member(3)
    assert world.pods[old].node == node_3
    world.evict(old)  # by the taint manager, after tolerationSeconds
    world.until("Running", attempt=3)
    assert world.home(3) != node_3
    assert [action for action in world.deleted if action.force] == [], "its kubelet ends it when it is back"


def silent_without_a_kubelet(world: World, seconds: float) -> tuple[Observation, PodView]:
    """What is seen when the sidecar of worker 3 has died so long ago, and the last step was made just
    before.
    """
    uid = world.member(3)
    world.stop_kubelets(world.home(3))
    world.train(60)
    seen = world.observe()
    reports = {each: replace(known, stepped_at=seen.now - seconds) for each, known in seen.reports.items()}
    reports[uid] = replace(reports[uid], silent_since=seen.now - seconds)
    return replace(seen, reports=reports), world.pods[uid]


def test_sidecar_that_dies_where_a_kubelet_has_stopped_costs_nothing_however_long_a_step_takes() -> None:
    seen, pod = silent_without_a_kubelet(watched(node_grace=40), 4.0)
    assert why_lost(seen, pod), "steps that took a second stopped four seconds ago"
    slow = replace(seen, job=replace(seen.job, status=replace(seen.job.status, step_seconds=3.0)))
    assert why_lost(slow, pod) == ""
    assert why_lost(replace(slow, now=slow.now + 30.0), pod), "it has stopped"


def test_sidecars_that_were_just_started_do_not_vouch_that_training_has_stopped() -> None:
    """All had died at once: those that are back first have not heard from their trainers yet."""
    seen, pod = silent_without_a_kubelet(watched(node_grace=40), 6.0)
    others = [
        replace(each, sidecar=replace(each.sidecar, since=seen.now - 1.0)) if each.uid != pod.uid else each
        for each in seen.pods
    ]
    back = replace(seen, pods=tuple(others))
    assert why_lost(seen, pod)
    assert why_lost(back, pod) == ""
    assert why_lost(replace(back, now=back.now + 5.0), pod)


def test_node_that_is_not_ready_and_silent_is_lost_without_waiting_for_an_eviction(world: World) -> None:
    world.heartbeats = False
    died = world.now
    world.kill_node(world.home(3))
    world.until("Running", attempt=2)
    assert world.now - died < 60
    assert world.summary["cause"] == "NodeLost"


def test_word_of_an_admin_that_a_node_is_out_of_service_is_decisive(world: World) -> None:
    name = world.home(3)
    labels = world.nodes[name].labels
    world.nodes[name] = node(name, labels, unready="Unknown", out_of_service=True)
    world.until("Running", attempt=2)
    assert world.home(3) != name


def test_nodes_that_are_all_not_ready_and_all_silent_are_not_given_up_because_it_may_be_us() -> None:
    world = watched(node_grace=40)
    for name in world.nodes:
        world.stop_kubelets(name)
        world.cut.add(frozenset((name, "controller")))
    world.train(200)
    assert world.deleted == []


def test_new_pod_on_the_first_node_to_turn_not_ready_after_an_outage_of_the_api_server_is_left() -> None:
    """Kubernetes marks all nodes in the same second, and watches tell of one after the other."""
    world = watched(node_grace=40)
    world.stop_kubelets()
    world.evict(world.member(3))
    world.train(17)
    new = world.pods[world.member(3)]
    assert new.node is not None
    assert new.ip is None
    world.nodes[new.node] = replace(world.nodes[new.node], lost="node is not ready (NodeStatusUnknown)")
    assert why_lost(world.observe(), new) == ""
    assert why_lost(replace(world.observe(), now=world.now + 60.0), new), "it lasts"


def test_node_that_dies_before_the_first_attempt_holds_nobody_up() -> None:
    world = World(make_spec(workers=2))
    world.heartbeats, world.node_grace, world.start_seconds = True, 40, 5
    world.train(3)
    name = world.home(1)
    world.kill_node(name)
    world.until("Running")
    assert world.home(1) != name


def test_trainer_that_ended_on_a_node_without_a_kubelet_is_brought_back_elsewhere(world: World) -> None:
    name = world.home(3)
    world.stop_kubelets(name)
    world.train(60)
    world.slow_trainers.add(3)  # its launcher is gone, and nobody starts it again
    world.crash(3)
    for _ in range(60):
        world.tick()
        if world.pods[world.member(3)].node not in (None, name):
            world.slow_trainers.clear()
    world.until("Running", attempt=2)
    assert world.home(3) != name


# A dead node that still says that nobody is there.


def test_node_whose_processes_are_all_dead_is_recognised_and_avoided_although_its_kernel_answers() -> None:
    world = watched(node_grace=40)
    name, died = world.home(3), world.now
    world.kill_processes(name)
    world.until("Running", attempt=2)
    assert world.now - died < 25, "Kubernetes has not noticed yet"
    assert not world.nodes[name].lost
    assert world.home(3) != name
    assert name in world.pods[world.member(3)].avoided
    assert "kubelet" in world.summary["message"]


def test_sidecar_that_was_killed_with_training_is_not_taken_for_a_dead_node(world: World) -> None:
    """Its kubelet speaks, so it lives."""
    uid = world.member(3)
    world.containers[uid].start_seconds = 40
    world.kill_sidecar(uid)
    world.recovered(crash=3)
    assert world.member(3) == uid
    assert world.deleted == []


# Kubelets that forget a container.


@pytest.mark.parametrize(("version", "seconds"), [("v1.35.2", 90), ("v1.35.0-gke.100", 90), ("v1.36.1", 900)])
def test_container_that_its_kubelet_never_starts_again_is_noticed_and_its_pod_replaced(
    world: World, version: str, seconds: int
) -> None:
    """kubernetes/kubernetes#136969: after a restart of the kubelet, trainers that end stay ended beside a
    sidecar that runs."""
    uid, name = world.member(1), world.home(1)
    world.nodes[name] = node(name, world.nodes[name].labels, kubelet=version)
    world.slow_trainers.add(1)
    world.crash(1, code=137, reason="ContainerRestarted")
    forgotten = replace(trainer_view(has_ended(world.now, "trainer")), since=world.now)
    world.change_pod(uid, trainer=forgotten)
    world.train(50)
    assert world.member(1) == uid, "another kubelet takes so long, too"
    for _ in range(seconds):
        world.tick()
        if world.member(1) != uid:
            world.slow_trainers.clear()
    world.until("Running")
    assert world.member(1) != uid
    told = " ".join(entry["message"] for entry in world.status.recoveries)
    assert version in told
    assert ("#136969" in told) is version.startswith("v1.35.")


def test_trainer_that_ended_well_or_is_held_back_is_not_one_that_was_forgotten(world: World) -> None:
    uid, name = world.member(1), world.home(1)
    world.nodes[name] = node(name, world.nodes[name].labels, kubelet="v1.35.1")
    for status in (
        has_ended(world.now, "trainer", code=0, reason="Completed"),
        held_back(world.now, 300, "trainer"),
        starting(world.now, "trainer", restarts=1),
        up(world.now, "trainer"),
    ):
        world.change_pod(uid, trainer=replace(trainer_view(status), since=world.now))
        assert_trains_on(world, 100)
    never = replace(trainer_view(has_ended(world.now, "trainer"), policy="Never"), since=world.now)
    world.change_pod(uid, trainer=never)
    assert_trains_on(world, 100)


def test_spare_whose_sidecar_is_held_back_is_kept() -> None:
    world = watched(node_grace=40, spares=1)
    world.train(10)
    spare = next(uid for uid, pod in world.pods.items() if pod.is_spare)
    for _ in range(5):
        world.kill_sidecar(spare)
        world.train(90)
    assert spare in world.pods
    assert world.deleted == []
