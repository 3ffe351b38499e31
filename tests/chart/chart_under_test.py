"""The chart as the real Helm SDK renders it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

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
        for document in yaml.load_all(
            text, yaml.CSafeLoader
        )  # ten times as fast, with definitions as long as ours
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
