"""Starts one embedded cluster, and a real one if it is there, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.access import BOTH_SERVERS
from tests.local.cluster.bench import Bench
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec


def _bench(kind: str, directory: Path) -> Iterator[Bench]:
    nodes = [NodeSpec(spec.name, spec.labels, pods=20) for spec in NodeSpec.racks(3, 2)]
    with LocalCluster(directory, nodes, kind, lease_grace=1.5, back_off=0.5) as cluster:
        yield Bench(cluster)


@pytest.fixture(scope="session")
def embedded_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from _bench("embedded", tmp_path_factory.mktemp("embedded"))


@pytest.fixture(scope="session")
def real_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from _bench("real", tmp_path_factory.mktemp("real"))


@pytest.fixture
def bench(embedded_bench: Bench) -> Iterator[Bench]:
    """The pods of a test go with it."""
    yield embedded_bench
    embedded_bench.faults.delete_pods()


@pytest.fixture(params=BOTH_SERVERS)
def each_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench: Bench = request.getfixturevalue(f"{request.param}_bench")
    yield bench
    bench.faults.delete_pods()
