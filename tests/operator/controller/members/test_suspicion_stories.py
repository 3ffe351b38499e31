"""When the network lies or Kubernetes is slow, nothing that trains is deleted."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.kubelet_words import ended, held_back, node, not_made, sidecar_view, starting, up
from tests.operator.world_in_memory import REMOTE, World, make_spec, trained, watched
from tiercheck.protocol.report import ConnectionFailure, Unreachable
from tiercheck_operator.controller.decide import decide
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.actions import CreatePod, DeletePod, ProbeSidecar
from tiercheck_operator.model.observed import ContainerView, HostProbe, NodeView, Observation, WorkerReport


@pytest.fixture
def world() -> World:
    """A job of four that trains, whose sidecars say whom they miss."""
    return watched()


@pytest.mark.parametrize("rack", [False, True])
def test_dead_node_or_rack_is_left_in_seconds_because_its_peers_miss_it(world: World, rack: bool) -> None:
    dead, died = {"n10", "n11"} if rack else {world.home(3)}, world.now
    for name in dead:
        world.kill_node(name)
    summary = world.recovered_from("DomainLost" if rack else "NodeSilent")
    assert world.now - died < 20, "Kubernetes would have needed 50 + 300 s, and has not noticed yet"
    assert not any(world.nodes[node].lost for node in dead)
    assert not {world.home(worker) for worker in range(4)} & dead
    assert rack or "no answer from its host" in summary["message"]
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


@pytest.mark.parametrize("seconds", range(1, 12))
def test_rack_whose_nodes_die_one_after_the_other_keeps_no_new_pod(world: World, seconds: int) -> None:
    """A pod that was put onto the node that died next would wait there until Kubernetes notices."""
    first, second = "n10", "n11"
    world.liked = second
    world.kill_node(first)
    world.train(seconds)
    world.kill_node(second)
    world.train(35)
    assert (world.status.phase, world.status.recovery) == ("Running", None)
    assert not {world.home(worker) for worker in range(4)} & {first, second}


@pytest.mark.parametrize("told_by", ["us", "a peer"])
def test_new_pod_stays_away_from_a_node_that_has_just_fallen_silent(
    world: World, told_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node of a dead rack is given up a moment before the other. Nobody but us knows of that one yet."""
    first, second = "n10", "n11"
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
        missed = Unreachable(quiet.worker, quiet.address, world.now - 1.0, ConnectionFailure.SILENT)
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
    world.running()
    empty = next(name for name in world.nodes if name not in {world.home(0), world.home(1)})
    world.liked = empty
    world.kill_node(empty)
    world.kill_node(world.home(1))
    world.train(80)
    assert (world.status.phase, world.status.recovery) == ("Running", None)
    assert world.home(1) != empty


def test_kubelet_that_renews_its_lease_is_late_and_not_dead() -> None:
    """As after an outage of the API server, when it lists pods again only after its own back-off."""
    world = watched(workers=2)
    late = next(name for name in world.nodes if name not in {world.home(0), world.home(1)})
    world.liked = late
    world.stopped_kubelets[late], world.node_grace = world.now, 1e9
    world.end_gracefully(world.member(1))
    for _ in range(60):
        world.kubelets = {late: world.now}
        world.tick()
    assert len([action for action in world.created if action.worker == 1]) == 2
    world.start_kubelets(late)
    world.until("Running", attempt=2)
    assert world.home(1) == late
    world.evict(world.member(1))
    world.stopped_kubelets[late] = world.now
    world.kubelets = {late: world.now}
    world.train(60)
    assert world.home(1) != late, "it is heard of no more"


def test_pod_whose_sandbox_is_made_anew_is_left_alone_although_nobody_hears_of_its_host(world: World) -> None:
    pods, uid, node = set(world.pods), world.member(3), world.home(3)
    world.cut_off(node)
    world.train(1)
    world.change_pod(uid, remade_since=world.now)
    world.train(60)
    assert set(world.pods) == pods
    world.cut.clear()
    world.change_pod(uid, remade_since=None)
    world.train(10)
    assert (set(world.pods), world.status.phase) == (pods, "Running")


def test_accused_pod_is_asked_at_once(world: World) -> None:
    """Its long poll, which is under way, would notice its death only seconds later."""
    node, uid = world.home(3), world.member(3)
    world.cut_off(node, *(set(world.nodes) - {node}))
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


