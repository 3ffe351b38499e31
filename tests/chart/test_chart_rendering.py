"""What the chart makes of its values: valid for Kubernetes, and changed by nobody unnoticed.

After a wanted change: make chart
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.chart.releases import (
    CASES,
    CHART,
    NAMESPACE,
    RELEASE,
    granted,
    helm,
    objects,
    of_kind,
    only,
    operators_environment,
    rendered,
    values_of,
)
from tiercheck.about import __version__

SNAPSHOT = Path(__file__).parent / "snapshot.yaml"
SHOWN: dict[str, Collection[str]] = {
    "everything": (),
    "default": {"Deployment", "Service", "ServiceAccount", "Pod"},
    "monitoring": {"ConfigMap", "ServiceMonitor"},
    "namespaced": {"PodMonitor"},
}
"""By values file: the kinds of objects that stand in the snapshot as they are. `everything` shows all its own
objects, and the others what it lacks."""
LABELS = {
    "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by", "helm.sh/chart",
}  # fmt: skip
"""Of every object."""
NOT_KUBERNETES = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}
"""Kinds of the Prometheus operator and cert-manager, whose schemas are not Kubernetes' own."""
WARNING = 2


@pytest.mark.parametrize("case", CASES)
def test_helm_lint_finds_nothing_to_complain_about(case: str) -> None:
    report = helm.lint(CHART, values_of(case), strict=True, namespace=NAMESPACE)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] >= WARNING] == []


