"""When the network lies or Kubernetes is slow, it takes seconds, and never too much goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck.protocol.report import Break, Unreachable
from tiercheck_operator.controller.decide import decide
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.actions import CreatePod, ProbeSidecar


def trained(**changes: object) -> World:
    """Four workers on four nodes in two racks, whose sidecars hear each other's heartbeat; Kubernetes notices
    nothing by itself."""
    world = World(make_spec(**changes))
    world.heartbeats = True
    world.node_grace = 1e9
    world.until("Running")
    world.train(9)
    return world


def cut_off(world: World, node: str, *others: str) -> None:
    world.cut |= {frozenset((node, other)) for other in others}


def test_dead_node_is_left_in_seconds_because_its_peers_miss_it() -> None:
    world = trained()
    node = world.home(3)
    died = world.now
    world.kill_node(node)
    world.until("Running", attempt=2)
    assert world.now - died < 20, "Kubernetes would have needed 50 + 300 s, and has not noticed yet"
    assert not world.nodes[node].lost
    assert world.home(3) != node
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "NodeSilent"
    assert "nothing from its host" in summary["message"]
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


def test_dead_rack_is_left_in_seconds_too() -> None:
    world = trained()
    racks: dict[str, set[str]] = {}
    for node in world.nodes.values():
        racks.setdefault(node.labels["topology.kubernetes.io/rack"], set()).add(node.name)
    dead = racks["r1"]
    died = world.now
    for node in dead:
        world.kill_node(node)
    world.until("Running", attempt=2)
    assert world.now - died < 20
    assert not {world.home(worker) for worker in range(4)} & dead


@pytest.mark.parametrize("seconds", range(1, 12))
def test_rack_whose_nodes_die_one_after_the_other_keeps_no_new_pod(seconds: int) -> None:
    """A pod that was put onto the node that died next would wait there until Kubernetes notices."""
    world = trained()
    first, second = sorted(
        name for name, node in world.nodes.items() if node.labels["topology.kubernetes.io/rack"] == "r1"
    )
    world.liked = second
    world.kill_node(first)
    world.train(seconds)
    world.kill_node(second)
    world.train(35)
    assert (world.status.phase, world.status.recovery) == ("Running", None)
    assert not {world.home(worker) for worker in range(4)} & {first, second}


@pytest.mark.parametrize("told_by", ["us", "a peer"])
def test_new_pod_stays_away_from_a_node_that_has_just_fallen_silent(
    told_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node of a dead rack is given up a moment before the other. Nobody but us knows of that one yet."""
    world = trained()
    first, second = sorted(
        name for name, node in world.nodes.items() if node.labels["topology.kubernetes.io/rack"] == "r1"
    )
    world.kill_node(first)
    monkeypatch.setattr(world, "reconcile", lambda killed_after=None: None)  # what follows is decided below
    while first not in {place.node for place in Situation.of(world.observe()).places}:
        world.tick()
    seen, quiet = world.observe(), next(pod for pod in world.pods.values() if pod.node == second)
    reports = dict(seen.reports)
    if told_by == "us":
        reports[quiet.uid] = replace(reports[quiet.uid], silent_since=world.now - 0.3)
    else:
        survivor = next(pod for pod in world.pods.values() if pod.node not in {first, second})
        missed = Unreachable(quiet.worker, quiet.address, world.now - 1.0, Break.SILENT)
        heard = reports[survivor.uid]
        assert heard.report is not None
        reports[survivor.uid] = replace(
            heard, report=replace(heard.report, unreachable=(missed, *heard.report.unreachable))
        )
    made = [each for each in decide(replace(seen, reports=reports)).before if isinstance(each, CreatePod)]
    assert [(each.avoid, each.unwelcome) for each in made] == [((first,), (first, second))]


def test_new_pod_on_a_dead_node_that_nobody_could_tell_of_goes_elsewhere() -> None:
    """The job had no pod there, and Kubernetes has not noticed."""
    world = World(make_spec(workers=2))
    world.heartbeats, world.node_grace = True, 1e9
    world.until("Running")
    world.train(9)
    empty = next(name for name in world.nodes if name not in {world.home(0), world.home(1)})
    world.liked = empty
    world.kill_node(empty)
    world.kill_node(world.home(1))
    world.train(80)
    assert (world.status.phase, world.status.recovery) == ("Running", None)
    assert world.home(1) != empty


def test_kubelet_that_renews_its_lease_is_late_and_not_dead() -> None:
    """As after an outage of the API server, when it lists pods again only after its own back-off."""
    world = World(make_spec(workers=2))
    world.until("Running")
    world.train(9)
    late = next(name for name in world.nodes if name not in {world.home(0), world.home(1)})
    world.liked = late
    world.stopped_kubelets[late], world.node_grace = world.now, 1e9
    world.end_gracefully(world.member(1))
    for _ in range(60):
        world.kubelets = {late: world.now}
        world.tick()
    assert len([action for action in world.created if action.worker == 1]) == 2
    world.start_kubelet(late)
    world.until("Running", attempt=2)
    assert world.home(1) == late
    world.evict(world.member(1))
    world.stopped_kubelets[late] = world.now
    world.kubelets = {late: world.now}
    world.train(60)
    assert world.home(1) != late, "it is heard of no more"