def test_link_between_controller_and_one_node_moves_nobody_for_a_minute(world: World) -> None:
    pods, node = set(world.pods), world.home(2)
    world.cut_off(node, "controller")
    world.train(55)
    assert set(world.pods) == pods
    assert world.status.attempt == 1
    world.cut.clear()
    world.train(30)
    assert set(world.pods) == pods, "the silence is over and forgotten"


def test_node_that_answers_us_but_no_peer_is_left_after_a_while(world: World) -> None:
    node = world.home(3)
    world.cut_off(node, *(set(world.nodes) - {node}))
    world.train(20, attempt=1)
    world.until("Running", attempt=2)
    assert world.home(3) != node
    assert "cut off" in world.summary["message"]


@pytest.mark.parametrize("heard", [True, False])
def test_network_that_falls_into_halves_never_costs_both(heard: bool) -> None:
    world = watched(remote=REMOTE)
    left, right = ["n00", "n01"], ["n10", "n11"]
    for name in left:
        world.cut_off(name, *right)
    if not heard:
        for node in right:
            world.cut_off(node, "controller")
    survivors = {uid for uid, pod in world.pods.items() if pod.node in left}
    before = set(world.pods)
    world.train(40)
    if heard:
        assert set(world.pods) == before, "nobody can tell which half is ill, so nobody is moved"
    else:
        assert survivors <= set(world.pods), "the half that answers is kept"
        world.until("Running", attempt=2)


def test_sidecar_that_is_started_again_keeps_its_pod(world: World) -> None:
    uid = world.member(1)
    world.sidecars[uid].closed = True
    world.train(8)
    world.sidecars[uid].closed = False
    world.train(20)
    assert world.member(1) == uid
    assert world.status.attempt == 1


def test_sidecar_that_hangs_when_the_way_back_needs_it_is_replaced_and_its_node_is_not_blamed() -> None:
    world = watched()
    uid, node = world.member(1), world.home(1)
    world.sidecars[uid].hung = True
    world.train(60)
    assert world.member(1) == uid, "training went on"
    world.recovered(crash=2)
    pod = world.pods[world.member(1)]
    assert pod.uid != uid
    assert node not in pod.avoided
    assert world.summary["cause"] == "SidecarSilent"


def test_flapping_link_moves_nobody(world: World) -> None:
    pods, node = set(world.pods), world.home(3)
    for _ in range(30):
        world.cut_off(node)
        world.train(2)
        world.cut.clear()
        world.train(2)
    assert set(world.pods) == pods
    assert world.status.attempt == 1


def test_node_that_one_job_had_to_leave_is_shunned_by_the_others(world: World) -> None:
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


WORKERS = 4
SECONDS = st.sampled_from([0.0, 1.0, 3.0, 9.0, 11.0, 59.0, 61.0, 149.0, 400.0, 1e5])
SOME = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def trains() -> Observation:
    """Four workers on four nodes, in the middle of healthy training."""
    world = trained()
    return world.observe()


@functools.cache
def comes_back() -> Observation:
    """The same after a crash, before the next attempt."""
    world = trained()
    world.crash(2)
    world.tick()
    return world.observe()


def deleted(obs: Observation) -> list[str]:
    decision = decide(obs)
    return [action.name for action in (*decision.before, *decision.after) if isinstance(action, DeletePod)]


@st.composite
def sidecars(draw: st.DrawFn) -> ContainerView:
    """Any word of a kubelet about the sidecar of a pod that trains, new or old."""
    now, ago, heard, restarts = trains().now, draw(SECONDS), draw(SECONDS), draw(st.integers(1, 9))
    back_off = draw(st.sampled_from([10, 20, 40, 80, 160, 300]))
    status = draw(
        st.sampled_from(
            [
                up(now - ago),
                up(now - ago, restarts=restarts),
                starting(now - ago),
                starting(now - ago, restarts=restarts),
                ended(now - ago, restarts=restarts),
                ended(now - ago, reason="OOMKilled"),
                held_back(now - ago, back_off, restarts=restarts),
                not_made(reason="ContainerCreating"),
                not_made(reason="ImagePullBackOff"),
            ]
        )
    )
    return replace(sidecar_view(status), since=now - heard)


@st.composite
def nodes(draw: st.DrawFn) -> Mapping[str, NodeView]:
    """Any of them ready or not."""
    unready = st.sampled_from(["", "Unknown", "False"])
    return {name: node(name, view.labels, unready=draw(unready)) for name, view in trains().nodes.items()}


