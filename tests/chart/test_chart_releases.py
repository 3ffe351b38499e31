"""Install, upgrade and uninstall leave what they should, and grant what is needed, no more."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.releases import (
    ACCOUNT,
    CHART,
    CRD,
    DEADLINE,
    DEFINITIONS,
    NAMESPACE,
    RELEASE,
    ROOT,
    granted,
    helm,
    install,
    objects,
    of_kind,
    operator,
    pods,
    real,
    values_of,
)
from tests.operator.kubernetes.proxy import (
    JOBS,
    in_phase,
    post,
    service_account_kubeconfig,
    short_job,
    status,
)
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
    cluster.apply(short_job("kept", "training", suspend=True))
    helm_config.uninstall(RELEASE)
    assert objects_of_the_release(cluster) == set()
    assert cluster.answers(f"{JOBS.format('training')}/kept")
    release = install(helm_config, cluster)  # takes the definition over again
    assert release["revision"] == 1
    assert cluster.answers(f"{JOBS.format('training')}/kept")


def test_uninstalling_leaves_nothing_of_what_the_operator_made_for_itself(
    cluster: LocalCluster, helm_config: Any, tmp_path: Path
) -> None:
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{ACCOUNT}"
    install(helm_config, cluster)
    with operator(cluster, tmp_path):
        cluster.wait_for(lambda: cluster.answers(lease), DEADLINE, "an operator to lead")
    helm_config.uninstall(RELEASE)
    cluster.wait_for(lambda: not cluster.answers(lease), DEADLINE, "the lease to go with its Deployment")


def test_uninstalling_without_keep_takes_definition_and_jobs_along(
    cluster: LocalCluster, helm_config: Any
) -> None:
    install(helm_config, cluster, {"crds": {"keep": False}})
    cluster.apply(short_job("taken", "training", suspend=True))
    helm_config.uninstall(RELEASE)
    for definition in DEFINITIONS:
        cluster.wait_for(lambda path=definition: not cluster.answers(path), DEADLINE, "the definition to go")
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
        cluster.apply(short_job("running", "training", f"until [ -e {end} ]; do sleep 0.1; done"))
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
        if entry["apiVersion"].startswith(("monitoring.coreos.com", "cert-manager.io")):
            continue  # definitions of others, which are not installed here
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


UNSEEN = {
    # Checked by an admission plug-in that is off here (OwnerReferencesPermissionEnforcement), without a
    # request of its own.
    ("tiercheck.io", "tiercheckjobs/finalizers", "update"),
    # The count of an Event that comes again, at most every ten seconds: only on a slow machine does something
    # in the story happen twice so far apart.
    ("", "events", "patch"),
    # Whose a pod is that has the name of a new one already.
    ("", "pods", "get"),
}
"""Rights that the operator needs although the story need not show it."""
LEASE = {("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")} | {
    ("apps", "deployments", "get")
}
"""In the operator's own namespace only. Its Deployment is what the lease belongs to."""
READ_LEASE = {("coordination.k8s.io", "leases", "get")}
"""Everywhere: the kubelets' leases say which of them lives (namespace kube-node-lease)."""


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
        named = sorted(
            (rule["resources"], rule["resourceNames"]) for rule in rules if rule.get("resourceNames")
        )
        cluster_itself = (["namespaces"], ["kube-system"])
        single = [(["deployments"], [ACCOUNT]), (["leases"], [ACCOUNT]), cluster_itself]
        assert named in ([], [cluster_itself], single), (
            "rights to single objects: only to the lease, the Deployment that owns it, and what names "
            "the cluster"
        )
        return granted([{"rules": rules}])

    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody", "namespace": NAMESPACE}}
    )
    return may(account) - may("nobody")


def whole_story(cluster: LocalCluster, folder: Path, namespace: str) -> None:
    """A job that runs, loses a worker to a spare, is suspended and resumed twice (one Event tells both),
    ends, and is removed in time.

    Whoever gives the operator a new right gives this story, or one of the others, the turn that uses it.
    """
    end = folder / "end"
    command = f"until [ -e {end} ]; do sleep 0.1; done"
    remote = {"directory": {"volume": {"hostPath": {"path": str(folder / "remote")}}}, "everySteps": 20}
    (folder / "remote").mkdir()
    # With a remote tier, so that the operator asks which cluster it is in.
    story = short_job("story", namespace, command, ttlSecondsAfterFinished=1, spares=1)
    story["spec"]["tiers"]["remote"] = remote
    cluster.apply(story)
    in_phase(cluster, "story", namespace, "Running")
    cluster.wait_for(
        lambda: (status(cluster, "story", namespace).get("spares") or {}).get("ready"),
        DEADLINE,
        "the spare to be ready",
    )
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
    for suspend, phase in ((True, "Suspended"), (False, "Running"), (True, "Suspended"), (False, "Running")):
        cluster.api.patch(jobs, namespace, "story", {"spec": {"suspend": suspend}})
        in_phase(cluster, "story", namespace, phase)
    end.touch()
    cluster.wait_for(
        lambda: not cluster.answers(f"{JOBS.format(namespace)}/story"),
        DEADLINE,
        "the job to be removed after its time",
    )


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
    assert granted(of_kind("Role")) == LEASE
    assert record.used - asked == LEASE - READ_LEASE
    assert asked - record.used <= UNSEEN, "a right that the operator has never used is one too many"
    assert asked >= UNSEEN
    for namespace in ("training", "elsewhere", "kube-system"):
        assert rights(cluster, ACCOUNT, namespace, tmp_path) == asked
    assert rights(cluster, ACCOUNT, NAMESPACE, tmp_path) == asked | LEASE


def test_operator_of_one_namespace_is_refused_nothing_and_granted_nothing_elsewhere(
    cluster: LocalCluster, helm_config: Any, tmp_path: Path
) -> None:
    values = {"watchNamespaces": ["training"]}
    install(helm_config, cluster, values)
    cluster.apply(short_job("ignored", "elsewhere"))
    with operator(cluster, tmp_path) as record:
        whole_story(cluster, tmp_path, "training")
    assert status(cluster, "ignored", "elsewhere") == {}
    assert record.refused == []
    outside = {("", "nodes", "list"), ("", "nodes", "watch"), ("", "namespaces", "get")} | READ_LEASE
    assert rights(cluster, ACCOUNT, "elsewhere", tmp_path) == outside
    assert rights(cluster, ACCOUNT, NAMESPACE, tmp_path) == outside | LEASE
    assert rights(cluster, ACCOUNT, "training", tmp_path) == (record.used - LEASE) | UNSEEN | READ_LEASE


@pytest.mark.parametrize(
    ("role", "allowed", "denied"),
    [
        (
            "editor",
            ["create", "patch", "delete", "list"],
            ["create status", "patch status", "update finalizers"],
        ),
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
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": f"{RELEASE}-{role}",
            },
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": role}],
        }
    )

    def may(what: str) -> bool:
        verb, _, subresource = what.partition(" ")
        attributes = {
            "group": "tiercheck.io", "resource": "tiercheckjobs", "namespace": "training", "verb": verb,
            "subresource": subresource,
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
