"""Jobs live on the laptop cluster from first step to last, on any network and with any checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import PATIENCE, Job, Jobs, cordoned
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tests.lives import Lives
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.job import ObjectStore
from tiercheck_operator.kubernetes.api_server import JOBS, ApiFailure

pytestmark = pytest.mark.cluster


@pytest.mark.extended
def test_suspended_job_gives_its_pods_back_and_goes_on_from_the_remote_tier(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job, before = jobs.start_trained(workers=2)
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    assert job.living_pods() == []
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": False}})
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["step"] >= 10, "what was in memory was uploaded before the pods went"
    assert recovery["tiers"]["remote"] == 2
    assert job.status["restarts"]["crash"] == 0
    assert_same_as_undisturbed(job)


def test_deleted_job_leaves_nothing_behind_even_without_an_operator(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job = jobs.start(workers=2)
    job.wait_trained(6)
    assert job.belongings()
    cluster.faults.kill_operator()
    cluster.api.delete(JOBS, "default", job.name)
    cluster.wait_for(lambda: not job.belongings(), PATIENCE, "everything the job owned to be gone")
    assert cluster.api.find(JOBS, "default", job.name) is None
    jobs.restart_operator()


@pytest.mark.extended
def test_status_and_events_tell_the_story(jobs: Jobs, cluster: LocalCluster) -> None:
    job, before = jobs.start_trained(workers=2)
    assert before["placement"]["tolerates"], "the placement says what may be lost"
    assert before["phase"] == "Running"
    recovery = job.hit("evict")
    assert recovery["lostSteps"] >= 0
    assert recovery["totalSeconds"] >= recovery["detectSeconds"]
    assert "step" in recovery["reason"]
    job.wait_condition("Completed")
    assert job.status["phase"] == "Completed"
    wanted = {
        "AttemptStarted",
        "PodEvicted",
        "Recovered",
        "Completed",
    }  # an Event follows the status that it tells of
    cluster.wait_for(lambda: wanted <= {*job.told()}, PATIENCE, f"Events {wanted}")
    assert job.told().count("Completed") == 1, "an Event is posted once"


@pytest.mark.extended
def test_disruption_budget_refuses_an_eviction_during_a_restore_and_allows_it_afterwards(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job, before = jobs.start_trained(workers=2)
    job.wait_condition("Evictable")
    with cordoned(cluster, job.node_of(0)):
        # its replacement has nowhere to go: the restore takes as long as we like
        job.inject_fault("evict", 1)
        job.wait_condition("Evictable", "False", "RestoreUnderWay")
        with pytest.raises(ApiFailure, match="disruption budget") as refused:
            cluster.faults.evict_pod(job.pod_of(0))
        assert refused.value.status == 429
    recovery = job.wait_recovered(before["attempt"])
    job.wait_condition("Evictable")
    job.hit("evict", 0)
    assert [entry["attempt"] for entry in job.status["recoveries"]][-1] == recovery["attempt"]
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_two_workers_on_one_node_in_its_network_train_and_come_back_from_each_other(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    """Named by CIDR, loopback of both families stands for further networks: its copies go there."""
    only = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-0", "node-2"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [only]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    cluster.faults.kill_operator()
    # it has forgotten nodes that other tests gave it reason to shun, so both are used
    jobs.restart_operator()
    job, _ = jobs.start_trained(
        workers=4,
        pod={"hostNetwork": True, "affinity": affinity},
        peer={"interfaces": ["127.0.0.1/32", "::1/128"]},
    )
    assert len({pod["status"]["podIP"] for pod in job.living_pods()}) == 2, "two addresses for four pods"
    wait_until_it_carries(cluster, exchange_ports(job), "/proc/net/tcp", "0100007F")
    wait_until_it_carries(cluster, exchange_ports(job), "/proc/net/tcp6", f"{'0' * 24}01000000")
    assert job.wait_condition("Protected")["reason"] == "CopiesComplete", "no interface is missing"
    uids = job.uids()
    recovery = job.hit("delete")
    assert recovery["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert {worker for worker, uid in job.uids().items() if uid != uids[worker]} == {1}
    assert_same_as_undisturbed(job)


def exchange_ports(job: Job) -> set[int]:
    """Of the job's sidecars."""
    containers = [each for pod in job.living_pods() for each in pod["spec"]["initContainers"]]
    ports = [port for each in containers for port in each.get("ports") or ()]
    return {port["containerPort"] for port in ports if port["name"] == "exchange"}


