"""Renders the chart, and installs it on a real API server of which all calls are recorded.

There are no controllers for Deployments here, so the operator's process is started by the test, with the
environment of the Deployment and the token of the chart's service account.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.access import REAL_SERVER
from tests.operator.kubernetes.proxy import JOBS, Recording, recording, service_account_kubeconfig
from tiercheck_local.cluster import LocalCluster

helm = pytest.importorskip(
    "helm_python", reason="the Helm SDK (helm-python-sdk) has no wheel for this machine"
)

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tiercheck"
RELEASE, NAMESPACE = "tiercheck", "tiercheck-system"
CASES = tuple(sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml")))
"""Values files: what is linted, rendered and compared with a snapshot."""


def values_of(case: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{case}-values.yaml").read_text())
    return loaded


def rendered(
    values: Mapping[str, Any] | None = None, release: str = RELEASE, namespace: str = NAMESPACE
) -> dict[str, str]:
    """Template -> text, NOTES.txt included. Raises helm.HelmValuesError, helm.HelmRenderError."""
    with helm.Chart.load(CHART) as chart:
        texts: dict[str, str] = chart.render(dict(values or {}), name=release, namespace=namespace)
    return {path.removeprefix("tiercheck/templates/"): text for path, text in texts.items()}


def objects(
    values: Mapping[str, Any] | None = None, release: str = RELEASE, namespace: str = NAMESPACE
) -> list[dict[str, Any]]:
    """Everything that an installation would create, the test pod included."""
    texts = rendered(values, release, namespace)
    return [
        document
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        # Ten times as fast as the other loader, with definitions as long as ours.
        for document in yaml.load_all(text, yaml.CSafeLoader)
        if document
    ]


def of_kind(kind: str, values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    return [entry for entry in objects(values) if entry["kind"] == kind]


def only(kind: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The one object of that kind."""
    (found,) = of_kind(kind, values)
    return found


def operators_environment(values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Of the operator's container; what the pod is told about itself is left out."""
    (container,) = only("Deployment", values)["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def granted(roles: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """(API group, resource, verb) for every right in these roles."""
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def strings(value: Any) -> Iterator[str]:
    """Every string in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)


real = [*REAL_SERVER, pytest.mark.cluster]

DEADLINE = 90.0
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{_CRDS}/tiercheckjobs.tiercheck.io"
DEFINITIONS = (CRD, f"{_CRDS}/tiercheckpolicies.tiercheck.io")
ACCOUNT = f"{RELEASE}-operator"


def install(
    config: Any, cluster: LocalCluster, values: dict[str, Any] | None = None, chart: Path = CHART
) -> dict[str, Any]:
    release: dict[str, Any] = config.install(chart, RELEASE, values or {}, create_namespace=True)
    cluster.wait_for(lambda: cluster.answers(JOBS.format("default")), DEADLINE, "jobs to be served")
    return release


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
    own = service_account_kubeconfig(
        cluster.kubeconfig, NAMESPACE, spec["serviceAccountName"], folder / "own"
    )
    with recording(own, folder / "recorded") as record:
        process = cluster.start_operator({"KUBECONFIG": str(record.kubeconfig), **env})
        try:
            yield record
        except AssertionError as error:
            # What was waited for in vain is often what was refused.
            for refusal in record.refused[:5]:
                error.add_note(f"refused: {refusal}")
            raise
        finally:
            process.terminate()
            process.wait(30)
