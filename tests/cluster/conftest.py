"""Runs one laptop cluster with the real operator for all tests here, which bring their own jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.access import BOTH_SERVERS
from tests.cluster.jobs import OPERATOR_ENV, Jobs
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.job import ObjectStore, credentials
from tiercheck_local.nodespec import NodeSpec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", params=BOTH_SERVERS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """Four nodes in two racks. Nodes that a test has killed are brought back after it."""
    nodes = NodeSpec.load(ROOT / "examples" / "clusters" / "two-racks.yaml")
    folder = tmp_path_factory.mktemp("cluster")
    with LocalCluster(folder, nodes, request.param, lease_grace=4.0, cuttable=True) as cluster:
        cluster.apply_crds(ROOT / "crds")
        cluster.start_operator(OPERATOR_ENV)
        yield cluster


@pytest.fixture(scope="session")
def bucket(cluster: LocalCluster) -> Iterator[ObjectStore]:
    """An S3 server with a bucket, and in the cluster the Secret that opens it."""
    with ObjectStore(cluster.logs / "s3.log", "checkpoints") as store:
        cluster.apply(credentials())
        yield store


@pytest.fixture
def jobs(cluster: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Makes jobs, and removes them and repairs the cluster afterwards."""
    made = Jobs(cluster, tmp_path)
    yield made
    cluster.faults.restore_links()
    made.clean_up()
    for name in cluster.nodes:
        if cluster.agents[name].poll() is not None:
            cluster.faults.revive_node(name)
        else:
            cluster.faults.heal_node(name)
    cluster.wait_for(cluster.all_ready, 60, "all nodes to be Ready again")
