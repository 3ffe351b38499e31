"""The objects that the tests start from."""

from __future__ import annotations

from typing import Any


def _metadata(name: str, labels: dict[str, str] | None) -> dict[str, Any]:
    return {"name": name, **({"labels": labels} if labels else {})}


def pod(name: str, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "example:1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(name, labels),
        "spec": {"containers": [container], **spec},
    }


def config_map(name: str, labels: dict[str, str] | None = None, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(name, labels), "data": data}


def widget(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "conformance.test/v1",
        "kind": "Widget",
        "metadata": {"name": name},
        "spec": {"size": 3, **spec},
    }
