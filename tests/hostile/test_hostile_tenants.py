"""Whatever one team makes the operator keep, it has memory for the others, and its owner is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostile.test_hostile_neighbours import (
    CORE,
    DEADLINE,
    QUICK,
    ROOT,
    Object,
    job,
    pods,
    refused,
)
from tests.operator.kubernetes.proxy import adding
from tests.operator.kubernetes.test_login import BRACKETS
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster

MIB = 2**20
MANY = 50


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", []) as started:
        started.apply_crds(ROOT / "crds")
        started.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "hostile"}})
        yield started


def bomb(number: int, junk: str) -> bytes:
    raw = job(f"bomb{number}", "hostile", suspend=True)
    raw["metadata"] |= {"uid": raw["metadata"]["name"], "resourceVersion": "2", "generation": 1}
    return json.dumps(raw).replace('"containers"', f'"junk": {junk}, "containers"', 1).encode()


def huge(number: int) -> str:
    kinds = list(BRACKETS.values())
    return kinds[number % len(kinds)]


def just_allowed(number: int) -> str:
    return "[" + ",".join(["{}"] * 2_000) + "]" if number % 2 else f'"{"x" * 900_000}"'


@pytest.mark.parametrize(("junk", "every_owner_is_told"), [(huge, True), (just_allowed, False)])
def test_operator_stays_small_and_serves_the_others_beside_fifty_jobs_of_any_shape(
    cluster: LocalCluster, tmp_path: Path, junk: Callable[[int], str], every_owner_is_told: bool
) -> None:
    bombs = {f"bomb{number}": bomb(number, junk(number)) for number in range(MANY)}
    cluster.apply(job("mine"))
    uid = cluster.api.request("GET", "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs/mine")
    with adding(cluster.kubeconfig, tmp_path / "kubeconfig", "tiercheckjobs", bombs) as told:
        operator = cluster.start_operator({**QUICK, "KUBECONFIG": str(tmp_path / "kubeconfig")})
        largest = 0

        def served() -> bool:
            nonlocal largest
            assert operator.poll() is None
            largest = max(largest, int(Path(f"/proc/{operator.pid}/statm").read_text().split()[1]) * 4096)
            owners = len(told) >= MANY
            return len(pods(cluster, uid["metadata"]["uid"])) == 2 and (owners or not every_owner_is_told)

        cluster.wait_for(served, DEADLINE, "the pods of the other team's job")
        operator.kill()
        operator.wait()
    assert largest < (200 + MANY) * MIB
    assert all("left alone" in message for message in told if every_owner_is_told)


def test_job_that_is_too_large_is_told_so_and_served_once_it_is_shorter(cluster: LocalCluster) -> None:
    cluster.start_operator(QUICK)
    large: Object = job("large")
    large["spec"]["template"]["spec"]["junk"] = [{}] * 100_000
    cluster.apply(large)
    cluster.wait_for(lambda: "MiB are the most" in refused(cluster, "large"), DEADLINE, "the condition")
    assert "make it shorter" in refused(cluster, "large")
    path = f"{CORE.format('default')}/events"
    events = cluster.api.request("GET", path)["items"]
    assert [event["reason"] for event in events] == ["NotUnderstood"]
    where = "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs/large"
    uid = cluster.api.request("GET", where)["metadata"]["uid"]
    large["spec"]["template"]["spec"]["junk"] = None
    cluster.apply(large)
    cluster.wait_for(lambda: len(pods(cluster, uid)) == 2, DEADLINE, "its pods")
