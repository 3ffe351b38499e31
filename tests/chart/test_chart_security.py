"""Pods of the chart pass the restricted Pod Security Standard, and talk to few."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.releases import CASES, NAMESPACE, objects, of_kind, only, values_of
from tiercheck.protocol import names


def pods(case: str) -> list[dict[str, Any]]:
    """Pod specs: the operator's and that of `helm test`."""
    return [
        entry["spec"]["template"]["spec"] if entry["kind"] == "Deployment" else entry["spec"]
        for entry in objects(values_of(case))
        if entry["kind"] in ("Deployment", "Pod")
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_pod_is_restricted_and_writes_nowhere_but_into_volumes(case: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    found = pods(case)
    assert found
    for spec in found:
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
        for volume in spec.get("volumes", ()):
            assert {"emptyDir", "configMap", "secret", "projected"} & set(volume)


@pytest.mark.parametrize("case", CASES)
def test_only_the_operators_pod_holds_a_token(case: str) -> None:
    assert (
        only("Deployment", values_of(case))["spec"]["template"]["spec"]["automountServiceAccountToken"]
        is True
    )
    for account in of_kind("ServiceAccount", values_of(case)):
        assert account["automountServiceAccountToken"] is False
    for pod in of_kind("Pod", values_of(case)):
        assert pod["spec"]["automountServiceAccountToken"] is False


def test_memory_is_bounded() -> None:
    for spec in pods("default"):
        for container in spec["containers"]:
            assert {"memory"} <= set(container["resources"]["limits"])
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])


# Network


def policy(**settings: Any) -> dict[str, Any]:
    values = {"networkPolicy": {"enabled": True, **settings}}
    spec: dict[str, Any] = only("NetworkPolicy", values)["spec"]
    return spec


def test_both_directions_are_closed_but_for_what_is_listed() -> None:
    spec = policy()
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    (metrics,) = spec["ingress"]
    assert metrics["ports"] == [{"port": "metrics", "protocol": "TCP"}]
    api_server, sidecars = spec["egress"]
    assert [port["port"] for port in api_server["ports"]] == [443, 6443]
    assert [port["port"] for port in sidecars["ports"]] == [8470]


def test_api_server_can_be_pinned_to_addresses() -> None:
    api_server = policy(apiServer={"cidrs": ["10.0.0.1/32", "2001:db8::1/128"]})["egress"][0]
    assert api_server["to"] == [
        {"ipBlock": {"cidr": "10.0.0.1/32"}},
        {"ipBlock": {"cidr": "2001:db8::1/128"}},
    ]


def test_helm_test_gets_through_whoever_else_may_read_metrics() -> None:
    values = values_of("namespaced")
    (rule,) = only("NetworkPolicy", values)["spec"]["ingress"]
    peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
    (test,) = of_kind("Pod", values)
    assert [peer for peer in peers if peer.items() <= test["metadata"]["labels"].items()]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in rule[
        "from"
    ]


