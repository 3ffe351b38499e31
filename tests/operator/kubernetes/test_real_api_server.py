"""A real API server admits our pods without a word, and the shipped RBAC is enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.access import REAL_SERVER
from tests.operator.kubernetes.proxy import (
    in_phase,
    post,
    service_account_kubeconfig,
    short_job,
    status,
)
from tests.operator.manifests.test_pod_manifest import with_pod
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec
from tiercheck_operator.manifests.owned import build_service
from tiercheck_operator.manifests.pod import build_pod, build_spare
from tiercheck_operator.manifests.pod_settings import forbidden
from tiercheck_operator.manifests.resources import limits_advice
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.parsing import parse_job

pytestmark = [*REAL_SERVER, pytest.mark.cluster]

ROOT = Path(__file__).parents[3]
RESTRICTED = "restricted"
DEADLINE = 90.0
SECURE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """With a namespace in which only restricted pods may be made, and with what `kubectl apply -f deploy/`
    makes."""
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"), [NodeSpec("n1"), NodeSpec("n2")], "real"
    ) as started:
        started.apply_crds(ROOT / "crds")
        levels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}
        started.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": RESTRICTED, "labels": levels}}
        )
        started.apply_file(ROOT / "deploy" / "operator.yaml")
        yield started


def job(**changes: Any) -> JobView:
    """A compliant user's job, as the operator sees it."""
    tiers = {"local": {"sizeLimit": "1Gi"}, **changes.pop("tiers", {})}
    template = {
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "trainer",
                    "image": "train:1",
                    "command": ["torchrun", "train.py"],
                    "resources": {"limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}},
                    "securityContext": SECURE,
                }
            ],
        }
    }
    return parse_job(
        {
            "metadata": {
                "name": "gpt",
                "namespace": RESTRICTED,
                "uid": "0b0e1b9e-6ad5-4a43-9d0c-6b2c4d9f7a10",
            },
            "spec": {"workers": 2, "template": template, "tiers": tiers, **changes},
        }
    )


S3 = {"bucket": "b", "prefix": "p", "region": "eu-central-1"}
CASES = {
    "no remote tier": job(),
    "s3 with the pod's own identity": job(tiers={"remote": {"s3": S3}}),
    "s3 with a Secret": job(tiers={"remote": {"s3": {**S3, "credentialsSecretName": "aws"}}}),
    "a directory": job(
        tiers={
            "remote": {"directory": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}, "subPath": "x"}}
        }
    ),
    "eight processes": job(procsPerWorker=8, topology={"preset": "gke"}),
}


def admit(
    cluster: LocalCluster, pod: dict[str, Any], namespace: str = RESTRICTED
) -> tuple[int, dict[str, Any], list[str]]:
    """Status, answer and warnings, under strict validation; the pod is not made."""
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldValidation=Strict"
    return post(cluster.kubeconfig, path, pod)


@pytest.mark.parametrize("avoid", [(), ("n1",)], ids=["anywhere", "not on n1"])
@pytest.mark.parametrize("case", CASES)
def test_restricted_namespace_admits_our_pods_without_a_warning(
    cluster: LocalCluster, case: str, avoid: tuple[str, ...]
) -> None:
    status, answer, warnings = admit(cluster, build_pod(CASES[case], 1, 0, avoid, "tiercheck-sidecar:1"))
    assert (status, warnings) == (201, []), answer.get("message")


BOUND = {"requests": {"cpu": "16", "memory": "64Gi"}, "limits": {"cpu": "16", "memory": "64Gi"}}


@pytest.mark.parametrize("whole", [False, True], ids=["each container", "the pod as a whole"])
@pytest.mark.parametrize("resources", [BOUND, {"limits": BOUND["limits"]}], ids=["both", "limits only"])
def test_api_server_calls_a_guaranteed_pod_guaranteed_with_our_containers_in_it_too(
    cluster: LocalCluster, resources: dict[str, Any], whole: bool
) -> None:
    template = job().spec.template["spec"]
    bound = [{**entry, "resources": {} if whole else resources} for entry in template["containers"]]
    spec = {**template, "containers": bound, **({"resources": resources} if whole else {})}
    status, answer, _ = admit(cluster, build_pod(with_pod(job(), **spec), 0, 0, (), "tiercheck-sidecar:1"))
    assert status == 201, answer.get("message")
    if whole and "resources" not in answer["spec"]:
        pytest.skip("this API server is older than resources of pods (1.34)")
    assert answer["status"]["qosClass"] == "Guaranteed"


