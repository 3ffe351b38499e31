"""The operator under the chart's account is refused nothing it needs, and granted nothing more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.chart.chart_under_test import NAMESPACE, RELEASE, granted, of_kind
from tests.chart.releases import (
    ACCOUNT,
    DEADLINE,
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
from tests.operator.kubernetes.real_cluster import post, service_account_kubeconfig
from tiercheck_local.cluster import LocalCluster

pytestmark = real

UNSEEN = {
    # Checked by an admission plug-in that is off here (OwnerReferencesPermissionEnforcement), without a
    # request of its own.
    ("tiercheck.io", "tiercheckjobs/finalizers", "update"),
    # The count of an Event that comes again, at most every ten seconds: only on a slow machine does something
    # in the story happen twice so far apart.
    ("", "events", "patch"),
}
"""Rights that the operator needs although the story need not show it."""
LEASE = {("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")} | {
    ("apps", "deployments", "get")
}
"""In the operator's own namespace only. Its Deployment is what the lease belongs to."""


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
    story = job("story", namespace, command, ttlSecondsAfterFinished=1, spares=1)
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
        lambda: not exists(cluster, f"{JOBS.format(namespace)}/story"),
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
    assert record.used - asked == LEASE
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
    cluster.apply(job("ignored", "elsewhere"))
    with operator(cluster, tmp_path) as record:
        whole_story(cluster, tmp_path, "training")
    assert status(cluster, "ignored", "elsewhere") == {}
    assert record.refused == []
    outside = {("", "nodes", "list"), ("", "nodes", "watch"), ("", "namespaces", "get")}
    assert rights(cluster, ACCOUNT, "elsewhere", tmp_path) == outside
    assert rights(cluster, ACCOUNT, NAMESPACE, tmp_path) == outside | LEASE
    assert rights(cluster, ACCOUNT, "training", tmp_path) == (record.used - LEASE) | UNSEEN


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
