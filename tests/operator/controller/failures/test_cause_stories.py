"""The cause of a recovery is what struck first, never what followed from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.world_in_memory import REMOTE, World, make_spec, watched
from tiercheck.protocol.report import RankFailure, TrainerState


def failed(world: World, worker: int, at: float, code: int, *said: str, reason: str = "") -> None:
    """The worker's training command ended at that time. `said`: reason and sentence of one of its ranks."""
    sidecar = world.sidecar(worker)
    failure = RankFailure(worker, said[0], said[1], 1) if said else None
    reason = reason or ("Signalled" if code > 128 else "Crashed")
    message = f"The training command ended with exit code {code}."
    sidecar.trainer = replace(
        sidecar.trainer, state=TrainerState.FAILED, exit_code=code, reason=reason, message=message,
        ended_at=at, failure=failure
    )  # fmt: skip


def echoed(world: World, *but: int) -> None:
    """The peers' collectives broke."""
    for worker in {0, 1, 2, 3} - {*but}:
        failed(world, worker, world.now + 1, 1, "CollectiveFailed", RESET)


# What a pod's end looks like on a real kubelet.


@pytest.fixture
def world() -> World:
    """A job of four that trains, whose sidecars say whom they miss."""
    return watched()


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
@pytest.mark.parametrize("grace", [1.0, 2.0, 8.0])
def test_pod_that_somebody_deleted_is_told_as_deleted_however_its_containers_ended(
    world: World, phase: str, grace: float
) -> None:
    world.ends_as, world.grace = phase, grace
    world.end_gracefully(world.member(1))
    summary = world.recovered_from("PodDeleted")
    assert "no reason given" not in summary["message"]
    assert "PodFailed" not in world.notices


OWN_LIMITS = (
    "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi. ",
    'Container trainer exceeded its local ephemeral storage limit "20Mi". ',
    'Usage of EmptyDir volume "scratch" exceeds the limit "20Mi". ',
)


@pytest.mark.parametrize("said", OWN_LIMITS)
def test_pod_that_is_evicted_for_its_own_storage_limit_spends_restarts_until_the_job_is_given_up(
    said: str,
) -> None:
    world = World(make_spec(max_restarts=2), nodes_per_rack=3)
    for attempt in (1, 2, 3):
        world.until("Running", attempt=attempt)
        assert world.status.counted == attempt - 1
        world.train(9)
        uid = world.member(1)
        world.change_pod(uid, phase="Failed", disruption="Evicted", message=said)
        world._vanish(uid)
    world.until("Failed")
    world.assert_told("Failed", "MaxRestartsExceeded", said.strip().rstrip("."))
    assert not world.status.places


@pytest.mark.parametrize(
    "said",
    [
        "The node was low on resource: ephemeral-storage. Container trainer was using 60Mi, request is 0. ",
        'Usage of EmptyDir volume "tiercheck-memory" exceeds the limit "1Gi". ',
    ],
)
def test_eviction_that_is_not_the_pods_own_doing_spends_none(world: World, said: str) -> None:
    uid = world.member(1)
    world.change_pod(uid, phase="Failed", disruption="Evicted", message=said)
    world._vanish(uid)
    assert world.recovered()["cause"] == "PodEvicted"
    assert world.status.counted == 0


def test_drain_that_ends_with_the_node_switched_off_was_a_drain(world: World) -> None:
    node = world.home(1)
    world.change_nodes(schedulable=False)
    world.evict(world.member(1))
    world.train(5)
    world.change_nodes(node, lost="node is not ready (NodeStatusUnknown)")
    world.train(5)
    world.change_nodes(schedulable=True)
    assert world.recovered()["cause"] == "PodEvicted"


def test_operator_that_was_killed_after_it_gave_a_pod_up_still_knows_why() -> None:
    """The deletion is done before the status is written."""
    for moment in range(12):
        world = watched()
        world.cut_off(world.home(3))
        while not world.deleted:
            world.tick(killed_after=moment if world.now > 0 else None)
            if world.now > 1_800_000_100:
                break
        if world.deleted:
            assert world.recovered()["cause"] == "NodeSilent", f"killed after {moment} actions"


CONSEQUENCES = ("not ready", "echo", "operator", "gone", "slow", "succeeded", "quick")


def strike(world: World, first: str, worker: int) -> str:
    """One failure of a worker's pod; its cause."""
    match first:
        case "deleted":
            world.end_gracefully(world.member(worker))
            return "PodDeleted"
        case "evicted":
            world.evict(world.member(worker))
            return "PodEvicted"
        case "failed":
            uid = world.member(worker)
            world.change_pod(uid, phase="Failed", disruption="UnexpectedAdmissionError")
            return "PodFailed"
        case "cut":
            world.cut_off(world.home(worker))
            return "NodeSilent"
        case "gpu":
            failed(
                world, worker, world.now, 1, "GPUFault", "RuntimeError: CUDA error: uncorrectable ECC error"
            )
            return "GPUFault"
    raise AssertionError(first)


