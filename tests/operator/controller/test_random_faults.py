"""Any faults, in any order, with the operator dying at any action; and what a look costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.reconcile import LIMIT, BenchJob, Server, ground, of_jobs, of_workers
from tests.examples import examples
from tests.operator import world_in_memory
from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck.protocol.directive import DeltaMode, HangLimits
from tiercheck.protocol.report import Problem, RankFailure, TrainerReport, TrainerState
from tiercheck.protocol.version import Version
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model.actions import Decision
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import render_record

RACK = "topology.kubernetes.io/rack"

_FAULTS = st.tuples(
    st.integers(0, 12),
    st.sampled_from(
        [
            *("crash", "evict", "vanish", "node", "rack", "all", "silent", "remote", "revive"),
            *("skip", "diverge", "replay", "copies", "parity"),
            *("hang", "gpu", "oom", "sidecar"),
            *("cut", "deaf", "closed", "mend", "leave", "stay"),
            *("cordon", "label"),
            *("spare", "spares"),
            *("full", "undying"),
        ]
    ),
    st.integers(0, 3),
)
_SHAPES: list[dict[str, object]] = [
    {},
    {"delta": DeltaMode.AUTO, "snapshot_every": None},
    {"delta": DeltaMode.AUTO, "snapshot_every": None, "copies": 0, "parity": (2, 1)},
    {"delta": DeltaMode.AUTO, "snapshot_every": None, "copies": 0, "parity": (2, 2)},
    {"spares": 1},
    {"delta": DeltaMode.AUTO, "snapshot_every": None, "spares": 2},
    {"min_workers": 2, "capacity_timeout": 5.0},
    {"min_workers": 1, "capacity_timeout": 5.0, "spares": 1},
]
_KILLS = st.dictionaries(st.integers(0, 80), st.integers(0, 8), max_size=6)


def _strike(world: World, fault: str, target: int) -> None:
    nodes = sorted(world.nodes)
    worker_pods = [uid for uid, pod in world.pods.items() if pod.worker == target]
    match fault:
        case "crash":
            if world.crash(target):
                world.crashes += 1
        case "evict":
            for uid in worker_pods:
                world.evict(uid)
        case "hang":
            if world.status.recovery is None and world.status.attempt:
                world.hung = (world.status.attempt, target)
                world.crashes += 1
        case "gpu":
            sidecar = world.live_sidecar(target)
            if sidecar is not None and world.crash(target):
                said = RankFailure(target, "GPUFault", "RuntimeError: CUDA error: uncorrectable ECC error", 1)
                sidecar.trainer = replace(sidecar.trainer, failure=said)
                world.crashes += 1  # if several say so at once
        case "undying":
            world.undying |= set(worker_pods)
        case "oom":
            if world.crash(target, code=137, reason="OOMKilled"):
                world.crashes += 1
        case "sidecar":
            for uid in worker_pods:
                world.kill_sidecar(uid)
        case "spare":
            for uid in [uid for uid, pod in world.pods.items() if pod.is_spare]:
                world.evict(uid)
        case "full":
            world.change_nodes(schedulable=False)
        case "spares":
            world.change(spares=target)
        case "vanish":
            for uid in worker_pods:
                world._gone(uid)
        case "node":
            world.kill_node(nodes[target])
        case "rack":
            for name in nodes[:2] if target % 2 else nodes[2:]:
                world.kill_node(name)
        case "all":
            world.lose_all()
        case "silent":
            for uid in worker_pods:
                if uid in world.sidecars:
                    world.sidecars[uid].reachable = False
        case "remote":
            world.remote_up = not world.remote_up
        case "revive":
            world.revive_node(nodes[target])
        case "cut":
            world.cut |= {frozenset((nodes[target], other)) for other in (*nodes, "controller")}
        case "deaf":
            world.cut.add(frozenset((nodes[target], "controller")))
        case "closed":
            for uid in worker_pods:
                if uid in world.sidecars:
                    world.sidecars[uid].closed = not world.sidecars[uid].closed
        case "leave" | "stay":
            why = "it is tainted" if fault == "leave" else ""
            world.nodes[nodes[target]] = replace(world.nodes[nodes[target]], leaving=why, schedulable=not why)
        case "mend":
            world.cut.clear()
        case "cordon":
            node = world.nodes[nodes[target]]
            world.nodes[node.name] = replace(node, cordoned=not node.cordoned, schedulable=node.cordoned)
        case "label":
            node = world.nodes[nodes[target]]
            rack = "r1" if node.labels[RACK] == "r0" else "r0"
            world.nodes[node.name] = replace(node, labels={**node.labels, RACK: rack})
        case "skip":
            world.skipped |= {
                (target, step) for step in range(world.newest_step() + 1, world.newest_step() + 3)
            }
        case "diverge":
            if world.status.recovery is None:
                world.poisoned.add(world.status.attempt)
                world.crashes += 1
        case "replay":
            world.bad_replays.add((target, Version(world.newest_step(), world.status.attempt)))
        case "copies":
            world.change(copies=1, parity=None)
        case "parity":
            world.job = replace(world.job, spec=replace(world.job.spec, copies=0, parity=(2, 1)))


def _heal(world: World) -> None:
    world.remote_up = True
    world.undying.clear()
    world.cut.clear()
    for sidecar in world.sidecars.values():
        sidecar.closed = False  # a job does not grow while one is away: it would give up what that one holds
    world.nodes = {
        name: replace(node, leaving="", cordoned=False, schedulable=True)
        for name, node in world.nodes.items()
    }
    for name in list(world.dead_nodes):
        world.revive_node(name)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(faults=st.lists(_FAULTS, max_size=8), kills=_KILLS, shape=st.sampled_from(_SHAPES))
@example(  # the three workers that are left have two nodes: one of them has no place for a copy
    faults=[(5, "leave", 0), (3, "crash", 0), (0, "evict", 2), (0, "full", 0)],
    kills={},
    shape={"min_workers": 2, "capacity_timeout": 5.0},
)
def test_job_survives_any_faults_with_everything_committed(
    faults: list[tuple[int, str, int]], kills: dict[int, int], shape: dict[str, object]
) -> None:
    hang = HangLimits(steps=2, seconds=8.0)
    world = World(make_spec(remote=REMOTE, max_restarts=1000, rollback_after=3, hang=hang, **shape))
    world.heartbeats = True
    moment = 0
    kept: Version | None = None
    attempt = 0

    def tick() -> None:
        nonlocal moment, kept, attempt
        before = max((v for v in world.remote if world.status.history.accepts(v)), default=None)
        world.tick(kills.get(moment))
        moment += 1
        if world.status.attempt != attempt:
            assert world.status.attempt == attempt + 1, "attempts are counted one by one"
            attempt = world.status.attempt
            start = world.status.restored_version
            # Committed is kept: never further back than the newest version complete in the remote tier.
            assert before is None or (start is not None and start.step >= before.step)

    for gap, fault, target in faults:
        for _ in range(gap):
            tick()
        _strike(world, fault, target)
    for _ in range(30):
        tick()
    _heal(world)
    world.hung = None
    for _ in range(450):
        tick()
        at_rest = world.status.phase == "Running" and world.status.recovery is None
        # It is at its size before the attempt that brings the others back has begun.
        if at_rest and world.status.size is None and len(world.starts[world.status.attempt]) == 4:
            break
    status = world.status
    assert status.phase == "Running", render_record(status)
    assert status.recovery is None
    # All or none: whoever started in an attempt started from one version (`World.started` checks each start).
    assert set(world.starts[status.attempt]) == {0, 1, 2, 3}
    # Only crashes spend the crash budget.
    assert status.crashes <= world.crashes
    wanted = world.job.spec.spares
    for _ in range(100):
        if world.status.spares is None or world.status.spares.ready == wanted:
            break
        tick()
    alive = [pod for pod in world.pods.values() if not pod.deleting]
    assert sorted(pod.worker for pod in alive if not pod.is_spare) == [0, 1, 2, 3]
    assert sum(pod.is_spare for pod in alive) == wanted


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kills=st.dictionaries(st.integers(0, 40), st.integers(0, 10), max_size=20))
def test_operator_that_dies_all_the_time_still_starts_the_job_once(kills: dict[int, int]) -> None:
    world = World()
    for moment in range(60):
        world.tick(kills.get(moment))
    assert world.status.phase == "Running"
    assert world.status.attempt == 1
    assert world.starts == {1: dict.fromkeys(range(4))}
    assert len(world.pods) == 4


async def test_events_and_recoveries_make_no_more_calls_for_many_workers_than_for_few() -> None:
    few, many = await of_workers(4), await of_workers(200)
    for what in ("heartbeat, API calls", "pod event, API calls", "recovery, API calls"):
        assert many[what] <= few[what], what
    assert few["heartbeat, API calls"] <= 1
    assert few["pod event, API calls"] == 0


async def test_event_of_one_job_makes_no_calls_for_the_others() -> None:
    """Of a job's fifty, all but the first two change its own status, with one call each."""
    assert (await of_jobs(20, events=1000))["event, API calls"] <= 0.96


