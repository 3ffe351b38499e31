"""Attach mode in the chart: off by default, and when on, everything that has to agree does."""

from __future__ import annotations

from typing import Any

from tests.chart.chart_under_test import NAMESPACE, granted, of_kind, only
from tiercheck_operator.attach.webhook import PATH
from tiercheck_operator.config import Config

ON: dict[str, Any] = {"attach": {"enabled": True}}


def environment(values: dict[str, Any]) -> dict[str, str]:
    (container,) = only("Deployment", values)["spec"]["template"]["spec"]["containers"]
    return {
        entry["name"]: entry.get("value", "").replace("$(POD_IP)", "192.0.2.7") for entry in container["env"]
    }


def test_by_default_no_webhook_is_installed_and_no_right_granted_for_one() -> None:
    assert of_kind("MutatingWebhookConfiguration") == []
    assert not [
        role
        for role in (*of_kind("ClusterRole"), *of_kind("Role"))
        if role["metadata"]["name"].endswith("-attach")
    ]
    assert Config.from_env(environment({})).webhook is None


def test_operator_serves_what_the_api_server_calls() -> None:
    settings = Config.from_env(environment(ON)).webhook
    assert settings is not None
    configuration = only("MutatingWebhookConfiguration", ON)
    (hook,) = configuration["webhooks"]
    target = hook["clientConfig"]["service"]
    assert settings.configuration == configuration["metadata"]["name"]
    assert settings.hosts == (f"{target['name']}.{target['namespace']}.svc",), (
        "as the API server will call it"
    )
    assert target["path"] == PATH
    (service,) = [entry for entry in of_kind("Service", ON) if entry["metadata"]["name"] == target["name"]]
    (port,) = service["spec"]["ports"]
    assert port["port"] == target["port"]
    (container,) = only("Deployment", ON)["spec"]["template"]["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": settings.port} in container["ports"]


def test_webhook_can_never_keep_a_pod_from_being_created_and_sees_labelled_pods_only() -> None:
    (hook,) = only("MutatingWebhookConfiguration", ON)["webhooks"]
    assert (hook["failurePolicy"], hook["sideEffects"]) == ("Ignore", "None")
    assert hook["timeoutSeconds"] <= 5
    assert hook["objectSelector"] == {
        "matchExpressions": [{"key": "tiercheck.io/inject", "operator": "Exists"}]
    }
    (rule,) = hook["rules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE"], ["pods"])
    assert "caBundle" not in hook["clientConfig"], "an upgrade must not take it away"


def test_operator_of_some_namespaces_is_asked_about_pods_of_these_only() -> None:
    values = {**ON, "watchNamespaces": ["training", "research"]}
    (hook,) = only("MutatingWebhookConfiguration", values)["webhooks"]
    (term,) = hook["namespaceSelector"]["matchExpressions"]
    assert (term["key"], term["values"]) == ("kubernetes.io/metadata.name", ["training", "research"])
    bound = [
        entry["metadata"]["namespace"]
        for entry in of_kind("RoleBinding", values)
        if "attach-jobs" in entry["metadata"]["name"]
    ]
    assert sorted(bound) == ["research", "training"]


def test_rights_are_for_one_configuration_one_secret_and_reading_owners() -> None:
    before = {role["metadata"]["name"] for role in of_kind("ClusterRole")}
    added = {
        role["metadata"]["name"]: role
        for role in of_kind("ClusterRole", ON)
        if role["metadata"]["name"] not in before
    }
    configuration, jobs = added["tiercheck-attach"], added["tiercheck-attach-jobs"]
    (rule,) = configuration["rules"]
    assert rule["resourceNames"] == [only("MutatingWebhookConfiguration", ON)["metadata"]["name"]]
    assert rule["verbs"] == ["get", "update"]
    assert granted([jobs]) == {
        ("tiercheck.io", "tiercheckpolicies", "get"),
        ("tiercheck.io", "tiercheckjobs", "get"),
        ("tiercheck.io", "tiercheckjobs", "create"),
        ("", "pods/eviction", "create"),
        ("batch", "jobs", "get"),
        ("jobset.x-k8s.io", "jobsets", "get"),
        ("kubeflow.org", "pytorchjobs", "get"),
    }
    (role,) = [entry for entry in of_kind("Role", ON) if entry["metadata"]["name"] == "tiercheck-attach"]
    assert role["metadata"]["namespace"] == NAMESPACE
    named = [rule for rule in role["rules"] if rule["verbs"] != ["create"]]
    settings = Config.from_env(environment(ON)).webhook
    assert settings is not None
    assert [rule["resourceNames"] for rule in named] == [[settings.secret[1]]]
    assert settings.secret[0] == NAMESPACE