def test_sidecars_are_called_only_where_jobs_may_be() -> None:
    everywhere, *_ = [rule["to"][0] for rule in policy()["egress"] if "to" in rule]
    assert everywhere["namespaceSelector"] == {}
    spec = only("NetworkPolicy", values_of("namespaced"))["spec"]
    (there,) = [rule["to"][0] for rule in spec["egress"] if "podSelector" in rule["to"][0]]
    (expression,) = there["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["training", "research"]


def test_names_are_resolved_only_where_that_is_asked_for() -> None:
    def ports(**settings: Any) -> set[int]:
        return {port["port"] for rule in policy(**settings)["egress"] for port in rule["ports"]}

    assert 53 not in ports()
    assert 53 in ports(dns=True)


# Who reaches a job's pods, where that is asked for

JOBS = {"networkPolicy": {"jobs": {"namespaces": ["training", "research"]}}}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def may_reach(
    spec: dict[str, Any], caller: dict[str, str] | None, namespace: str, port: int, protocol: str
) -> bool:
    """Whether a pod with these labels (None: somebody who is no pod) gets through to a job's pod in
    `training`."""
    return any(
        any(
            one["protocol"] == protocol and one["port"] <= port <= one.get("endPort", one["port"])
            for one in rule["ports"]
        )
        and (
            "from" not in rule
            or (caller is not None and any(is_it(peer, caller, namespace) for peer in rule["from"]))
        )
        for rule in spec["ingress"]
    )


def is_it(peer: dict[str, Any], labels: dict[str, str], namespace: str) -> bool:
    within = peer.get("namespaceSelector")
    names_of_it = {"kubernetes.io/metadata.name": namespace}
    if within is None and namespace != "training":
        return False
    return selects(within or {}, names_of_it) and selects(peer.get("podSelector", {}), labels)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    exist = [each["key"] for each in selector.get("matchExpressions", []) if each["operator"] == "Exists"]
    return selector.get("matchLabels", {}).items() <= labels.items() and all(key in labels for key in exist)


def test_sidecars_are_open_to_everybody_unless_asked_for() -> None:
    assert of_kind("NetworkPolicy", {}) == []


@pytest.mark.parametrize("metrics_from", [[], [MONITORING]])
def test_sidecars_hear_the_operator_each_other_and_monitoring_and_training_hears_whom_it_did(
    metrics_from: list[dict[str, Any]],
) -> None:
    values = {"networkPolicy": {**JOBS["networkPolicy"], "metricsFrom": metrics_from}}
    policies = of_kind("NetworkPolicy", values)
    assert [each["metadata"]["namespace"] for each in policies] == ["training", "research"]
    operator = only("Deployment", values)["spec"]["template"]["metadata"]["labels"]
    job, other, nobody = {names.LABEL_JOB_UID: "u"}, {"app": "other"}, None
    control, exchange, metrics = names.CONTROL_PORT, names.EXCHANGE_PORT, names.METRICS_PORT
    for spec in (each["spec"] for each in policies[:1]):
        assert spec["policyTypes"] == ["Ingress"]
        assert selects(spec["podSelector"], job)
        assert not selects(spec["podSelector"], other), "nobody else is touched"
        for caller, namespace, allowed in (
            (operator, NAMESPACE, {control} | (set() if metrics_from else {metrics})),
            (operator, "elsewhere", set() if metrics_from else {metrics}),
            (job, "training", {control, exchange} | (set() if metrics_from else {metrics})),
            (job, "elsewhere", set() if metrics_from else {metrics}),
            (other, "training", set() if metrics_from else {metrics}),
            (other, "monitoring", {metrics}),
            (nobody, "", set()),
        ):
            through = {
                port
                for port in (control, exchange, metrics)
                if may_reach(spec, caller, namespace, port, "TCP")
            }
            assert through == allowed, (caller, namespace)
        for port in (1, 22, 8469, 8473, 29500, 65535):
            assert may_reach(spec, nobody, "", port, "TCP"), "what training listens on is its owner's affair"
        for port in (1, 4791, 8471, 65535):
            assert all(may_reach(spec, nobody, "", port, protocol) for protocol in ("UDP", "SCTP"))


# The janitor of node memory, which only who asks for it gets


def test_janitor_is_not_installed_unless_asked_for() -> None:
    assert of_kind("DaemonSet", {}) == []


def test_janitor_has_nothing_but_the_folder_that_it_clears() -> None:
    settings = {"nodeMemoryPath": "/run/tiercheck", "nodeMemoryKeepSeconds": 1800}
    values = {"nodeMemory": {"janitor": {"enabled": True}}, "settings": settings}
    janitor = only("DaemonSet", values)
    spec = janitor["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["volumes"] == [
        {"name": "memory", "hostPath": {"path": "/run/tiercheck", "type": "DirectoryOrCreate"}}
    ]
    (container,) = spec["containers"]
    assert container["command"][-3:] == ["/tiercheck/node", "--watch", "1800"]
    assert container["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": ["DAC_OVERRIDE", "FOWNER"],
    }
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    operator = only("Deployment", values)["spec"]["selector"]["matchLabels"]
    assert not operator.items() <= janitor["spec"]["template"]["metadata"]["labels"].items(), (
        "no Service finds it"
    )
