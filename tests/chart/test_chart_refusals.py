"""Wrong values are refused before anything is installed, with a sentence that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.chart_under_test import CHART, helm, rendered

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
