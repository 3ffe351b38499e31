"""Jobs whose pods share their nodes' network train and come back as anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.jobs import Job, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck_cli.api_server import PODS
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster


@pytest.mark.extended
def test_two_workers_on_one_node_in_its_network_train_and_come_back_from_each_other(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    """Named by CIDR, loopback of both families stands for further networks: its copies go there."""
    manifest = jobs.manifest(workers=4)
    manifest["spec"].setdefault("tiers", {}).setdefault("peer", {})["interfaces"] = [
        "127.0.0.1/32",
        "::1/128",
    ]
    spec = manifest["spec"]["template"]["spec"]
    spec["hostNetwork"] = True
    only = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-0", "node-2"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [only]}]}
    spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    cluster.faults.kill_operator()
    # it has forgotten nodes that other tests gave it reason to shun, so both are used
    jobs.restart_operator()
    job = jobs.apply(manifest)
    before = job.wait_trained(13)
    assert len({pod["status"]["podIP"] for pod in job.pods()}) == 2, "two addresses for four pods"
    wait_until_it_carries(cluster, exchange_ports(job), "/proc/net/tcp", "0100007F")
    wait_until_it_carries(cluster, exchange_ports(job), "/proc/net/tcp6", f"{'0' * 24}01000000")
    assert job.wait_condition("Protected")["reason"] == "CopiesComplete", "no interface is missing"
    uids = job.uids()
    cluster.api.delete(PODS, "default", job.stage.pod(1)["metadata"]["name"])
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert {worker for worker, uid in job.uids().items() if uid != uids[worker]} == {1}
    assert_same_as_undisturbed(job)


def exchange_ports(job: Job) -> set[int]:
    """Of the job's sidecars."""
    containers = [each for pod in job.pods() for each in pod["spec"]["initContainers"]]
    ports = [port for each in containers for port in each.get("ports") or ()]
    return {port["containerPort"] for port in ports if port["name"] == "exchange"}


def wait_until_it_carries(cluster: LocalCluster, ports: set[int], table: str, address: str) -> None:
    """The kernel's `table` has a connection to one of `ports` at `address`."""

    def look() -> bool:
        rows = [row.split() for row in Path(table).read_text().splitlines()[1:]]
        targets = {row[2].rpartition(":") for row in rows if row[3] == "01"}  # established
        return any(host == address and int(port, 16) in ports for host, _, port in targets)

    cluster.wait_for(look, 30.0, f"a connection between sidecars in {table}")