def test_pod_whose_sandbox_is_made_anew_is_left_alone_although_nobody_hears_of_its_host() -> None:
    world = trained()
    pods, uid, node = set(world.pods), world.member(3), world.home(3)
    cut_off(world, node, *(set(world.nodes) - {node}), "controller")
    world.train(1)
    world.pods[uid] = replace(world.pods[uid], remade_since=world.now)
    world.train(60)
    assert set(world.pods) == pods
    world.cut.clear()
    world.pods[uid] = replace(world.pods[uid], remade_since=None)
    world.train(10)
    assert (set(world.pods), world.status.phase) == (pods, "Running")


def test_accused_pod_is_asked_at_once() -> None:
    """Its long poll, which is under way, would notice its death only seconds later."""
    world = trained()
    node, uid = world.home(3), world.member(3)
    cut_off(world, node, *(set(world.nodes) - {node}))
    world.train(6)
    seen = world.observe()
    known = seen.reports[uid]
    long_ago = replace(known, answered_at=world.now - 4)
    asked = decide(replace(seen, reports={**seen.reports, uid: long_ago}))
    assert ProbeSidecar(uid) in asked.after
    assert asked.wake_after is not None
    assert asked.wake_after <= 1
    world.cut.clear()
    world.train(5)
    assert not [action for action in world.last.after if isinstance(action, ProbeSidecar)], (
        "nobody is accused any more"
    )


def test_link_between_controller_and_one_node_moves_nobody_for_a_minute() -> None:
    world = trained()
    pods, node = set(world.pods), world.home(2)
    cut_off(world, node, "controller")
    world.train(55)
    assert set(world.pods) == pods
    assert world.status.attempt == 1
    world.cut.clear()
    world.train(30)
    assert set(world.pods) == pods, "the silence is over and forgotten"


def test_node_that_answers_us_but_no_peer_is_left_after_a_while() -> None:
    world = trained()
    node = world.home(3)
    cut_off(world, node, *(set(world.nodes) - {node}))
    world.train(20)
    assert world.status.attempt == 1
    world.train(20)
    world.until("Running", attempt=2)
    assert world.home(3) != node
    assert world.status.last_recovery is not None
    assert "cut off" in world.status.last_recovery["message"]


@pytest.mark.parametrize("heard", [True, False])
def test_network_that_falls_into_halves_never_costs_both(heard: bool) -> None:
    world = trained(remote=REMOTE)
    left, right = ["n00", "n01"], ["n10", "n11"]
    for node in left:
        cut_off(world, node, *right)
    if not heard:
        for node in right:
            cut_off(world, node, "controller")
    survivors = {uid for uid, pod in world.pods.items() if pod.node in left}
    before = set(world.pods)
    world.train(40)
    if heard:
        assert set(world.pods) == before, "nobody can tell which half is ill, so nobody is moved"
    else:
        assert survivors <= set(world.pods), "the half that answers is kept"
        world.until("Running", attempt=2)


def test_sidecar_that_is_started_again_keeps_its_pod() -> None:
    world = trained()
    uid = world.member(1)
    world.sidecars[uid].closed = True
    world.train(8)
    world.sidecars[uid].closed = False
    world.train(20)
    assert world.member(1) == uid
    assert world.status.attempt == 1


def test_sidecar_that_hangs_when_the_way_back_needs_it_is_replaced_and_its_node_is_not_blamed() -> None:
    world = trained()
    uid, node = world.member(1), world.home(1)
    world.sidecars[uid].hung = True
    world.train(60)
    assert world.member(1) == uid, "training went on"
    world.crash(2)
    world.until("Running", attempt=2)
    pod = world.pods[world.member(1)]
    assert pod.uid != uid
    assert node not in pod.avoided
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["cause"] == "SidecarSilent"


def test_flapping_link_moves_nobody() -> None:
    world = trained()
    pods, node = set(world.pods), world.home(3)
    others = [*(set(world.nodes) - {node}), "controller"]
    for _ in range(30):
        cut_off(world, node, *others)
        world.train(2)
        world.cut.clear()
        world.train(2)
    assert set(world.pods) == pods
    assert world.status.attempt == 1


def test_node_that_one_job_had_to_leave_is_shunned_by_the_others() -> None:
    world = trained()
    node = world.home(3)
    world.kill_node(node)
    world.train(20)
    known = frozenset(place.node for place in world.status.places)
    assert known == {node}, "it, and no other"
    other = World(make_spec())
    other.tick()
    (first, *_) = [
        action
        for action in decide(replace(other.observe(), pods=(), unwelcome=known)).before
        if isinstance(action, CreatePod)
    ]
    assert first.unwelcome == (node,)
    assert first.avoid == (), "where nothing else has room, the node is used"
