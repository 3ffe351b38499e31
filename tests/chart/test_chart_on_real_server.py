"""Installed by the real Helm SDK on a real API server: what it leaves, and whether its rights are enough and no more.

There are no controllers for Deployments here, so the operator's process is started by the test, with the environment of the
Deployment and the token of the chart's service account.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_under_test import CHART, NAMESPACE, RELEASE, ROOT, granted, helm, objects, of_kind, values_of
from real_cluster import post, service_account_kubeconfig
from recorder import Recording, recording

from tiercheck_local.client import ApiFailure
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.skipif(
        not os.environ.get("KUBEBUILDER_ASSETS"),
        reason="KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver",
    ),
]

DEADLINE = 90.0
JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/{}/tiercheckjobs"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/tiercheckjobs.tiercheck.io"
ACCOUNT = f"{RELEASE}-operator"
UNSEEN = {("tiercheck.io", "tiercheckjobs/finalizers", "update")}
"""Checked by an admission plug-in that is off here (OwnerReferencesPermissionEnforcement), without a request of its own."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), [NodeSpec("n1"), NodeSpec("n2")], "real") as started:
        for name, labels in (
            ("training", {}),
            ("elsewhere", {}),
            ("strict", {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}),
        ):
            started.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        yield started


@pytest.fixture
def helm_config(cluster: LocalCluster) -> Iterator[Any]:
    """Helm on that cluster. Whatever a test leaves installed is removed, the definition and its jobs included."""
    with helm.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as config:
        yield config
        if cluster.operator is not None:
            cluster.operator.terminate()
            cluster.operator.wait(30)
            cluster.operator = None
        config.uninstall(RELEASE, ignore_not_found=True)
        if exists(cluster, CRD):
            cluster.api.request("DELETE", CRD)
        cluster.wait_for(lambda: not exists(cluster, CRD), DEADLINE, "the definition to go")


def install(
    config: Any, cluster: LocalCluster, values: dict[str, Any] | None = None, chart: Path = CHART
) -> dict[str, Any]:
    release: dict[str, Any] = config.install(chart, RELEASE, values or {}, create_namespace=True)
    cluster.wait_for(lambda: exists(cluster, JOBS.format("default")), DEADLINE, "jobs to be served")
    return release


def exists(cluster: LocalCluster, path: str) -> bool:
    try:
        cluster.api.request("GET", path)
    except ApiFailure as failure:
        if failure.code in (404, 429, 503):
            return False
        raise
    return True


def job(name: str, namespace: str, command: str = "exit 0", **changes: Any) -> dict[str, Any]:
    """Two workers without anything to learn."""
    secure = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "trainer",
        "image": "i",
        "command": ["/bin/sh", "-c", command],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {"terminationGracePeriodSeconds": 3, "securityContext": secure, "containers": [container]}
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"workers": 2, "tiers": {"local": {"sizeLimit": "16Mi"}}, "template": {"spec": pod}, **changes},
    }


def status(cluster: LocalCluster, name: str, namespace: str) -> dict[str, Any]:
    found = cluster.api.request("GET", f"{JOBS.format(namespace)}/{name}")
    return dict(found.get("status") or {})


def in_phase(cluster: LocalCluster, name: str, namespace: str, phase: str) -> None:
    cluster.wait_for(lambda: status(cluster, name, namespace).get("phase") == phase, DEADLINE, f"{name} to be {phase}")


