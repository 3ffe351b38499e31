"""Values of the chart and of attach mode agree, wrong ones are refused, and the pages name true ones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.chart.releases import CHART, NAMESPACE, ROOT, granted, helm, objects, of_kind, only, rendered
from tiercheck_operator.attach.webhook import PATH
from tiercheck_operator.config import Config

BY_THE_SCHEMA: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt value": ({"watchNamespace": "a"}, "additional properties 'watchNamespace' not allowed"),
    "a misspelt setting": ({"settings": {"resync": 1}}, ("at '/settings': additional properties 'resync' "
                                                         "not allowed")),
    "a string for a list": ({"watchNamespaces": "training"}, "at '/watchNamespaces': got string, want array"),
    "no name of a namespace": ({"watchNamespaces": ["Training"]}, ("at '/watchNamespaces/0': 'Training' "
                                                                   "does not match")),
    "a namespace twice": ({"watchNamespaces": ["a", "a"]}, "at '/watchNamespaces'"),
    "a tag in the repository": ({"image": {"repository": "me/operator:1"}}, "at '/image/repository'"),
    "a digest without its algorithm": ({"image": {"digest": "a" * 64}}, "at '/image/digest'"),
    "a pull policy that is none": ({"image": {"pullPolicy": "Sometimes"}},
        "'Always', 'IfNotPresent', 'Never'"),
    "a number that was quoted": ({"metrics": {"port": "8080"}}, ("at '/metrics/port': got string, want "
                                                                 "integer")),
    "a privileged port": ({"metrics": {"port": 80}}, "at '/metrics/port': minimum: got 80, want 1,024"),
    "no patience": ({"settings": {"silentSeconds": 0}}, "at '/settings/silentSeconds'"),
    "a log level that is none": ({"settings": {"logLevel": "LOUD"}}, "at '/settings/logLevel'"),
    "a label that is a number": ({"commonLabels": {"a": 1}}, "at '/commonLabels/a': got number, want string"),
    "a registry with a space": ({"global": {"imageRegistry": "a b"}}, "at '/global/imageRegistry'"),
    "a pull secret without a name": ({"imagePullSecrets": [{"nam": "a"}]}, "at '/imagePullSecrets/0'"),
    "an interval without a unit": ({"metrics": {"podMonitor": {"interval": "30"}}},
        "at '/metrics/podMonitor/interval'"),
    "no API server": ({"networkPolicy": {"apiServer": {"ports": []}}}, "at '/networkPolicy/apiServer/ports'"),
    "an address without a mask": ({"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.1"]}}},
        "at '/networkPolicy/apiServer/cidrs/0'"),
}  # fmt: skip

BY_THE_TEMPLATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nobody to run as": (
        {"serviceAccount": {"create": False}},
        ["serviceAccount.name is empty", "Name the service account"],
    ),
    "a monitor of nothing": (
        {"metrics": {"serviceMonitor": {"enabled": True}, "service": {"enabled": False}}},
        ["metrics.serviceMonitor.enabled", "Set metrics.service.enabled to true"],
    ),
    "a variable of the chart": (
        {"extraEnv": [{"name": "TIERCHECK_NAMESPACES", "value": "a"}]},
        ["extraEnv sets TIERCHECK_NAMESPACES", "set watchNamespaces"],
    ),
    "a setting twice": (
        {"settings": {"retrySeconds": 1}, "extraEnv": [{"name": "TIERCHECK_RETRY_SECONDS", "value": "2"}]},
        ["extraEnv sets TIERCHECK_RETRY_SECONDS", "set settings.retrySeconds"],
    ),
    "a certificate without an issuer": (
        {"attach": {"enabled": True, "certManager": {"enabled": True}}},
        ["needs an issuer", "Set attach.certManager.issuerRef"],
    ),
    "an alert that is none": (
        {"metrics": {"prometheusRule": {"enabled": True, "disabled": ["JobFailed"]}}},
        ['names "JobFailed"', "There are: TierCheckJobFailed, "],
    ),
}


@pytest.mark.parametrize("case", BY_THE_SCHEMA)
def test_schema_refuses(case: str) -> None:
    values, message = BY_THE_SCHEMA[case]
    with pytest.raises(helm.HelmValuesError) as refusal:
        rendered(values)
    assert message in str(refusal.value)


@pytest.mark.parametrize("case", BY_THE_TEMPLATES)
def test_templates_refuse(case: str) -> None:
    values, sentences = BY_THE_TEMPLATES[case]
    with pytest.raises(helm.HelmRenderError) as refusal:
        rendered(values)
    for sentence in sentences:
        assert sentence in str(refusal.value)


def test_variable_of_ones_own_is_welcome() -> None:
    assert (
        "HTTPS_PROXY"
        in rendered({"extraEnv": [{"name": "HTTPS_PROXY", "value": "http://p"}]})["deployment.yaml"]
    )


def test_cluster_without_stable_native_sidecars_is_refused() -> None:
    """Helm itself compares the cluster's version with this."""
    with helm.Chart.load(CHART) as chart:
        assert chart.metadata["kubeVersion"] == ">=1.33.0-0"


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


PAGES = ("start/install.md", "operate/monitoring.md")
GUIDE = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
BLOCKS = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def paths(schema: dict[str, Any], prefix: str = "") -> set[str]:
    """Every value and group of values."""
    found = set()
    for name, entry in schema.get("properties", {}).items():
        found |= {prefix + name, *paths(entry, f"{prefix}{name}.")}
    return found


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_values_of_the_guide_are_accepted_as_they_stand(number: int) -> None:
    assert len(objects(yaml.safe_load(BLOCKS[number]))) > 5


def test_values_that_the_guide_names_exist() -> None:
    known = paths(json.loads((CHART / "values.schema.json").read_text()))
    groups = {path.partition(".")[0] for path in known}
    named = {
        word
        for word in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)*)(?:: \w+)?`", GUIDE)
        if word.partition(".")[0] in groups
    }
    named |= set(re.findall(r"--set ([\w.]+)=", GUIDE))
    assert len(named) > 15
    assert named <= known


def test_alerts_of_the_guide_are_those_of_the_chart() -> None:
    told = dict(re.findall(r"^\| `(TierCheck\w+)` \| (\w+) \|", GUIDE, re.MULTILINE))
    groups = only("PrometheusRule", {"metrics": {"prometheusRule": {"enabled": True}}})["spec"]["groups"]
    assert told == {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}