LIMITS = [
    {"type": "Container", "default": {"cpu": "100m"}},
    {"type": "Container", "maxLimitRequestRatio": {"cpu": "4"}},
]


@pytest.mark.parametrize("rule", LIMITS, ids=["default limit", "ratio"])
def test_pod_that_a_limit_range_refuses_is_accepted_once_the_advice_is_followed(
    cluster: LocalCluster, rule: dict[str, Any]
) -> None:
    namespace = f"limited-{LIMITS.index(rule)}"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    limit_range = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "rules"},
        "spec": {"limits": [rule]},
    }
    assert post(cluster.kubeconfig, f"/api/v1/namespaces/{namespace}/limitranges", limit_range)[0] == 201
    bounds = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
    containers = [{**entry, "resources": bounds} for entry in job().spec.template["spec"]["containers"]]
    view = replace(with_pod(job(), containers=containers), namespace=namespace)

    def answer(view: JobView) -> tuple[int, str]:
        status, said, _ = admit(cluster, build_pod(view, 0, 0, (), "s:1"), namespace)
        return status, str(said.get("message"))

    cluster.wait_for(lambda: answer(view)[0] >= 400, DEADLINE, "the API server knows the rule")
    assert "spec.sidecar.resources.limits.cpu" in limits_advice(answer(view)[1])
    advised = {"requests": {"cpu": "500m"}, "limits": {"cpu": "1"}}
    status, said = answer(replace(view, spec=replace(view.spec, sidecar_resources=advised)))
    assert status == 201, said


def test_pod_in_its_nodes_network_is_accepted_where_that_is_allowed_and_refused_with_words_where_not(
    cluster: LocalCluster,
) -> None:
    pod = build_pod(with_pod(job(), hostNetwork=True), 0, 0, (), "s:1")
    elsewhere = {**pod, "metadata": {**pod["metadata"], "namespace": "default"}}
    status, answer, _ = admit(cluster, elsewhere, "default")
    assert status == 201, answer.get("message")
    sidecar = next(entry for entry in answer["spec"]["initContainers"] if entry.get("ports"))
    assert all(port["hostPort"] == port["containerPort"] for port in sidecar["ports"])
    status, answer, _ = admit(cluster, pod)
    assert status == 403
    assert "host namespaces (hostNetwork=true)" in answer["message"]


def test_restricted_namespace_is_really_restricted(cluster: LocalCluster) -> None:
    pod = build_pod(CASES["no remote tier"], 1, 0, (), "tiercheck-sidecar:1")
    del pod["spec"]["containers"][0]["securityContext"]
    status, answer, _ = admit(cluster, pod)
    assert status == 403
    assert "violates PodSecurity" in answer["message"]


def test_service_is_admitted_under_strict_validation(cluster: LocalCluster) -> None:
    path = f"/api/v1/namespaces/{RESTRICTED}/services?dryRun=All&fieldValidation=Strict"
    assert post(cluster.kubeconfig, path, build_service(job()))[::2] == (201, [])


def test_shipped_manifests_are_valid_and_their_pod_is_restricted(cluster: LocalCluster) -> None:
    documents = [
        entry for entry in yaml.safe_load_all((ROOT / "deploy" / "operator.yaml").read_text()) if entry
    ]
    (deployment,) = [entry for entry in documents if entry["kind"] == "Deployment"]
    path = "/apis/apps/v1/namespaces/tiercheck-system/deployments?dryRun=All&fieldValidation=Strict"
    copy = {**deployment, "metadata": {**deployment["metadata"], "name": "copy"}}
    assert post(cluster.kubeconfig, path, copy)[::2] == (201, [])
    template = deployment["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": "p"},
        "spec": template["spec"],
    }
    status, answer, warnings = admit(cluster, pod)
    assert (status, warnings) == (201, []), answer.get("message")


# The operator as its own service account.


def condition(cluster: LocalCluster, name: str, namespace: str, kind: str) -> dict[str, Any]:
    conditions = status(cluster, name, namespace).get("conditions") or []
    return next((entry for entry in conditions if entry["type"] == kind), {})


def until_refused(cluster: LocalCluster, name: str) -> None:
    placed = partial(condition, cluster, name, RESTRICTED, "Placed")
    cluster.wait_for(lambda: placed().get("reason") == "Refused", DEADLINE, "the reason")


def run_as_service_account(cluster: LocalCluster, tmp_path: Path) -> Path:
    """Start the operator with the shipped rights and no others; returns its log."""
    kubeconfig = service_account_kubeconfig(
        cluster.kubeconfig, "tiercheck-system", "tiercheck-operator", tmp_path / "kubeconfig"
    )
    log = cluster.logs / "operator.log"
    log.unlink(missing_ok=True)
    cluster.start_operator({"KUBECONFIG": str(kubeconfig)})
    return log


