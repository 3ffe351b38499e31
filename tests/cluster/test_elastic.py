"""A job grows, shrinks, and takes spares without a lost step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import PATIENCE, Job, Jobs, cordoned
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol import names
from tiercheck_local.cluster import LocalCluster
from tiercheck_operator.kubernetes.api_server import JOBS, PODS

pytestmark = pytest.mark.cluster

TRAINER = [sys.executable, str(Path(__file__).with_name("sharded_trainer.py"))]


@pytest.mark.extended
def test_suspended_job_of_four_goes_on_with_two_from_the_store(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=4, command=TRAINER, remote_every=10)
    before = job.wait_trained(6)
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"workers": 2, "suspend": False}})
    recovery = job.wait_recovered(before["attempt"])
    assert "made by 4 ranks, from which 2 read their parts" in recovery["reason"]
    job.wait_condition("Completed")
    said = job.printed()
    trained = {line["step"]: line for line in said if "step" in line and line["world"] == 4}
    restored = [line for line in said if "restored" in line]
    assert [line["world"] for line in restored] == [2, 2]
    for line in restored:
        assert line["restored"] == recovery["step"]
        assert line["whole"] == trained[recovery["step"]]["whole"], "parameters and optimizer state, gathered"
        assert line["samples"] == 12 * recovery["step"], "no sample twice, none skipped"
    assert job.status["history"][-1]["ranks"] == 2
    later = [line["step"] for line in said if "step" in line and line["world"] == 2]
    assert min(later) == recovery["step"] + 1
    assert job.status["tiers"]["remote"]["step"] > recovery["step"], (
        "the new ranks' versions are complete, too"
    )


def test_job_goes_on_smaller_by_itself_and_grows_back(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    assert_shrinks_and_grows(jobs, cluster, tmp_path / "gate", workers=3)


@pytest.mark.extended
def test_job_with_parity_goes_on_smaller_from_what_the_blocks_give(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Nobody has a copy of what the lost worker held."""
    tiers = {"local": {"sizeLimit": "64Mi"}, "peer": {"parity": {"data": 2, "parity": 1}}}
    assert_shrinks_and_grows(jobs, cluster, tmp_path / "gate", workers=4, tiers=tiers)


def assert_shrinks_and_grows(
    jobs: Jobs, cluster: LocalCluster, gate: Path, *, workers: int, **spec: Any
) -> None:
    """By one worker, without a remote tier."""
    job = jobs.start(
        workers=workers,
        command=TRAINER,
        env={"LIVES": "2", "GATE": str(gate)},
        remote_every=None,
        elastic={"minWorkers": workers - 1},
        failurePolicy={"capacityTimeoutSeconds": 2},
        checkpoint={"snapshot": {"everySteps": 20}},
        **spec,
    )
    job.wait_trained(22)
    gate.touch()  # else what is seen of a quick training may be its snapshots only
    between = job.wait("deltas lie at their holders", lambda status: status["tiers"]["peer"]["step"] % 20 > 4)
    complete = between["tiers"]["peer"]["step"]
    lost = job.node_of(1)
    survivors = {job.pod_of(worker) for worker in range(workers) if worker != 1}
    with cordoned(cluster, lost):
        cluster.faults.kill_node(lost)
        smaller = job.wait_recovered(1)
        assert f"made by {workers} ranks, from which {workers - 1} read their parts" in smaller["reason"]
        assert smaller["reason"].endswith(f"; with {workers - 1} of {workers} workers")
        assert smaller["tiers"]["remote"] == 0
        # The newest snapshot that all holders had: another than before the loss, if one was copied meanwhile.
        assert smaller["step"] % 20 == 0, "deltas lead nowhere on fewer ranks"
        assert smaller["step"] >= complete - complete % 20
        assert smaller["deltas"] == 0
        assert {job.pod_of(worker) for worker in range(workers - 1)} == survivors, (
            "the last one is worker 1 now"
        )
        shrunk = job.wait_condition("FullSize", "False", "Shrunk")
        assert f"{workers - 1} of {workers} workers" in shrunk["message"]
    grown = job.wait_recovered(2)
    assert grown["cause"] == "Grown"
    assert f"made by {workers - 1} ranks, from which {workers} read their parts" in grown["reason"]
    assert grown["reason"].endswith("; every process starts anew: the job has another number of ranks now")
    assert (grown["inProcess"], grown["restarted"]) == (0, workers)
    job.wait_condition("Completed")
    # The first is left out as soon as nothing of it is left anywhere.
    assert [branch["ranks"] for branch in job.status["history"]][-2:] == [workers - 1, workers]
    assert job.status["restarts"]["crash"] == 0
    assert {"Shrunk", "Grown"} <= {*job.told()}
    said = job.printed()
    trained = {(line["attempt"], line["step"]): line["whole"] for line in said if "step" in line}
    for line in (line for line in said if "restored" in line):
        assert line["whole"] == trained[line["attempt"] - 1, line["restored"]], "to the last bit, gathered"
    worlds = sorted(line["world"] for line in said if "restored" in line)
    assert worlds == [workers - 1] * (workers - 1) + [workers] * workers
    assert_every_sample_once(job)


