"""Spares, node memory and too few nodes, with the real operator and real pods."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import PATIENCE, Job, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol import names
from tiercheck_cli.api_server import PODS
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.stage import JOBS

pytestmark = pytest.mark.cluster


def spares(job: Job) -> list[str]:
    """Names of the pods that are no worker's."""
    return [
        pod["metadata"]["name"] for pod in job.pods() if names.LABEL_WORKER not in pod["metadata"]["labels"]
    ]


def wait_spares(job: Job, ready: int) -> None:
    job.wait(f"{ready} spares", lambda status: (status.get("spares") or {}).get("ready") == ready)


@pytest.mark.extended
def test_spare_takes_the_place_of_a_worker_whose_node_died(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2, spares=1)
    wait_spares(job, 1)
    before = job.wait_trained(13)
    (spare,) = spares(job)
    assert job.stage.rack_of(0) != job.stage.rack_of(1)
    cluster.faults.kill_node(job.stage.node_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.stage.pod_of(1) == spare, "no new pod had to be scheduled"
    job.wait_condition("SparesReady")
    assert spares(job) == [f"{job.name}-spare-1"], "and there is a new spare behind it"
    assert_same_as_undisturbed(job)
    cluster.wait_for(lambda: not spares(job), PATIENCE, "the spare to go with the job's end")


@pytest.mark.extended
def test_job_without_capacity_waits_with_a_reason_and_goes_on_from_memory(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job = jobs.start(workers=2, failurePolicy={"capacityTimeoutSeconds": 2})
    before = job.wait_trained(13)
    lost = job.stage.node_of(1)
    others = [name for name in cluster.nodes if name != lost]
    try:
        for name in others:
            cluster.faults.cordon_node(name)
        cluster.faults.kill_node(lost)
        placed = job.wait_condition("Placed", "False", "NoCapacity")
        assert "unschedulable" in placed["message"], "what the scheduler says"
        held = job.reports()[0].holdings
        assert {holding.rank for holding in held} == {0, 1}, (
            "the survivor keeps its own and the lost worker's copies"
        )
    finally:
        for name in others:
            cluster.faults.cordon_node(name, cordoned=False)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert "NoCapacity" in {event["reason"] for event in job.events()}
    assert_same_as_undisturbed(job)


def node_memory(cluster: LocalCluster, node: str) -> Path:
    """Where the jobs' folders in a node's memory lie."""
    return cluster.memory_folder(node) / "node" / "dev/shm/tiercheck"


@pytest.mark.extended
def test_node_memory_outlives_a_pod_and_is_cleared_when_its_job_is_gone(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    manifest = jobs.manifest(2)
    manifest["spec"]["tiers"]["local"]["medium"] = "NodeMemory"
    job = jobs.apply(manifest)
    before = job.wait_trained(13)
    node, uid = job.stage.node_of(1), job.get()["metadata"]["uid"]
    cluster.api.delete(PODS, "default", job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert job.stage.node_of(1) == node, "the new pod is where its memory is"
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    # A job that is deleted while it trains cannot tell its sidecars that nobody will come back.
    orphaned = jobs.apply({**manifest, "metadata": {**manifest["metadata"], "name": f"{job.name}-b"}})
    orphaned.wait_trained(6)
    home, other = orphaned.stage.node_of(0), orphaned.get()["metadata"]["uid"]
    cluster.api.delete(JOBS, "default", orphaned.name)
    cluster.wait_for(lambda: not orphaned.belongings(), PATIENCE, "the orphan's pods to be gone")
    assert list((node_memory(cluster, home) / other).iterdir()), "it is left behind"
    with janitor(cluster, home):
        swept = node_memory(cluster, home) / other
        cluster.wait_for(lambda: not swept.exists(), PATIENCE, "the orphan to be swept away")
    assert_same_as_undisturbed(job)
    for name in cluster.nodes:
        folder = node_memory(cluster, name) / uid
        cluster.wait_for(
            lambda folder=folder: not folder.exists() or not list(folder.iterdir()), PATIENCE,
            "a job that has completed to leave nothing in node memory",
        )  # fmt: skip


@contextlib.contextmanager
def janitor(cluster: LocalCluster, node: str) -> Iterator[None]:
    """The janitor's pod, on one node, with no patience."""
    base = "/dev/shm/tiercheck"
    container = {
        "name": "janitor",
        "image": "tiercheck-sidecar",
        "command": [
            sys.executable,
            "-m",
            "tiercheck_sidecar.node_memory",
            names.NODE_MEMORY_DIR,
            "--watch",
            "0",
        ],
        "volumeMounts": [{"name": "memory", "mountPath": names.NODE_MEMORY_DIR}],
    }
    volume = {"name": "memory", "hostPath": {"path": base, "type": "DirectoryOrCreate"}}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"janitor-{node}", "namespace": "default"},
            "spec": {"nodeName": node, "containers": [container], "volumes": [volume]},
        }
    )
    yield
    cluster.api.delete(PODS, "default", f"janitor-{node}", grace=0)