@pytest.mark.parametrize("version", ["1.33", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("case", CASES)
def test_every_object_is_what_kubernetes_expects(case: str, version: str) -> None:
    checked = 0
    for entry in objects(values_of(case)):
        if entry["kind"] not in NOT_KUBERNETES:
            kubernetes_validate.validate(entry, version, strict=True)
            checked += 1
    assert checked >= 5


def test_rendering_is_the_committed_one() -> None:
    text = "---\n".join(snapshot(case, kinds) for case, kinds in SHOWN.items())
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(text)
    assert SNAPSHOT.read_text() == text, "if this change is wanted: make chart"


def snapshot(case: str, kinds: Collection[str]) -> str:
    """Renders the notes, the objects of these kinds, or all, and the names of the others. Left out is what
    has a test of its own: labels that all have, the definition's body, dashboard and script."""
    texts = rendered(values_of(case))
    notes = "".join(f"# {line}".rstrip() + "\n" for line in texts["NOTES.txt"].strip().splitlines())
    parts = [f"# {case}: NOTES.txt\n{notes}"]
    for path in sorted(texts):
        for entry in yaml.load_all(texts[path], yaml.CSafeLoader) if path.endswith(".yaml") else ():
            if entry and (not kinds or entry["kind"] in kinds):
                written = yaml.safe_dump(_abridged(entry), sort_keys=False, width=120)
                parts.append(f"---\n# {case}: {path}\n{written}")
            elif entry:
                parts.append(f"# {case}: {path}: {entry['kind']} {entry['metadata']['name']}\n")
    return "".join(parts)


def _abridged(entry: dict[str, Any]) -> dict[str, Any]:
    labels = {key: value for key, value in entry["metadata"]["labels"].items() if key not in LABELS}
    entry = {**entry, "metadata": {**entry["metadata"], "labels": labels}}
    if entry["kind"] == "CustomResourceDefinition":
        return {**entry, "spec": "as in crds/"}
    if entry["kind"] == "ConfigMap":
        return {**entry, "data": {name: f"as in files/dashboards/{name}" for name in entry["data"]}}
    if entry["kind"] == "Pod":
        entry["spec"]["containers"][0]["command"][2] = "as in files/check.py"
    return entry


def test_every_object_has_the_labels_and_annotations_that_are_asked_for() -> None:
    for case in CASES:
        for entry in objects(values_of(case)):
            name = values_of(case).get("nameOverride", "tiercheck")
            wanted = {"name": name, "instance": RELEASE, "version": __version__, "managed-by": "Helm"}
            labels = {f"app.kubernetes.io/{key}": value for key, value in wanted.items()}
            labels["helm.sh/chart"] = f"tiercheck-{__version__}"
            assert set(labels) == LABELS
            assert labels.items() <= entry["metadata"]["labels"].items(), entry["kind"]
    for entry in objects(values_of("everything")):
        assert entry["metadata"]["labels"]["example.com/owner"] == "platform", entry["kind"]
        assert entry["metadata"]["annotations"]["example.com/contact"] == "platform@example.com", entry[
            "kind"
        ]


@pytest.mark.parametrize("case", CASES)
def test_everything_with_a_namespace_is_in_the_releases_or_in_one_that_is_served(case: str) -> None:
    values = values_of(case)
    closed = values.get("networkPolicy", {}).get("jobs", {}).get("namespaces", ())
    places = {NAMESPACE, "monitoring", *values.get("watchNamespaces", ()), *closed}
    global_kinds = {
        "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "MutatingWebhookConfiguration",
        "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
    }  # fmt: skip
    for entry in objects(values_of(case)):
        if entry["kind"] in global_kinds:
            assert "namespace" not in entry["metadata"]
        else:
            assert entry["metadata"]["namespace"] in places


def test_two_releases_for_their_own_namespaces_share_no_object() -> None:
    one, other = (
        {
            (entry["kind"], entry["metadata"].get("namespace"), entry["metadata"]["name"])
            for entry in objects(
                {"watchNamespaces": [team], "crds": {"enabled": False}}, "tiercheck", f"{team}-system"
            )
        }
        for team in ("red", "blue")
    )
    assert one
    assert not one & other


def test_long_release_name_leaves_every_name_usable() -> None:
    for entry in objects({"networkPolicy": {"enabled": True}}, release="r" * 53):
        assert len(entry["metadata"]["name"]) <= 63, entry["metadata"]["name"]


def test_selectors_find_the_operators_pod_and_not_the_test_pod() -> None:
    values = {
        "networkPolicy": {"enabled": True},
        "podDisruptionBudget": {"enabled": True},
        "podLabels": {"a": "b"},
    }
    labels = only("Deployment", values)["spec"]["template"]["metadata"]["labels"].items()
    test = only("Pod", values)["metadata"]["labels"].items()
    selectors = [
        only("Deployment", values)["spec"]["selector"]["matchLabels"],
        only("Service", values)["spec"]["selector"],
        only("NetworkPolicy", values)["spec"]["podSelector"]["matchLabels"],
        only("PodDisruptionBudget", values)["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels
        assert not selector.items() <= test


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({}, f"tiercheck-operator:{__version__}"),
        ({"registry": "r.example.com:5000/me"}, f"r.example.com:5000/me/tiercheck-operator:{__version__}"),
        ({"tag": "2"}, "tiercheck-operator:2"),
        ({"digest": "sha256:" + "a" * 64}, "tiercheck-operator@sha256:" + "a" * 64),
        ({"tag": "2", "digest": "sha256:" + "a" * 64}, "tiercheck-operator:2@sha256:" + "a" * 64),
    ],
)
def test_image_is_named_by_registry_tag_and_digest(image: dict[str, str], reference: str) -> None:
    (container,) = only("Deployment", {"image": image})["spec"]["template"]["spec"]["containers"]
    assert container["image"] == reference


def test_notes_name_what_was_really_installed() -> None:
    notes = rendered({"watchNamespaces": ["training"]}, release="mine", namespace="team")["NOTES.txt"]
    assert "kubectl -n team rollout status deployment/mine-tiercheck-operator" in notes
    assert "helm test mine -n team" in notes
    assert "kubectl get tcj -n training --watch" in notes


def test_notes_warn_of_what_would_surprise_later() -> None:
    def notes(**values: Any) -> str:
        return " ".join(rendered(values)["NOTES.txt"].split())

    named = {"image": {"registry": "r.example.com"}, "sidecar": {"image": {"registry": "r.example.com"}}}
    assert "NOTE" not in notes(**named)
    assert "WARNING" not in notes(**named)
    assert (
        f"tiercheck-operator:{__version__} and tiercheck-sidecar:{__version__} must be on your nodes already"
        in notes()
    )
    assert "delete the definition, and with it every TierCheckJob" in notes(crds={"keep": False}, **named)
    assert "waits until somebody installs the definition" in notes(crds={"enabled": False}, **named)
    assert "needs the rights" in notes(rbac={"create": False}, **named)
    assert "`kubectl drain` of the operator's node waits" in notes(
        podDisruptionBudget={"maxUnavailable": 0}, **named
    )
    assert "only TierCheckOperatorDown" in notes(metrics={"prometheusRule": {"enabled": True}}, **named)


def test_definition_is_kept_unless_told_otherwise() -> None:
    keep = "helm.sh/resource-policy"
    kept, not_kept = (
        of_kind("CustomResourceDefinition"),
        of_kind("CustomResourceDefinition", {"crds": {"keep": False}}),
    )
    assert [crd["metadata"]["annotations"][keep] for crd in kept] == ["keep", "keep"]
    assert not [crd for crd in not_kept if keep in crd["metadata"].get("annotations", {})]
    assert of_kind("CustomResourceDefinition", {"crds": {"enabled": False}}) == []


def test_by_default_nothing_needs_the_prometheus_operator() -> None:
    assert not NOT_KUBERNETES & {entry["kind"] for entry in objects()}


def test_package_holds_all_that_the_chart_needs_and_no_test_values(tmp_path: Path) -> None:
    archive = helm.package(CHART, destination=tmp_path)
    with helm.Chart.load(archive) as packed:
        texts = packed.render(values_of("monitoring"), name="tiercheck", namespace=NAMESPACE)
        files = {entry["name"] for entry in packed.files}
    assert {name.removeprefix("tiercheck/templates/"): text for name, text in texts.items()} == rendered(
        values_of("monitoring")
    )
    assert "README.md" in files
    assert not [name for name in files if name.startswith("ci/")]


DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("values", "operator", "sidecar"),
    [
        ({}, "m.example.com/tiercheck-operator", "m.example.com/tiercheck-sidecar"),
        ({"image": {"digest": DIGEST}}, f"m.example.com/tiercheck-operator@{DIGEST}", "m.example.com/"),
        ({"image": {"registry": "r.io"}}, "r.io/tiercheck-operator:", "m.example.com/tiercheck-sidecar:"),
    ],
)
def test_registry_of_all_images_is_in_front_of_each_that_names_none(
    values: dict[str, Any], operator: str, sidecar: str
) -> None:
    values = {
        **values,
        "global": {"imageRegistry": "m.example.com"},
        "nodeMemory": {"janitor": {"enabled": True}},
    }
    (container,) = only("Deployment", values)["spec"]["template"]["spec"]["containers"]
    (janitor,) = only("DaemonSet", values)["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith(operator)
    assert operators_environment(values)["TIERCHECK_SIDECAR_IMAGE"] == janitor["image"]
    assert janitor["image"].startswith(sidecar)


def test_pull_secrets_are_names_or_objects_and_those_of_all_images_come_first() -> None:
    values = {
        "global": {"imagePullSecrets": [{"name": "all"}], "storageClass": "of another chart"},
        "imagePullSecrets": ["one", {"name": "two"}, "all"],
        "sidecar": {"imagePullSecrets": [{"name": "jobs"}]},
    }
    for pod in (only("Deployment", values)["spec"]["template"], only("Pod", values)):
        assert [entry["name"] for entry in pod["spec"]["imagePullSecrets"]] == ["all", "one", "two"]
    assert operators_environment(values)["TIERCHECK_SIDECAR_PULL_SECRETS"] == "all jobs"
    assert "imagePullSecrets" not in only("Deployment")["spec"]["template"]["spec"]


def test_metrics_by_tls_are_probed_tested_and_scraped_so() -> None:
    relabelings = [{"targetLabel": "cluster", "replacement": "a"}]
    monitor = {"enabled": True, "namespace": "monitoring", "honorLabels": False, "relabelings": relabelings}
    monitor["tlsConfig"] = {"insecureSkipVerify": True}
    values = {"metrics": {"tls": {"secretName": "tls"}, "serviceMonitor": monitor}}
    pod = only("Deployment", values)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"HTTPS"}
    folder = operators_environment(values)["TIERCHECK_METRICS_TLS"]
    assert folder in {entry["mountPath"] for entry in container["volumeMounts"]}
    assert only("Pod", values)["spec"]["containers"][0]["command"][-2].startswith("https://")
    found = only("ServiceMonitor", values)
    (endpoint,) = found["spec"]["endpoints"]
    assert found["metadata"]["namespace"] == "monitoring"
    assert endpoint["scheme"] == "https"
    assert endpoint["honorLabels"] is False
    assert (endpoint["relabelings"], endpoint["tlsConfig"]) == (relabelings, {"insecureSkipVerify": True})


def test_certificate_of_the_webhook_may_be_cert_managers_and_the_operator_then_only_reads_it() -> None:
    values = {"attach": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}}
    certificate = only("Certificate", values)["spec"]
    environment = operators_environment(values)
    assert environment["TIERCHECK_WEBHOOK_SECRET"].split("/")[1] == certificate["secretName"]
    assert environment["TIERCHECK_WEBHOOK_HOSTS"].split() == certificate["dnsNames"]
    roles = [role for role in of_kind("Role", values) if role["metadata"]["name"].endswith("-attach")]
    assert {verb for _, resource, verb in granted(roles) if resource == "secrets"} == {"get"}


def test_host_network_and_strategy_are_as_given() -> None:
    values = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", "strategy": {"type": "Recreate"}}
    spec = only("Deployment", values)["spec"]
    assert spec["strategy"] == {"type": "Recreate"}
    assert spec["template"]["spec"]["hostNetwork"] is True
    assert spec["template"]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "hostNetwork" not in only("Deployment")["spec"]["template"]["spec"]
