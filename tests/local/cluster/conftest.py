"""One embedded cluster for all tests of this folder, one real one if it is there: starting costs more than testing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pod_builder import PodBuilder

from tiercheck_local.client import PODS
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec

DEADLINE = 30.0


class Bench:
    """A cluster with the questions that the tests ask."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster, self.faults, self.api = cluster, cluster.faults, cluster.api

    def run(self, builder: PodBuilder) -> str:
        """Apply the pod; its name."""
        self.cluster.apply(builder.manifest)
        return builder.name

    def pod(self, name: str) -> dict[str, Any]:
        return self.api.get(PODS, "default", name)

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        return self.cluster.wait_for(condition, DEADLINE, what)

    def phase(self, name: str, *phases: str) -> dict[str, Any]:
        """Wait until the pod is in one of `phases`; the pod."""
        self.wait(f"pod {name} to be {phases}", lambda: self.pod(name).get("status", {}).get("phase") in phases)
        return self.pod(name)

    def ready(self, name: str) -> dict[str, Any]:
        self.wait(f"pod {name} to be ready", lambda: condition(self.pod(name), "Ready") == "True")
        return self.pod(name)

    def gone(self, name: str) -> None:
        self.wait(f"pod {name} to be gone", lambda: self.api.find(PODS, "default", name) is None)

    def log(self, name: str, container: str = "main") -> str:
        file = self.cluster.logs / name / f"{container}.log"
        return file.read_text() if file.exists() else ""

    def logged(self, name: str, text: str, container: str = "main") -> None:
        self.wait(f"{text!r} in the log of {name}", lambda: text in self.log(name, container))


def condition(item: dict[str, Any], kind: str) -> str:
    conditions = item.get("status", {}).get("conditions") or []
    return next((str(entry["status"]) for entry in conditions if entry["type"] == kind), "")


def _bench(kind: str, directory: Path) -> Iterator[Bench]:
    nodes = [NodeSpec(spec.name, spec.labels, pods=20) for spec in NodeSpec.racks(3, 2)]
    with LocalCluster(directory, nodes, kind, lease_grace=1.5) as cluster:
        yield Bench(cluster)


@pytest.fixture(scope="session")
def embedded_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from _bench("embedded", tmp_path_factory.mktemp("embedded"))


@pytest.fixture(scope="session")
def real_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if not os.environ.get("KUBEBUILDER_ASSETS"):
        pytest.skip("KUBEBUILDER_ASSETS is not set: no etcd and kube-apiserver to test against")
    yield from _bench("real", tmp_path_factory.mktemp("real"))


@pytest.fixture
def bench(embedded_bench: Bench) -> Bench:
    return embedded_bench


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.real)])
def each_bench(request: pytest.FixtureRequest) -> Bench:
    bench: Bench = request.getfixturevalue(f"{request.param}_bench")
    return bench