def assert_every_sample_once(job: Job) -> None:
    """Over the history that counts: each attempt's steps up to where the next one came back to."""
    said = job.printed()
    begun = {1: 0} | {line["attempt"]: line["restored"] for line in said if "restored" in line}
    ends = [*list(begun.values())[1:], 10**9]
    accepted = {
        attempt: range(base + 1, end + 1) for (attempt, base), end in zip(begun.items(), ends, strict=True)
    }
    steps = [line for line in said if "drawn" in line and line["step"] in accepted[line["attempt"]]]
    drawn = sorted(index for line in steps for index in line["drawn"])
    assert drawn == list(range(12 * max(line["step"] for line in steps)))


def spares(job: Job) -> list[str]:
    """Names of the pods that are no worker's."""
    return [
        pod["metadata"]["name"]
        for pod in job.living_pods()
        if names.LABEL_WORKER not in pod["metadata"]["labels"]
    ]


def wait_spares(job: Job, ready: int) -> None:
    job.wait(f"{ready} spares", lambda status: (status.get("spares") or {}).get("ready") == ready)


@pytest.mark.extended
def test_spare_takes_the_place_of_a_worker_whose_node_died(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2, spares=1)
    wait_spares(job, 1)
    job.wait_trained(13)
    (spare,) = spares(job)
    assert job.rack_of(0) != job.rack_of(1)
    recovery = job.hit("node")
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.pod_of(1) == spare, "no new pod had to be scheduled"
    job.wait_condition("SparesReady")
    assert spares(job) == [f"{job.name}-spare-1"], "and there is a new spare behind it"
    assert_same_as_undisturbed(job)
    cluster.wait_for(lambda: not spares(job), PATIENCE, "the spare to go with the job's end")


@pytest.mark.extended
def test_job_without_capacity_waits_with_a_reason_and_goes_on_from_memory(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job, before = jobs.start_trained(workers=2, failurePolicy={"capacityTimeoutSeconds": 2})
    lost = job.node_of(1)
    with cordoned(cluster, lost):
        cluster.faults.kill_node(lost)
        placed = job.wait_condition("Placed", "False", "NoCapacity")
        assert "unschedulable" in placed["message"], "what the scheduler says"
        held = job.reports()[0].holdings
        assert {holding.rank for holding in held} == {0, 1}, (
            "the survivor keeps its own and the lost worker's copies"
        )
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert "NoCapacity" in job.told()
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
    job.wait_trained(13)
    node, uid = job.node_of(1), job.get_job()["metadata"]["uid"]
    recovery = job.hit("delete")
    assert job.node_of(1) == node, "the new pod is where its memory is"
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    # A job that is deleted while it trains cannot tell its sidecars that nobody will come back.
    orphaned = jobs.apply({**manifest, "metadata": {**manifest["metadata"], "name": f"{job.name}-b"}})
    orphaned.wait_trained(6)
    home, other = orphaned.node_of(0), orphaned.get_job()["metadata"]["uid"]
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
    base, folder = "/dev/shm/tiercheck", names.NODE_MEMORY_DIR
    container = {
        "name": "janitor",
        "image": "tiercheck-sidecar",
        "command": f"{sys.executable} -m tiercheck_sidecar.node_memory {folder} --watch 0".split(),
        "volumeMounts": [{"name": "memory", "mountPath": folder}],
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
