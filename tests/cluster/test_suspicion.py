"""Nodes that die, are cut off or will be emptied are left in time, and not believed again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.jobs import PATIENCE, Job, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck_cli.api_server import NODES
from tiercheck_local.cluster import LocalCluster, waits_warm

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
    job = jobs.start(workers=2, env={"GATE": str(gate)})
    before = job.wait_trained(13)
    node = job.stage.node_of(1)
    # ranks whose network is cut wait for each other; the cut of the sidecars' links does not reach theirs
    gate.touch()
    cluster.faults.cut_links(job.stage.pod_of(1), [job.stage.pod_of(0)], operator=True)
    recovery = job.wait_recovered(before["attempt"])
    assert kubernetes_trusts(cluster, node)
    assert recovery["cause"] == "NodeSilent"
    assert "worker 0 hears nothing from its host either" in recovery["message"]
    assert job.stage.node_of(1) != node
    assert job.status["restarts"]["crash"] == 0
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_worker_cut_off_from_everybody_trains_on_for_nobody_and_stops_when_it_hears(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = jobs.start(workers=2, env={"ALONE": "1", "TAIL": "60", "GATE": str(gate), "GATE_RANK": "0"})
    before = job.wait_trained(13)
    node, uid, pod = job.stage.node_of(1), job.uids()[1], job.stage.pod_of(1)
    cluster.faults.cut_links(pod, [job.stage.pod_of(0)], operator=True)
    cluster.faults.partition_node(node)
    gate.touch()  # worker 0 stands still, as collectives make it; uncoupled ranks would vouch for each other
    recovery = job.wait_recovered(before["attempt"])
    here = newest_step(cluster, pod)
    assert trains(cluster, node, uid), "the dead worker is alive"
    cluster.wait_for(lambda: newest_step(cluster, pod) > here, PATIENCE, "the old worker to go on stepping")
    assert recovery["tiers"]["peer"] == 1, "its replacement came back from the other worker's memory"
    # it reaches its peers again; neither the controller nor Kubernetes can tell it anything
    cluster.faults.mend_links()
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
    manifest = jobs.manifest(workers=2, env={"ALONE": "1", "TAIL": "30"})
    # Nobody answers, so it might be us: Kubernetes has the word, here sooner than after its 300 s.
    manifest["spec"]["template"]["spec"]["tolerations"] = [
        {
            "key": "node.kubernetes.io/unreachable",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 3,
        }
    ]
    job = jobs.apply(manifest)
    before = job.wait_trained(22, tier="remote")
    old = {worker: (job.stage.node_of(worker), job.uids()[worker]) for worker in range(2)}
    for worker, (node, _) in old.items():
        cluster.faults.cut_links(job.stage.pod_of(worker), [], operator=True)
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
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    node, uids = job.stage.node_of(1), job.uids()
    cluster.faults.cordon_node(node)
    try:
        job.wait(
            "training to go on", lambda status: status["progress"]["step"] > before["progress"]["step"] + 5
        )
        assert job.uids() == uids, "a cordon alone moves nobody"
        for pod in job.pods():
            if pod["spec"].get("nodeName") == node:
                cluster.faults.drain_pod(pod["metadata"]["name"])
        recovery = job.wait_recovered(before["attempt"])
        assert job.stage.node_of(1) != node
        assert recovery["cause"] == "PodEvicted"
        assert recovery["lostSteps"] <= 2
    finally:
        cluster.faults.cordon_node(node, cordoned=False)
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_node_that_an_autoscaler_will_remove_is_left_before(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    node = job.stage.node_of(1)
    cluster.faults.taint_node(node, "karpenter.sh/disrupted")
    try:
        recovery = job.wait_recovered(before["attempt"])
        assert recovery["cause"] == "NodeLeaving"
        assert "karpenter.sh/disrupted" in recovery["message"]
        assert recovery["lostSteps"] <= 2
        assert _on(job, node) == []
    finally:
        cluster.faults.untaint_node(node)
    assert_same_as_undisturbed(job)


def _on(job: Job, node: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in job.pods() if pod["spec"].get("nodeName") == node]