@pytest.fixture
def stopped_operator(cluster: LocalCluster) -> Iterator[None]:
    yield
    if cluster.operator is not None:
        cluster.operator.terminate()
        cluster.operator.wait(30)


@pytest.mark.usefixtures("stopped_operator")
def test_pods_that_admission_refuses_are_explained_and_made_once_it_allows_them(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    log = run_as_service_account(cluster, tmp_path)
    manifest = short_job("careless", RESTRICTED)
    del manifest["spec"]["template"]["spec"]["securityContext"]
    cluster.apply(manifest)
    until_refused(cluster, "careless")
    placed = condition(cluster, "careless", RESTRICTED, "Placed")
    assert placed["status"] == "False"
    assert "violates PodSecurity" in placed["message"]
    assert status(cluster, "careless", RESTRICTED)["phase"] == "Pending"
    cluster.wait_for(  # Events follow the status that they tell of
        lambda: any(
            "violates PodSecurity" in event["message"]
            for event in cluster.api.request("GET", f"/api/v1/namespaces/{RESTRICTED}/events")["items"]
        ),
        DEADLINE,
        "the Event",
    )

    def enforce(level: str) -> None:
        labels = {"pod-security.kubernetes.io/enforce": level}
        namespaces = cluster.api.resource("v1", "Namespace")
        cluster.api.patch(namespaces, None, RESTRICTED, {"metadata": {"labels": labels}})

    enforce("privileged")
    try:
        in_phase(cluster, "careless", RESTRICTED, "Completed")
    finally:
        enforce("restricted")
    assert condition(cluster, "careless", RESTRICTED, "Placed")["status"] == "True"
    tries = [
        line for line in log.read_text().splitlines() if "violates PodSecurity" in line and "WARNING" in line
    ]
    assert len(tries) < 20, "refused pods are tried again in a tight loop"


@pytest.mark.usefixtures("stopped_operator")
def test_misspelt_field_of_the_template_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    run_as_service_account(cluster, tmp_path)
    manifest = short_job("misspelt", RESTRICTED)
    manifest["spec"]["template"]["spec"]["priorityClasName"] = "high"
    cluster.apply(manifest)
    until_refused(cluster, "misspelt")
    assert (
        'unknown field "spec.priorityClasName"'
        in condition(cluster, "misspelt", RESTRICTED, "Placed")["message"]
    )


@pytest.mark.usefixtures("stopped_operator")
def test_secret_of_somebody_else_is_left_alone_and_named(cluster: LocalCluster, tmp_path: Path) -> None:
    run_as_service_account(cluster, tmp_path)
    foreign = {"name": "taken-credentials", "namespace": RESTRICTED}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": foreign, "stringData": {"mine": "x"}})
    cluster.apply(short_job("taken", RESTRICTED))
    until_refused(cluster, "taken")
    assert "taken-credentials" in condition(cluster, "taken", RESTRICTED, "Placed")["message"]
    secret = f"/api/v1/namespaces/{RESTRICTED}/secrets/taken-credentials"
    assert set(cluster.api.request("GET", secret)["data"]) == {"mine"}
    cluster.api.request("DELETE", secret)
    in_phase(cluster, "taken", RESTRICTED, "Completed")


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_node_memory_in_a_namespace_that_allows_no_host_path_is_refused_in_words_that_are_recognised(
    cluster: LocalCluster, level: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": f"no-host-path-{level}", "labels": labels},
        }
    )
    wanted = job(tiers={"local": {"medium": "NodeMemory", "sizeLimit": "1Gi"}})
    wanted = replace(wanted, namespace=f"no-host-path-{level}")
    pod = build_pod(wanted, 1, 0, (), "tiercheck-sidecar:1")
    status, answer, _ = admit(cluster, pod, f"no-host-path-{level}")
    assert status == 403
    assert "pod-security.kubernetes.io/enforce=privileged" in forbidden(wanted, answer["message"])


def test_node_memory_is_admitted_where_host_paths_are(cluster: LocalCluster) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "host-path", "labels": labels}}
    )
    wanted = replace(
        job(tiers={"local": {"medium": "NodeMemory", "sizeLimit": "1Gi"}}), namespace="host-path"
    )
    for pod in (
        build_pod(wanted, 1, 0, (), "tiercheck-sidecar:1"),
        build_spare(wanted, 0, (), "tiercheck-sidecar:1"),
    ):
        status, answer, _ = admit(cluster, pod, "host-path")
        assert status == 201, answer.get("message")