def pods(cluster: LocalCluster, namespace: str) -> dict[str, str]:
    """Name -> UID of those that are not being deleted."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in cluster.pods(namespace=namespace)
        if not pod["metadata"].get("deletionTimestamp")
    }


@contextmanager
def operator(cluster: LocalCluster, folder: Path) -> Iterator[Recording]:
    """The operator as the installed Deployment would run it, with everything that it asks recorded."""
    deployment = cluster.api.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{ACCOUNT}")
    spec = deployment["spec"]["template"]["spec"]
    env = {entry["name"]: entry["value"] for entry in spec["containers"][0]["env"] if "value" in entry}
    del env["TIERCHECK_METRICS_ADDRESS"]  # has the pod's address in it
    own = service_account_kubeconfig(cluster.kubeconfig, NAMESPACE, spec["serviceAccountName"], folder / "own")
    with recording(own, folder / "recorded") as record:
        process = cluster.start_operator({"KUBECONFIG": str(record.kubeconfig), **env})
        try:
            yield record
        finally:
            process.terminate()
            process.wait(30)


def rights(cluster: LocalCluster, account: str, namespace: str, tmp_path: Path) -> set[tuple[str, str, str]]:
    """What the API server says that the account may do there, without what every account may."""

    def may(name: str) -> set[tuple[str, str, str]]:
        as_account = service_account_kubeconfig(cluster.kubeconfig, NAMESPACE, name, tmp_path / name)
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        code, answer, _ = post(as_account, "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)
        assert code == 201, answer
        assert not answer["status"]["incomplete"]
        rules = answer["status"]["resourceRules"]
        assert not [rule for rule in rules if rule.get("resourceNames")]
        return granted([{"rules": rules}])

    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody", "namespace": NAMESPACE}}
    )
    return may(account) - may("nobody")


def whole_story(cluster: LocalCluster, folder: Path, namespace: str) -> None:
    """A job that runs, loses a worker, is suspended and resumed, ends, and is removed after its time."""
    end = folder / "end"
    command = f"until [ -e {end} ]; do sleep 0.1; done"
    cluster.apply(job("story", namespace, command, ttlSecondsAfterFinished=1))
    in_phase(cluster, "story", namespace, "Running")
    before = pods(cluster, namespace)
    lost = sorted(before)[1]
    cluster.api.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{lost}")
    cluster.wait_for(
        lambda: (
            status(cluster, "story", namespace).get("attempt", 0) >= 2
            and status(cluster, "story", namespace).get("phase") == "Running"
        ),
        DEADLINE,
        "the job to come back",
    )
    jobs = cluster.api.resource("tiercheck.io/v1alpha1", "TierCheckJob")
    for suspend, phase in ((True, "Suspended"), (False, "Running")):
        cluster.api.patch(jobs, namespace, "story", {"spec": {"suspend": suspend}})
        in_phase(cluster, "story", namespace, phase)
    end.touch()
    cluster.wait_for(
        lambda: not exists(cluster, f"{JOBS.format(namespace)}/story"), DEADLINE, "the job to be removed after its time"
    )


# Rights


def test_operator_of_the_whole_cluster_is_refused_nothing_and_granted_nothing_more(
    cluster: LocalCluster, helm_config: Any, tmp_path: Path
) -> None:
    install(helm_config, cluster)
    with operator(cluster, tmp_path) as record:
        whole_story(cluster, tmp_path, "training")
    log = (cluster.logs / "operator.log").read_text()
    assert record.refused == []
    assert not re.findall(r".*(?:[Ff]orbidden|Not enough permissions|Traceback).*", log), log
    asked = granted([role for role in of_kind("ClusterRole") if ACCOUNT in role["metadata"]["name"]])
    assert record.used - asked == set()
    assert asked - record.used == UNSEEN, "a right that the operator has never used is one too many"
    for namespace in ("training", "elsewhere", "kube-system"):
        assert rights(cluster, ACCOUNT, namespace, tmp_path) == asked


def test_operator_of_one_namespace_is_refused_nothing_and_granted_nothing_elsewhere(
    cluster: LocalCluster, helm_config: Any, tmp_path: Path
) -> None:
    values = {"watchNamespaces": ["training"]}
    install(helm_config, cluster, values)
    cluster.apply(job("ignored", "elsewhere"))
    with operator(cluster, tmp_path) as record:
        whole_story(cluster, tmp_path, "training")
    assert status(cluster, "ignored", "elsewhere") == {}
    assert record.refused == []
    nodes = {("", "nodes", "list"), ("", "nodes", "watch")}
    assert rights(cluster, ACCOUNT, "elsewhere", tmp_path) == nodes
    assert rights(cluster, ACCOUNT, NAMESPACE, tmp_path) == nodes
    assert rights(cluster, ACCOUNT, "training", tmp_path) == record.used | UNSEEN


@pytest.mark.parametrize(
    ("role", "allowed", "denied"),
    [
        ("editor", ["create", "patch", "delete", "list"], ["create status", "patch status", "update finalizers"]),
        ("viewer", ["get", "list", "watch", "get status"], ["create", "patch", "delete", "patch status"]),
    ],
)
def test_people_may_do_with_jobs_what_their_role_says(
    cluster: LocalCluster, helm_config: Any, role: str, allowed: list[str], denied: list[str]
) -> None:
    install(helm_config, cluster)
    cluster.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": role, "namespace": "training"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"{RELEASE}-{role}"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": role}],
        }
    )

    def may(what: str) -> bool:
        verb, _, subresource = what.partition(" ")
        attributes = {
            "group": "tiercheck.io", "resource": "tiercheckjobs", "namespace": "training", "verb": verb, "subresource": subresource,
        }  # fmt: skip
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": role, "resourceAttributes": attributes},
        }
        _, answer, _ = post(cluster.kubeconfig, "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    cluster.wait_for(lambda: may(allowed[0]), DEADLINE, "the binding to count")
    assert [what for what in allowed if not may(what)] == []
    assert [what for what in denied if may(what)] == []


# What an installation leaves


def objects_of_the_release(cluster: LocalCluster) -> set[str]:
    """Paths of what carries the release's label, the definition left out."""
    kinds = [
        f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", f"/api/v1/namespaces/{NAMESPACE}/services",
        f"/api/v1/namespaces/{NAMESPACE}/configmaps", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments",
        f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets",
        f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        "/apis/rbac.authorization.k8s.io/v1/rolebindings", "/apis/rbac.authorization.k8s.io/v1/roles",
    ]  # fmt: skip
    return {
        f"{path}/{entry['metadata']['name']}"
        for path in kinds
        for entry in cluster.api.request("GET", f"{path}?labelSelector=app.kubernetes.io/instance%3D{RELEASE}")["items"]
    }


