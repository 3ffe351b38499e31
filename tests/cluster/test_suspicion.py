"""A silent sidecar is suspected and replaced, and the healthy are left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT
from tests.cluster.jobs import OPERATOR_ENV, PATIENCE, Job, Jobs, progress
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol import names
from tiercheck_local.cluster import LocalCluster, waits_warm
from tiercheck_local.nodespec import NodeSpec
from tiercheck_local.stage import find_condition
from tiercheck_operator.kubernetes.api_server import NODES

pytestmark = pytest.mark.cluster


def trains(cluster: LocalCluster, node: str, uid: str) -> bool:
    """Whether a training command runs in a pod that the API may know no more. Its launcher stays, and what
    that keeps ready."""
    return sum(not waits_warm(pid) for pid in cluster.faults.processes_of(node, uid, "trainer")) > 1


def newest_step(cluster: LocalCluster, pod: str) -> int:
    """The last that the pod's trainer has printed."""
    lines = (cluster.logs / pod / "trainer.log").read_text().splitlines()
    return max(
        json.loads(line).get("step", 0) for line in lines if line.startswith("{") and line.endswith("}")
    )


def kubernetes_trusts(cluster: LocalCluster, node: str) -> bool:
    found = cluster.api.get(NODES, None, node)
    ready = next(entry["status"] for entry in found["status"]["conditions"] if entry["type"] == "Ready")
    return ready == "True" and not found["spec"].get("taints")