@st.composite
def silences(draw: st.DrawFn, known: WorkerReport) -> WorkerReport:
    since = trains().now - draw(SECONDS)
    return replace(known, silent_since=since, host=draw(st.sampled_from(HostProbe)))


@st.composite
def scenes(draw: st.DrawFn, stepped: st.SearchStrategy[float]) -> Observation:
    """Any sidecars silent but one, heard or not heard by peers, with any words of their kubelets;
    `stepped`: seconds since the last step."""
    obs = trains()
    quiet = draw(st.sets(st.integers(0, WORKERS - 1), max_size=WORKERS - 1))
    pods = tuple(replace(pod, sidecar=draw(sidecars())) for pod in obs.pods)
    reports = {}
    for pod in pods:
        known = replace(obs.reports[pod.uid], stepped_at=obs.now - draw(stepped))
        assert known.report is not None
        if pod.worker in quiet:
            reports[pod.uid] = draw(silences(known))
            continue
        missed = tuple(
            Unreachable(
                other.worker,
                other.ip or "",
                obs.now - draw(SECONDS),
                draw(st.sampled_from(ConnectionFailure)),
            )
            for other in pods
            if other.worker in quiet and draw(st.booleans())
        )
        reports[pod.uid] = replace(known, report=replace(known.report, unreachable=missed))
    return replace(obs, pods=pods, reports=reports, nodes=draw(nodes()))


@SOME
@given(scenes(st.floats(0, 1)))
def test_pod_whose_trainer_runs_and_whose_peers_step_is_never_deleted_whatever_kubelets_report(
    obs: Observation,
) -> None:
    assert deleted(obs) == []


@SOME
@given(nodes(), st.lists(sidecars(), min_size=WORKERS, max_size=WORKERS), st.booleans())
def test_whatever_nodes_turn_not_ready_nothing_is_deleted_while_sidecars_answer(
    found: Mapping[str, NodeView], said: list[ContainerView], training: bool
) -> None:
    obs = trains() if training else comes_back()
    pods = tuple(replace(pod, sidecar=view) for pod, view in zip(obs.pods, said, strict=True))
    assert deleted(replace(obs, nodes=found, pods=pods)) == []


@SOME
@given(scenes(SECONDS), SECONDS)
def test_operator_that_hears_nobody_deletes_nobody(obs: Observation, silent: float) -> None:
    reports = {uid: replace(known, silent_since=obs.now - silent) for uid, known in obs.reports.items()}
    assert deleted(replace(obs, reports=reports)) == []


@SOME
@given(scenes(SECONDS), st.data())
def test_operator_that_has_just_started_deletes_nobody(obs: Observation, data: st.DataObject) -> None:
    """It has asked nobody yet, or some, who have answered."""
    unasked = data.draw(st.sets(st.sampled_from(sorted(obs.reports)), min_size=1))
    reports = {
        uid: WorkerReport(None, None, None) if uid in unasked else trains().reports[uid]
        for uid in obs.reports
    }
    assert deleted(replace(obs, reports=reports)) == []


@SOME
@given(sidecars(), nodes(), SECONDS.filter(lambda seconds: seconds > 2))
def test_host_that_neither_peers_nor_we_hear_is_left_whatever_its_kubelet_said_last(
    said: ContainerView, found: Mapping[str, NodeView], silent: float
) -> None:
    obs = trains()
    dead = next(pod for pod in obs.pods if pod.worker == 1)
    if said.state.value in ("Up", "Starting", "Unborn"):
        said = replace(said, since=obs.now - 1e6)  # told while it lived
    pods = tuple(replace(pod, sidecar=said) if pod is dead else pod for pod in obs.pods)
    reports = {}
    for pod in pods:
        known = obs.reports[pod.uid]
        assert known.report is not None
        missed = (Unreachable(1, dead.ip or "", obs.now - silent - 3, ConnectionFailure.SILENT),)
        gone = replace(known, silent_since=obs.now - silent, stepped_at=obs.now - silent - 1)
        here = replace(
            known, report=replace(known.report, unreachable=missed), stepped_at=obs.now - silent - 1
        )
        reports[pod.uid] = gone if pod.uid == dead.uid else here
    assert deleted(replace(obs, pods=pods, reports=reports, nodes=found)) == [dead.name]