def test_uninstalling_leaves_the_definition_and_the_jobs_and_nothing_else(
    cluster: LocalCluster, helm_config: Any
) -> None:
    install(helm_config, cluster, {"networkPolicy": {"enabled": True}, "podDisruptionBudget": {"enabled": True}})
    assert len(objects_of_the_release(cluster)) >= 10
    cluster.apply(job("kept", "training", suspend=True))
    helm_config.uninstall(RELEASE)
    assert objects_of_the_release(cluster) == set()
    assert exists(cluster, f"{JOBS.format('training')}/kept")
    release = install(helm_config, cluster)  # takes the definition over again
    assert release["revision"] == 1
    assert exists(cluster, f"{JOBS.format('training')}/kept")


def test_uninstalling_without_keep_takes_definition_and_jobs_along(cluster: LocalCluster, helm_config: Any) -> None:
    install(helm_config, cluster, {"crds": {"keep": False}})
    cluster.apply(job("taken", "training", suspend=True))
    helm_config.uninstall(RELEASE)
    cluster.wait_for(lambda: not exists(cluster, CRD), DEADLINE, "the definition to go")
    assert objects_of_the_release(cluster) == set()


def test_definition_that_is_kept_already_can_be_turned_over_to_a_release(
    cluster: LocalCluster, helm_config: Any
) -> None:
    """As docs/install.md says: after `kubectl apply -f crds/`, Helm wants to be told that the definition is its own now."""
    cluster.apply_crds(ROOT / "crds")
    with pytest.raises(helm.HelmError, match="invalid ownership metadata"):
        install(helm_config, cluster)
    helm_config.uninstall(RELEASE, ignore_not_found=True)
    annotations = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    crds = cluster.api.resource("apiextensions.k8s.io/v1", "CustomResourceDefinition")
    cluster.api.patch(crds, None, CRD.rpartition("/")[2], {"metadata": {"annotations": annotations, "labels": labels}})
    install(helm_config, cluster)
    annotations = cluster.api.request("GET", CRD)["metadata"]["annotations"]
    assert annotations["helm.sh/resource-policy"] == "keep"