async def test_object_of_a_thousand_workers_stays_small_whatever_they_have_to_say() -> None:
    server = Server()
    job = BenchJob("job", 1000, server, ground(1000), Metrics())
    server.pod_created = job.pod_created
    await job.until_running()
    story = "no space left on device " * 200
    for number, uid in enumerate(list(job.sidecars.reports)):
        job.sidecars.change(uid, problems=(Problem(f"Problem{number}", story),))
        if number % 2:
            failed = TrainerReport(TrainerState.FAILED, 1, "Crashed", story, ended_at=job.now())
            job.sidecars.change(uid, trainer=failed)
    for name in list(job.pods)[::3]:
        del job.pods[name]
    sizes = []
    for _ in range(60):
        job.later(0.5)
        for uid in list(job.sidecars.reports):
            job.sidecars.probe(uid)
        await job.look()
        sizes.append(len(json.dumps({**job.object, "spec": {}})))
    assert job.object["status"]["attempt"] > 1
    assert max(sizes) < LIMIT


# A person who follows one look passes few modules.


ROOT = Path(__file__).parents[3]
PRODUCT = (ROOT / "operator", ROOT / "tiercheck")
MOST = 20


def modules_entered(decide: Callable[[Observation], Decision], seen: Observation) -> set[str]:
    """In which modules of the product a function is called between the observation and the decision."""
    files = set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        decide(seen)
    finally:
        sys.setprofile(before)
    paths = map(Path, files)
    return {str(path.relative_to(ROOT)) for path in paths if any(map(path.is_relative_to, PRODUCT))}


def test_one_look_at_a_running_job_passes_few_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    world, seen = World(), list[Observation]()
    world.running()
    decide = world_in_memory.decide

    def remember(obs: Observation) -> Decision:
        seen.append(obs)
        return decide(obs)

    monkeypatch.setattr(world_in_memory, "decide", remember)
    world.train(1)
    entered = modules_entered(decide, seen[-1])
    assert len(entered) <= MOST, sorted(entered)
