"""Neighbours who mean harm change nothing of mine, and the real operator stays well.

Whatever one team makes the operator keep, it has memory for the others, and its owner is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import Replica
from tests.operator.kubelet_words import made_by
from tests.operator.kubernetes.proxy import adding
from tests.operator.kubernetes.test_login import BRACKETS
from tests.operator.test_operator_process import job
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
CORE = "/api/v1/namespaces/{}"
JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/{}/tiercheckjobs"
DEADLINE = 90.0
QUICK = {"TIERCHECK_WATCH_CHECK_SECONDS": "1", "TIERCHECK_WATCH_GRACE_SECONDS": "3"}
Object = dict[str, Any]


def hostile_pod(name: str, job_uid: str, annotation: str = "", **labels: str) -> Object:
    """With all that a pod of the job has, in another namespace."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "attacker",
            "labels": {"tiercheck.io/job-uid": job_uid, "tiercheck.io/worker": "0", **labels},
            "annotations": {"tiercheck.io/attached": annotation} if annotation else {},
            "ownerReferences": made_by(job_uid),
        },
        "spec": {
            "initContainers": [
                {"name": "tiercheck-sidecar", "image": "evil.example/steal:1", "restartPolicy": "Always"}
            ],
            "containers": [{"name": "trainer", "image": "evil.example/steal:1"}],
        },
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Without nodes: pods stay Pending, so only the operator's own doing is seen."""
    with LocalCluster(tmp_path_factory.mktemp("cluster"), []) as started:
        started.apply_crds(ROOT / "crds")
        for name in ("attacker", "claimant"):
            started.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        yield started


def page(cluster: LocalCluster, path: str) -> str:
    return Replica("operator", cluster.operator, cluster.metrics_address).page(path)  # type: ignore[arg-type]


def pods(cluster: LocalCluster, uid: str, namespace: str = "default") -> list[Object]:
    path = CORE.format(namespace) + f"/pods?labelSelector=tiercheck.io/job-uid={uid}"
    found: list[Object] = cluster.api.request("GET", path)["items"]
    return found


def written(found: list[Object]) -> dict[str, Object]:
    """All but what schedulers and kubelets say, by UID."""
    return {
        pod["metadata"]["uid"]: {
            "spec": pod["spec"],
            **{key: pod["metadata"].get(key) for key in ("labels", "annotations", "deletionTimestamp")}
        }
        for pod in found
    }  # fmt: skip


def images(pod: Object) -> set[str]:
    spec = pod["spec"]
    return {str(entry["image"]) for entry in [*spec["initContainers"], *spec["containers"]]}


def refused(cluster: LocalCluster, name: str) -> str:
    """What the conditions of a job say."""
    status = cluster.api.request("GET", f"{JOBS.format('default')}/{name}").get("status") or {}
    return " ".join(str(entry.get("message")) for entry in status.get("conditions") or [])


def test_nothing_of_mine_changes_and_the_operator_stays_well(cluster: LocalCluster) -> None:
    # A suspended job has no image yet, and no pods: whoever comes first could claim both.
    cluster.apply(job("mine", suspend=True))
    uid = str(cluster.api.request("GET", f"{JOBS.format('default')}/mine")["metadata"]["uid"])
    for number, annotation in enumerate(("[" * 5000, '{"container":' * 1500, "null", '{"owner": 7}', "")):
        poison = hostile_pod(f"poison-{number}", uid, annotation, **{"tiercheck.io/incarnation": "900"})
        cluster.apply(poison)
    for number, worker in enumerate(("1", "7", "99999999999999999999", "x", "0x1")):
        cluster.apply(hostile_pod(f"worker-{number}", uid, **{"tiercheck.io/worker": worker}))
    claim = {"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": uid}
    claims = job("claims", namespace="claimant", workers=1, attach={"owner": claim, "container": "c"})
    del claims["spec"]["template"]
    cluster.apply(claims)
    before = written(pods(cluster, uid, "attacker"))
    assert len(before) == 10

    operator = cluster.start_operator(QUICK)
    try:
        cluster.wait_for(lambda: page(cluster, "/readyz"), DEADLINE, "the operator to be ready")
        assert pods(cluster, uid) == []
        cluster.apply(job("mine", suspend=False))
        cluster.wait_for(lambda: len(pods(cluster, uid)) == 2, DEADLINE, "the pods of the job")
        assert {pod["metadata"]["labels"]["tiercheck.io/worker"] for pod in pods(cluster, uid)} == {"0", "1"}
        for pod in pods(cluster, uid):
            assert not any("evil" in image for image in images(pod))

        # Longer than an object may go unseen: a watch that choked on one would be called deaf by now.
        checks = compared(cluster)
        cluster.wait_for(lambda: compared(cluster) >= checks + 6, DEADLINE, "six listings of pods")
        assert page(cluster, "/healthz") == "ok\n"
        assert written(pods(cluster, uid, "attacker")) == before, "neither deleted nor written to"
    finally:
        operator.terminate()
        operator.wait()


