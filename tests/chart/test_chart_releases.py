"""Install, upgrade, rollback and uninstall by the real Helm SDK leave what they should."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.chart_under_test import CHART, NAMESPACE, RELEASE, ROOT, helm, objects, of_kind, values_of
from tests.chart.releases import (
    ACCOUNT,
    CRD,
    DEADLINE,
    DEFINITIONS,
    JOBS,
    exists,
    in_phase,
    install,
    job,
    operator,
    pods,
    real,
    status,
)
from tests.operator.kubernetes.real_cluster import post
from tiercheck_local.cluster import LocalCluster

pytestmark = real


def objects_of_the_release(cluster: LocalCluster) -> set[str]:
    """Paths of what carries the release's label, the definition left out."""
    kinds = [
        f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", f"/api/v1/namespaces/{NAMESPACE}/services",
        f"/api/v1/namespaces/{NAMESPACE}/configmaps", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments",
        f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets",
        f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        "/apis/rbac.authorization.k8s.io/v1/rolebindings", "/apis/rbac.authorization.k8s.io/v1/roles",
    ]  # fmt: skip
    return {
        f"{path}/{entry['metadata']['name']}"
        for path in kinds
        for entry in cluster.api.request(
            "GET", f"{path}?labelSelector=app.kubernetes.io/instance%3D{RELEASE}"
        )["items"]
    }


def test_uninstalling_leaves_the_definition_and_the_jobs_and_nothing_else(
    cluster: LocalCluster, helm_config: Any
) -> None:
    install(
        helm_config, cluster, {"networkPolicy": {"enabled": True}, "podDisruptionBudget": {"enabled": True}}
    )
    assert len(objects_of_the_release(cluster)) >= 10
    cluster.apply(job("kept", "training", suspend=True))
    helm_config.uninstall(RELEASE)
    assert objects_of_the_release(cluster) == set()
    assert exists(cluster, f"{JOBS.format('training')}/kept")
    release = install(helm_config, cluster)  # takes the definition over again
    assert release["revision"] == 1
    assert exists(cluster, f"{JOBS.format('training')}/kept")


def test_uninstalling_leaves_nothing_of_what_the_operator_made_for_itself(
    cluster: LocalCluster, helm_config: Any, tmp_path: Path
) -> None:
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{ACCOUNT}"
    install(helm_config, cluster)
    with operator(cluster, tmp_path):
        cluster.wait_for(lambda: exists(cluster, lease), DEADLINE, "an operator to lead")
    helm_config.uninstall(RELEASE)
    cluster.wait_for(lambda: not exists(cluster, lease), DEADLINE, "the lease to go with its Deployment")


def test_uninstalling_without_keep_takes_definition_and_jobs_along(
    cluster: LocalCluster, helm_config: Any
) -> None:
    install(helm_config, cluster, {"crds": {"keep": False}})
    cluster.apply(job("taken", "training", suspend=True))
    helm_config.uninstall(RELEASE)
    for definition in DEFINITIONS:
        cluster.wait_for(lambda path=definition: not exists(cluster, path), DEADLINE, "the definition to go")
    assert objects_of_the_release(cluster) == set()


def test_definition_that_is_kept_already_can_be_turned_over_to_a_release(
    cluster: LocalCluster, helm_config: Any
) -> None:
    """As docs/start/install.md says: after `kubectl apply -f crds/`, Helm wants to be told that the
    definition is its own now."""
    cluster.apply_crds(ROOT / "crds")
    with pytest.raises(helm.HelmError, match="invalid ownership metadata"):
        install(helm_config, cluster)
    helm_config.uninstall(RELEASE, ignore_not_found=True)
    annotations = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    crds = cluster.api.resource("apiextensions.k8s.io/v1", "CustomResourceDefinition")
    owned = {"metadata": {"annotations": annotations, "labels": labels}}
    for definition in DEFINITIONS:
        cluster.api.patch(crds, None, definition.rpartition("/")[2], owned)
    install(helm_config, cluster)
    for definition in DEFINITIONS:
        annotations = cluster.api.request("GET", definition)["metadata"]["annotations"]
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
    """No field is unknown to it, and it warns of nothing but the janitor, which needs the node's memory (off
    unless asked for)."""
    sent = 0
    for entry in objects(values_of(case), namespace="strict"):
        if entry["apiVersion"].startswith("monitoring.coreos.com"):
            continue
        resource = cluster.api.resource(entry["apiVersion"], entry["kind"])
        place = {"namespace": "strict"} if resource.namespaced else {}
        body = {**entry, "metadata": {**entry["metadata"], **place}}
        path = f"{resource.path(place.get('namespace'))}?dryRun=All&fieldValidation=Strict"
        code, answer, warnings = post(cluster.kubeconfig, path, body)
        janitor = entry["kind"] == "DaemonSet"
        assert code == 201, answer.get("message")
        assert all("hostPath" in warning for warning in warnings) if janitor else not warnings
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