@settings(max_examples=examples(60), deadline=None)
@example("evicted", 1, [])
@example("failed", 1, [])
@example("cut", 3, [("quick", 0)])  # its kubelet is well: what we delete turns Failed there
@given(
    first=st.sampled_from(["deleted", "evicted", "failed", "cut", "gpu"]),
    worker=st.integers(1, 3),
    after=st.lists(st.tuples(st.sampled_from(CONSEQUENCES), st.integers(0, 3)), max_size=6),
)
def test_whatever_the_order_in_which_consequences_are_seen_the_cause_told_is_the_first_ones(
    first: str, worker: int, after: list[tuple[str, int]]
) -> None:
    world = watched()
    uid, node = world.member(worker), world.home(worker)
    for what, _ in after:
        world.ends_as = {"succeeded": "Succeeded"}.get(what, world.ends_as)
        world.grace = {"slow": 20.0, "quick": 1.5}.get(what, world.grace)
    cause = strike(world, first, worker)
    while world.status.recovery is None or world.status.recovery.cause == "TrainerCrash":
        world.tick()
    for what, wait in after:
        if world.status.attempt > 1:
            break  # what happens now happens to the next attempt
        match what:
            case "not ready" if cause != "NodeSilent":
                world.change_nodes(node, lost="node is not ready (NodeStatusUnknown)")
            case "echo":
                for other in range(4):
                    world.crash(other)
            case "operator":
                world.forget()
            case "gone" if uid in world.pods and world.pods[uid].deleting:
                world._gone(uid)
        world.train(wait if world.status.attempt == 1 else 0)
    summary = world.recovered_from(cause, *(["UnexpectedAdmissionError"] if first == "failed" else []))
    assert "no reason given" not in summary["message"]
    assert world.notices.count(cause) == 1
    assert {"PodDeleted", "PodEvicted", "PodFailed", "NodeSilent", "NodeLost", "GPUFault"} & set(
        world.notices
    ) == {cause}


def test_nodes_of_a_rack_that_fall_silent_one_after_the_other_are_told_as_the_rack(world: World) -> None:
    for name in ("n10", "n11"):
        world.kill_node(name)
        world.train(1)
    world.tick_until(lambda: not (world.status.recovery is None or not world.deleted))
    assert world.recovered()["cause"] == "DomainLost"


# Old pods.


@settings(max_examples=examples(30), deadline=None)
@given(
    left=st.lists(st.sampled_from(["deleted", "cut", "evicted"]), min_size=1, max_size=2),
    then=st.sampled_from(["all", "crash", "deleted", "node"]),
)
def test_whatever_old_pods_are_terminating_they_are_blamed_for_nothing(left: list[str], then: str) -> None:
    world = watched(remote=REMOTE)
    world.grace = 1e6
    old = []
    for attempt, how in enumerate(left, start=2):
        uid = world.member(attempt)
        old.append(world.pods[uid].name)
        strike(world, how, attempt)
        world.recovered(attempt)
        world.cut.clear()
        world.train(120)
    struck = world.now
    match then:
        case "all":
            for uid in [uid for uid, pod in world.pods.items() if not pod.deleting]:
                world._gone(uid)
        case "crash":
            world.crash(0, code=139)
        case "deleted":
            world._gone(world.member(len(left) + 1))
        case "node":
            node = world.home(len(left) + 1)
            world.kill_node(node)
            world.change_nodes(node, lost="node is not ready (NodeStatusUnknown)")
    summary = world.recovered(world.status.attempt + 1)
    assert not [name for name in old if name in summary["message"]], summary["message"]
    assert summary["detectSeconds"] < 10
    assert summary["totalSeconds"] <= world.now - struck
    wanted = {
        "all": "AllPodsLost",
        "crash": "TrainerCrash",
        "deleted": "PodDeleted",
        "node": "NodeLost NodeSilent",
    }
    assert summary["cause"] in wanted[then].split()


def test_second_failure_on_the_way_back_does_not_make_the_first_one_look_noticed_late(world: World) -> None:
    world.end_gracefully(world.member(1))
    world.slow_trainers.add(1)
    world.train(40, attempt=2)
    assert world.status.recovery is not None
    world.end_gracefully(world.member(2))
    world.slow_trainers.clear()
    summary = world.recovered(3)
    assert summary["detectSeconds"] < 5
    assert summary["totalSeconds"] >= 40, "training was away since the first one"
    assert summary["detectSeconds"] + summary["restoreSeconds"] <= summary["totalSeconds"]