def older_chart(folder: Path) -> Path:
    """The chart as it might have been: without a field of the definition that this one has."""
    copy = folder / "tiercheck"
    shutil.copytree(CHART, copy)
    chart = yaml.safe_load((copy / "Chart.yaml").read_text())
    (copy / "Chart.yaml").write_text(yaml.safe_dump({**chart, "version": "0.0.1", "appVersion": "0.0.1"}))
    definition = copy / "templates" / "crds" / "tiercheckjobs.yaml"
    field = re.compile(r"^( +)ttlSecondsAfterFinished:\n(?:\1 +.*\n)+", re.MULTILINE)
    text, count = field.subn("", definition.read_text())
    assert count == 1
    definition.write_text(text)
    return copy


def test_upgrade_brings_the_new_definition_and_disturbs_no_running_job(
    cluster: LocalCluster, helm_config: Any, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    install(helm_config, cluster, chart=older_chart(tmp_path))
    assert "ttlSecondsAfterFinished" not in str(cluster.api.request("GET", CRD)["spec"])
    with operator(cluster, tmp_path):
        cluster.apply(job("running", "training", f"until [ -e {end} ]; do sleep 0.1; done"))
        in_phase(cluster, "running", "training", "Running")
        before, attempt = pods(cluster, "training"), status(cluster, "running", "training")["attempt"]
    release = helm_config.upgrade(CHART, RELEASE, {"resources": {"limits": {"memory": "2Gi"}}})
    assert (release["revision"], release["status"]) == (2, "deployed")
    assert "ttlSecondsAfterFinished" in str(cluster.api.request("GET", CRD)["spec"])
    deployment = cluster.api.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{ACCOUNT}")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"memory": "2Gi"}
    with operator(cluster, tmp_path):
        end.touch()
        in_phase(cluster, "running", "training", "Completed")
    assert pods(cluster, "training") == before
    assert status(cluster, "running", "training")["attempt"] == attempt


def test_rollback_goes_back(cluster: LocalCluster, helm_config: Any) -> None:
    install(helm_config, cluster)
    helm_config.upgrade(CHART, RELEASE, {"watchNamespaces": ["training"]})
    helm_config.rollback(RELEASE)
    assert [entry["status"] for entry in helm_config.history(RELEASE)][-1] == "deployed"
    roles = {path.rpartition("/")[2] for path in objects_of_the_release(cluster)}
    assert ACCOUNT in roles
    assert f"{ACCOUNT}-{NAMESPACE}" not in roles


# What the API server makes of it


@pytest.mark.parametrize("case", ["namespaced", "everything"])
def test_api_server_takes_every_object_as_it_is(cluster: LocalCluster, case: str) -> None:
    """No field is unknown to it, and it warns of nothing."""
    sent = 0
    for entry in objects(values_of(case), namespace="strict"):
        if entry["apiVersion"].startswith("monitoring.coreos.com"):
            continue
        resource = cluster.api.resource(entry["apiVersion"], entry["kind"])
        place = {"namespace": "strict"} if resource.namespaced else {}
        body = {**entry, "metadata": {**entry["metadata"], **place}}
        path = f"{resource.path(place.get('namespace'))}?dryRun=All&fieldValidation=Strict"
        code, answer, warnings = post(cluster.kubeconfig, path, body)
        assert (code, warnings) == (201, []), answer.get("message")
        sent += 1
    assert sent >= 6


def test_restricted_namespace_admits_the_operator(cluster: LocalCluster) -> None:
    (deployment,) = of_kind("Deployment")
    template = deployment["spec"]["template"]
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    }
    path = "/api/v1/namespaces/strict/pods?dryRun=All&fieldValidation=Strict"
    code, answer, warnings = post(cluster.kubeconfig, path, body)
    assert (code, warnings) == (201, []), answer.get("message")