def wait_until_it_carries(cluster: LocalCluster, ports: set[int], table: str, address: str) -> None:
    """The kernel's `table` has a connection to one of `ports` at `address`."""

    def look() -> bool:
        rows = [row.split() for row in Path(table).read_text().splitlines()[1:]]
        targets = {row[2].rpartition(":") for row in rows if row[3] == "01"}  # established
        return any(host == address and int(port, 16) in ports for host, _, port in targets)

    cluster.wait_for(look, 30.0, f"a connection between sidecars in {table}")


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_dcp.py"
ENDLESS = [sys.executable, str(EXAMPLE), "--steps", "1000000", "--pace", "0.05"]


def start(jobs: Jobs, bucket: ObjectStore) -> Job:
    """Two ranks of the example, with FSDP2."""
    env = {"OMP_NUM_THREADS": "1"}
    return jobs.start(2, command=ENDLESS, env=env, bucket=bucket, remote_every=10)


def undisturbed(lives: Lives, steps: int, folder: Path) -> dict[int, float]:
    """The losses of the same script on two ranks without a cluster."""
    command = [EXAMPLE, "--folder", folder, "--steps", str(steps), "--every", str(steps + 1)]
    said, _ = lives.run(["torch.distributed.fsdp", "tiercheck.dcp"], command, ranks=2)
    return {line["step"]: line["loss"] for line in said}


def assert_losses_of_an_undisturbed_run(job: Job, lives: Lives, folder: Path) -> None:
    lines = job.printed()
    wanted = undisturbed(lives, max(line["step"] for line in lines), folder)
    assert [line["loss"] for line in lines] == [wanted[line["step"]] for line in lines]


@pytest.mark.extended
def test_it_comes_back_from_memory_and_after_the_loss_of_all_pods_from_the_bucket(
    jobs: Jobs, bucket: ObjectStore, lives: Lives, tmp_path: Path
) -> None:
    job = start(jobs, bucket)
    job.wait_trained(13)
    uids = job.uids()
    recovery = job.hit("crash")
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    assert recovery["step"] >= 5
    assert job.uids() == uids, "survivors are never recreated"
    job.wait_trained(recovery["step"] + 3, tier="remote")
    recovery = job.hit("delete every pod")
    assert recovery["tiers"] == {"local": 0, "peer": 0, "remote": 2}
    assert recovery["step"] >= 10
    job.wait_trained(recovery["step"] + 3)
    assert_losses_of_an_undisturbed_run(job, lives, tmp_path / "alone")


@pytest.mark.extended
def test_suspended_job_of_two_goes_on_with_one_that_reads_what_both_saved(
    jobs: Jobs, cluster: LocalCluster, bucket: ObjectStore, lives: Lives, tmp_path: Path
) -> None:
    job = start(jobs, bucket)
    before = job.wait_trained(13)
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    alone = {"spec": {"workers": 1, "suspend": False, "tiers": {"peer": None}}}
    cluster.api.patch(JOBS, "default", job.name, alone)
    recovery = job.wait_recovered(before["attempt"])
    assert "made by 2 ranks, from which 1 read their parts" in recovery["reason"]
    job.wait_trained(recovery["step"] + 3, tier="remote")
    lines = job.printed()
    wanted = undisturbed(lives, max(line["step"] for line in lines), tmp_path / "alone")
    first = [line["loss"] for line in lines if line["step"] == recovery["step"] + 1]
    assert set(first) == {wanted[recovery["step"] + 1]}, "the same weights to the last bit"
    assert [line["loss"] for line in lines] == pytest.approx(
        [wanted[line["step"]] for line in lines], rel=1e-5
    )