@pytest.mark.extended
def test_silent_node_is_left_while_kubernetes_still_believes_in_it(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job, before = jobs.start_trained(workers=2, env={"GATE": str(gate)})
    node = job.node_of(1)
    # ranks whose network is cut wait for each other; the cut of the sidecars' links does not reach theirs
    gate.touch()
    cluster.faults.cut_links(job.pod_of(1), [job.pod_of(0)], operator=True)
    recovery = job.wait_recovered(before["attempt"])
    assert kubernetes_trusts(cluster, node)
    assert recovery["cause"] == "NodeSilent"
    assert "worker 0 gets no answer from its host either" in recovery["message"]
    assert job.node_of(1) != node
    assert job.status["restarts"]["crash"] == 0
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_worker_cut_off_from_everybody_trains_on_for_nobody_and_stops_when_it_hears(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job, before = jobs.start_trained(
        workers=2, env={"ALONE": "1", "TAIL": "60", "GATE": str(gate), "GATE_RANK": "0"}
    )
    node, uid, pod = job.node_of(1), job.uids()[1], job.pod_of(1)
    cluster.faults.cut_links(pod, [job.pod_of(0)], operator=True)
    cluster.faults.partition_node(node)
    gate.touch()  # worker 0 stands still, as collectives make it; uncoupled ranks would vouch for each other
    recovery = job.wait_recovered(before["attempt"])
    here = newest_step(cluster, pod)
    assert trains(cluster, node, uid), "the dead worker is alive"
    cluster.wait_for(lambda: newest_step(cluster, pod) > here, PATIENCE, "the old worker to go on stepping")
    assert recovery["tiers"]["peer"] == 1, "its replacement came back from the other worker's memory"
    # it reaches its peers again; neither the controller nor Kubernetes can tell it anything
    cluster.faults.restore_links()
    cluster.wait_for(lambda: not trains(cluster, node, uid), PATIENCE, "the old worker to stop itself")
    versions = {holding.version for report in job.reports().values() for holding in report.holdings}
    stale = {
        version
        for version in versions
        if version.attempt == before["attempt"] and version.step > recovery["step"]
    }
    assert not stale, "nothing that it did after the split is kept by anybody"
    cluster.faults.heal_node(node)
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_workers_that_only_the_store_can_tell_stop_and_leave_its_versions_alone(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    # Nobody answers, so it might be us: Kubernetes has the word, here sooner than after its 300 s.
    soon = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3}
    pod = {"tolerations": [{"key": "node.kubernetes.io/unreachable", **soon}]}
    job = jobs.start(2, env={"ALONE": "1", "TAIL": "30"}, pod=pod)
    before = job.wait_trained(22, tier="remote")
    old = {worker: (job.node_of(worker), job.uids()[worker]) for worker in range(2)}
    for worker, (node, _) in old.items():
        cluster.faults.cut_links(job.pod_of(worker), [], operator=True)
        cluster.faults.partition_node(node)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"]["remote"] == 2
    for node, uid in old.values():
        cluster.wait_for(
            lambda node=node, uid=uid: not trains(cluster, node, uid), PATIENCE, "the old ones to stop"
        )
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_drained_node_gives_its_pod_away_with_the_work_of_its_last_steps(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job, before = jobs.start_trained(workers=2)
    node, uids = job.node_of(1), job.uids()
    cluster.faults.cordon_node(node)
    try:
        job.wait(
            "training to go on", lambda status: status["progress"]["step"] > before["progress"]["step"] + 5
        )
        assert job.uids() == uids, "a cordon alone moves nobody"
        for pod in job.on_node(node):
            cluster.faults.drain_pod(pod)
        recovery = job.wait_recovered(before["attempt"])
        assert job.node_of(1) != node
        assert recovery["cause"] == "PodEvicted"
        assert recovery["lostSteps"] <= 2
    finally:
        cluster.faults.cordon_node(node, cordoned=False)
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_node_that_an_autoscaler_will_remove_is_left_before(jobs: Jobs, cluster: LocalCluster) -> None:
    job, before = jobs.start_trained(workers=2)
    node = job.node_of(1)
    cluster.faults.taint_node(node, "karpenter.sh/disrupted")
    try:
        recovery = job.wait_recovered(before["attempt"])
        assert recovery["cause"] == "NodeLeaving"
        assert "karpenter.sh/disrupted" in recovery["message"]
        assert recovery["lostSteps"] <= 2
        assert job.on_node(node) == []
    finally:
        cluster.faults.taint_node(node)
    assert_same_as_undisturbed(job)


def protected(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return find_condition(status, "Protected") or {"reason": "", "message": ""}


def assert_untouched(job: Job, before: Mapping[str, Any], uids: Mapping[int, str]) -> None:
    status = job.status
    assert status["attempt"] == before["attempt"]
    assert status["restarts"]["total"] == 0
    assert job.uids() == uids


def test_sidecar_that_is_killed_twice_costs_no_step_and_its_kubelets_wait_is_told(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job, before = jobs.start_trained(workers=2, steps=100_000, pace=0.05)
    uids = job.uids()
    for lives in (1, 2):
        cluster.wait_for(lambda: job.sidecar().get("started"), 60, "the sidecar to have started")
        job.wait_condition("Protected")
        here = progress(job.status)
        job.inject_fault("sidecar", 1)
        told = job.wait("it to be told", lambda status: protected(status)["reason"] == "SidecarRestarting")
        if lives == 2:
            told = job.wait("the wait to be told", lambda status: "10 s" in protected(status)["message"])
            assert "Training goes on" in protected(told)["message"]
            assert "back-off 10s" in job.sidecar()["state"]["waiting"]["message"]
        job.wait("training to go on meanwhile", lambda status, here=here: progress(status) > here + 20)
    job.wait_condition("Protected")
    assert_untouched(job, before, uids)
    assert job.sidecar()["restartCount"] == 2
    assert "SidecarRestarting" in job.told()


def test_all_kubelets_silent_while_sidecars_answer_costs_nothing(jobs: Jobs, cluster: LocalCluster) -> None:
    job, before = jobs.start_trained(workers=2, steps=100_000, pace=0.05)
    uids, worth = job.uids(), str(job.wait_condition("Placed")["reason"])
    assert worth in ("AllPlaced", "DegradedSpread"), "other tests may have given reason to shun nodes"
    try:
        for node in cluster.nodes:
            cluster.faults.partition_node(node)
        told = job.wait_condition("Placed", "True", "NodeNotReady")["message"]
        assert "train on" in told
        cluster.wait_for(
            lambda: not any(kubernetes_trusts(cluster, node) for node in cluster.nodes),
            60,
            "no node to be ready",
        )
        here = progress(job.status)
        job.wait("a hundred steps more", lambda status: progress(status) > here + 100)
        assert_untouched(job, before, uids)
    finally:
        for node in cluster.nodes:
            cluster.faults.heal_node(node)
    job.wait_condition("Placed", "True", worth)
    assert_untouched(job, before, uids)


@pytest.mark.extended
def test_replacement_whose_sidecar_takes_long_to_listen_is_waited_for(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job, before = jobs.start_trained(workers=2)
    old = job.uids()
    cluster.faults.hold_starts(names.SIDECAR_CONTAINER)
    try:
        job.inject_fault("evict", 1)
        cluster.wait_for(
            lambda: job.uids()[1] != old[1] and "running" in job.sidecar().get("state", {}),
            60,
            "its replacement to run",
        )
        new = job.uids()[1]
        # Its peer's trainer has failed, and a silent sidecar is given up after TIERCHECK_SUSPECT_SECONDS
        # then.
        passed = time.monotonic() + 2 * float(OPERATOR_ENV["TIERCHECK_SUSPECT_SECONDS"])
        cluster.wait_for(lambda: time.monotonic() > passed, 60, "that limit to pass twice")
        assert job.uids()[1] == new
    finally:
        cluster.faults.hold_starts(names.SIDECAR_CONTAINER, held=False)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["cause"] == "PodEvicted"
    assert job.uids()[1] == new, "one replacement, and it was given its time"
    assert_same_as_undisturbed(job)


@pytest.fixture
def trusting(tmp_path: Path) -> Iterator[tuple[LocalCluster, Jobs]]:
    """A cluster that believes in a node for as long as Kubernetes does, with an operator and jobs of its
    own."""
    nodes = NodeSpec.load(ROOT / "examples" / "clusters" / "two-racks.yaml")
    with LocalCluster(tmp_path / "cluster", nodes, lease_grace=60.0) as cluster:
        cluster.apply_crds(ROOT / "crds")
        cluster.start_operator(OPERATOR_ENV)
        jobs = Jobs(cluster, tmp_path)
        yield cluster, jobs


@pytest.mark.extended
def test_node_whose_processes_are_dead_is_left_although_its_kernel_refuses_and_kubernetes_trusts_it(
    trusting: tuple[LocalCluster, Jobs],
) -> None:
    cluster, jobs = trusting
    job, before = jobs.start_trained(workers=2)
    node = job.node_of(1)
    cluster.faults.kill_node(node)
    recovery = job.wait_recovered(before["attempt"])
    assert kubernetes_trusts(cluster, node)
    assert recovery["cause"] == "SidecarSilent"
    assert "its kubelet does not report" in recovery["message"]
    assert job.node_of(1) != node
    assert recovery["tiers"]["peer"] == 1
    assert_same_as_undisturbed(job)
