"""Decisions never delete who trains, over all that kubelets and networks may say."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.kubelet_words import ended, held_back, node, not_made, sidecar_view, starting, up
from tests.operator.world_in_memory import trained
from tiercheck.protocol.report import Break, Unreachable
from tiercheck_operator.controller.decide import decide
from tiercheck_operator.model.actions import DeletePod
from tiercheck_operator.model.observed import ContainerView, HostSign, NodeView, Observation, WorkerReport

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
    return replace(known, silent_since=since, host=draw(st.sampled_from(HostSign)))


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
            Unreachable(other.worker, other.ip or "", obs.now - draw(SECONDS), draw(st.sampled_from(Break)))
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
        missed = (Unreachable(1, dead.ip or "", obs.now - silent - 3, Break.SILENT),)
        gone = replace(known, silent_since=obs.now - silent, stepped_at=obs.now - silent - 1)
        here = replace(
            known, report=replace(known.report, unreachable=missed), stepped_at=obs.now - silent - 1
        )
        reports[pod.uid] = gone if pod.uid == dead.uid else here
    assert deleted(replace(obs, pods=pods, reports=reports, nodes=found)) == [dead.name]