def test_job_on_a_lost_node_is_down_since_its_sidecar_fell_silent(world: World) -> None:
    node, struck = world.home(1), world.now
    world.kill_node(node)
    world.train(3)
    assert world.status.recovery is None, "silence alone is not enough yet"
    world.change_nodes(node, lost="node is not ready (NodeStatusUnknown)")
    summary = world.recovered_from("NodeLost")
    assert 1 <= summary["detectSeconds"] <= world.now - struck
    assert summary["totalSeconds"] <= world.now - struck


def test_steps_that_a_job_made_beside_a_silent_sidecar_are_no_time_down(world: World) -> None:
    node, uid = world.home(1), world.member(1)
    for _ in range(4):  # the kubelet holds it back for longer each time
        world.kill_sidecar(uid)
        world.train(12)
    world.kill_sidecar(uid)
    world.train(25)
    known = world.observe().reports[uid]
    assert known.silent_since is not None
    assert world.now - known.silent_since > 20
    assert world.status.attempt == 1
    world.kill_node(node)
    world.tick()
    world.change_nodes(node, lost="node is not ready (NodeStatusUnknown)")
    assert world.recovered()["detectSeconds"] < 10


# Who fell first.


RESET = "RuntimeError: [gloo/tcp/pair.cc:589] Read error [10.0.0.7]:6301: Connection reset by peer"


def test_rank_that_was_killed_is_blamed_before_the_peer_whose_connection_broke(world: World) -> None:
    failed(world, 1, world.now, 1, "CollectiveFailed", RESET)
    failed(world, 0, world.now + 1, 137, "CollectiveFailed", RESET)
    summary = world.recovered()
    assert "worker 0" in summary["message"]
    assert "137" in summary["message"]


def test_killed_rank_is_blamed_even_if_its_report_comes_after_a_long_sentence_of_its_peer() -> None:
    """The operator was away, and hears of the sidecars one after the other."""
    world = watched()
    killed = world.member(0)
    failed(world, 0, world.now, 137)
    echoed(world, 0)
    world.forget()
    world.sidecars[killed].reachable = False
    world.tick()
    assert world.status.recovery is not None
    assert "worker 1" in world.status.recovery.message
    world.sidecars[killed].reachable = True
    world.recovered_from("TrainerCrash", "worker 0")


def test_worker_of_which_no_rank_could_say_why_is_blamed_before_those_that_name_a_peer(world: World) -> None:
    """torchrun ends with 1 when a rank was killed, and that rank says nothing."""
    echoed(world, 2)
    failed(world, 2, world.now + 2, 1)
    assert "worker 2" in world.recovered()["message"]


def test_commands_that_were_stopped_are_blamed_last(world: World) -> None:
    for worker in (0, 1, 2):
        failed(world, worker, world.now - 1, 143)
    failed(world, 3, world.now, 1, "CollectiveFailed", RESET)
    assert "worker 3" in world.recovered()["message"]


ENDS: dict[str, tuple[int, str, str]] = {
    "OOMKilled": (137, "", "OOMKilled"),
    "SIGKILL": (137, "", ""),
    "SIGSEGV": (139, "", ""),
    "own exception": (1, "UncaughtException", ""),
    "silent": (1, "", ""),
    "vanished": (1, "Vanished", ""),
    "connection": (1, "CollectiveFailed", ""),
    "watchdog": (134, "CollectiveFailed", ""),
    "stopped": (143, "", ""),
}
ORIGINS = ("OOMKilled", "SIGKILL", "SIGSEGV", "own exception", "silent", "vanished")
ECHOES, STOPPED = ("connection", "watchdog"), ("stopped",)


@settings(max_examples=examples(60), deadline=None)
@given(
    origin=st.sampled_from(ORIGINS),
    worker=st.integers(0, 3),
    others=st.lists(st.sampled_from(ECHOES + STOPPED), min_size=3, max_size=3),
    times=st.lists(st.floats(-3, 3), min_size=4, max_size=4),
    seen=st.permutations(range(4)),
)
def test_origin_is_blamed_whatever_the_clocks_say_and_in_whatever_order_the_sidecars_answer(
    origin: str, worker: int, others: list[str], times: list[float], seen: list[int]
) -> None:
    world = watched()
    ends = dict(zip([w for w in range(4) if w != worker], others, strict=True)) | {worker: origin}
    for each, how in ends.items():
        code, said, reason = ENDS[how]
        failed(world, each, world.now + times[each], code, *((said, RESET) if said else ()), reason=reason)
    world.forget()
    for each in range(4):
        world.sidecars[world.member(each)].reachable = False
    for each in seen:
        world.sidecars[world.member(each)].reachable = True
        world.tick()
    world.recovered_from("OOMKilled" if origin == "OOMKilled" else "TrainerCrash", f"worker {worker}")