def compared(cluster: LocalCluster) -> int:
    """Lists that the operator asked for, by its own count of calls."""
    lines = page(cluster, "/metrics").splitlines()
    wanted = [line for line in lines if "api_request" in line and "_count{" in line and 'verb="GET"' in line]
    return int(sum(float(line.rpartition(" ")[2]) for line in wanted)) // 3


def test_namesake_of_what_a_job_owns_is_left_as_it_is_and_the_job_says_so(cluster: LocalCluster) -> None:
    mine = [("Service", "services", "", "spec", {"ports": [{"port": 80}]})]
    mine.append(("Secret", "secrets", "-credentials", "data", {}))
    versions: dict[str, str] = {}
    for kind, path, suffix, key, content in mine:
        name = f"named-{kind.lower()}{suffix}"
        metadata = {"name": name, "namespace": "default"}
        cluster.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, key: content})
        where = f"{CORE.format('default')}/{path}/{name}"
        versions[where] = cluster.api.request("GET", where)["metadata"]["resourceVersion"]
    operator = cluster.start_operator(QUICK)
    try:
        for kind, _, suffix, *_ in mine:
            name = f"named-{kind.lower()}"
            cluster.apply(job(name))
            cluster.wait_for(
                lambda name=name: "not this job's" in refused(cluster, name), DEADLINE, "the job to say so"
            )
            assert f"{kind} {name}{suffix}" in refused(cluster, name)
        for where, version in versions.items():
            assert cluster.api.request("GET", where)["metadata"]["resourceVersion"] == version
    finally:
        operator.terminate()
        operator.wait()


MIB = 2**20
MANY = 50


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", []) as started:
        started.apply_crds(ROOT / "crds")
        started.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "hostile"}})
        yield started


def bomb(number: int, junk: str) -> bytes:
    raw = job(f"bomb{number}", namespace="hostile", suspend=True)
    raw["metadata"] |= {"uid": raw["metadata"]["name"], "resourceVersion": "2", "generation": 1}
    return json.dumps(raw).replace('"containers"', f'"junk": {junk}, "containers"', 1).encode()


def huge(number: int) -> str:
    kinds = list(BRACKETS.values())
    return kinds[number % len(kinds)]


def just_allowed(number: int) -> str:
    return "[" + ",".join(["{}"] * 2_000) + "]" if number % 2 else f'"{"x" * 900_000}"'


@pytest.mark.parametrize(("junk", "every_owner_is_told"), [(huge, True), (just_allowed, False)])
def test_operator_stays_small_and_serves_the_others_beside_fifty_jobs_of_any_shape(
    crowded: LocalCluster, tmp_path: Path, junk: Callable[[int], str], every_owner_is_told: bool
) -> None:
    bombs = {f"bomb{number}": bomb(number, junk(number)) for number in range(MANY)}
    crowded.apply(job("mine"))
    uid = crowded.api.request("GET", "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs/mine")
    with adding(crowded.kubeconfig, tmp_path / "kubeconfig", "tiercheckjobs", bombs) as told:
        operator = crowded.start_operator({**QUICK, "KUBECONFIG": str(tmp_path / "kubeconfig")})
        largest = 0

        def served() -> bool:
            nonlocal largest
            assert operator.poll() is None
            largest = max(largest, int(Path(f"/proc/{operator.pid}/statm").read_text().split()[1]) * 4096)
            owners = len(told) >= MANY
            return len(pods(crowded, uid["metadata"]["uid"])) == 2 and (owners or not every_owner_is_told)

        crowded.wait_for(served, DEADLINE, "the pods of the other team's job")
        operator.kill()
        operator.wait()
    assert largest < (200 + MANY) * MIB
    assert all("left alone" in message for message in told if every_owner_is_told)


def test_job_that_is_too_large_is_told_so_and_served_once_it_is_shorter(crowded: LocalCluster) -> None:
    crowded.start_operator(QUICK)
    large: Object = job("large")
    large["spec"]["template"]["spec"]["junk"] = [{}] * 100_000
    crowded.apply(large)
    crowded.wait_for(lambda: "MiB are the most" in refused(crowded, "large"), DEADLINE, "the condition")
    assert "make it shorter" in refused(crowded, "large")
    path = f"{CORE.format('default')}/events"
    events = crowded.api.request("GET", path)["items"]
    assert [event["reason"] for event in events] == ["NotUnderstood"]
    where = "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs/large"
    uid = crowded.api.request("GET", where)["metadata"]["uid"]
    large["spec"]["template"]["spec"]["junk"] = None
    crowded.apply(large)
    crowded.wait_for(lambda: len(pods(crowded, uid)) == 2, DEADLINE, "its pods")
