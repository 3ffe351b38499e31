"""Formats objects for clients: as JSON, as a list, or as the rows that `kubectl get` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from jsonpath_ng.ext.parser import parse

from tiercheck_local.apiserver.errors import Object
from tiercheck_local.apiserver.resources import Resource

Cell = Callable[[Object], Any]
Column = tuple[Object, Cell]


def table(
    resource: Resource, objects: list[Object], version: str, include: str, headers: bool = True
) -> Object:
    """Returns a meta.k8s.io/v1 Table. `include` is Metadata or Object, as the client asked."""
    columns = _columns(resource)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": [definition for definition, _ in columns] if headers else [],
        "rows": [
            {"cells": [cell(value) for _, cell in columns], **_included(value, include)} for value in objects
        ],
    }  # fmt: skip


def _included(value: Object, include: str) -> Object:
    if include == "Object":
        return {"object": value}
    partial = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": value["metadata"]}
    return {"object": partial}


def _column(name: str, cell: Cell, wide: bool = False) -> Column:
    definition = {
        "name": name,
        "type": "string",
        "format": "",
        "description": name,
        "priority": 1 if wide else 0,
    }
    return definition, cell


def _at(*path: str, default: Any = "<none>") -> Cell:
    def cell(value: Object) -> Any:
        found: Any = value
        for step in path:
            found = found.get(step) if isinstance(found, dict) else None
        return default if found in (None, "") else found

    return cell


def age_of(timestamp: str | None) -> str:
    """Returns the time since then as kubectl writes it: 5s, 2m3s, 3h, 4d."""
    if not timestamp:
        return "<unknown>"
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds())
    for least, size, unit, exact, smaller, name in (
        (172_800, 86_400, "d", 8, 3_600, "h"), (10_800, 3_600, "h", 8, 60, "m"), (120, 60, "m", 10, 1, "s"),
    ):  # fmt: skip
        if seconds >= least:
            rest = seconds % size // smaller if seconds < exact * size else 0
            return f"{seconds // size}{unit}{f'{rest}{name}' if rest else ''}"
    return f"{max(seconds, 0)}s"


_NAME = (
    {"name": "Name", "type": "string", "format": "name", "description": "Name", "priority": 0},
    _at("metadata", "name"),
)
_AGE = _column("Age", lambda value: age_of(value["metadata"].get("creationTimestamp")))


def _lasting(pod: Object) -> list[Object]:
    """Returns the main containers and the sidecars."""
    spec = pod["spec"]
    sidecars = [each for each in spec.get("initContainers") or [] if each.get("restartPolicy") == "Always"]
    return [*spec.get("containers", []), *sidecars]


def _statuses(pod: Object) -> list[Object]:
    names, status = {each["name"] for each in _lasting(pod)}, pod.get("status", {})
    known = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return [each for each in known if each["name"] in names]


def _ready(pod: Object) -> str:
    return f"{sum(bool(each.get('ready')) for each in _statuses(pod))}/{len(_lasting(pod))}"


def _pod_status(pod: Object) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = pod.get("status", {})
    for container in status.get("containerStatuses", []):
        state = container.get("state", {})
        reason = {**state.get("terminated", {}), **state.get("waiting", {})}.get("reason")
        if reason:
            return str(reason)
    return str(status.get("reason") or status.get("phase") or "Unknown")


def _restarts(pod: Object) -> str:
    return str(sum(each.get("restartCount", 0) for each in _statuses(pod)))


def _node_status(node: Object) -> str:
    ready = [c["status"] for c in node.get("status", {}).get("conditions", []) if c["type"] == "Ready"]
    words = ["Unknown" if not ready else "Ready" if ready[0] == "True" else "NotReady"]
    if node.get("spec", {}).get("unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def _node_roles(node: Object) -> str:
    prefix = "node-role.kubernetes.io/"
    labels = node["metadata"].get("labels") or {}
    return ",".join(sorted(k.removeprefix(prefix) for k in labels if k.startswith(prefix))) or "<none>"


def _node_address(node: Object) -> str:
    addresses = node.get("status", {}).get("addresses", [])
    return next((a["address"] for a in addresses if a["type"] == "InternalIP"), "<none>")


def _event_object(event: Object) -> str:
    about = event.get("involvedObject") or {}
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _event_age(event: Object) -> str:
    last = event.get("lastTimestamp") or (event.get("series") or {}).get("lastObservedTime")
    return age_of(last or event.get("eventTime") or event["metadata"].get("creationTimestamp"))


_TABLES: dict[str, tuple[Column, ...]] = {
    "/pods": (
        _NAME,
        _column("Ready", _ready),
        _column("Status", _pod_status),
        _column("Restarts", _restarts),
        _AGE,
        _column("IP", _at("status", "podIP"), wide=True),
        _column("Node", _at("spec", "nodeName"), wide=True),
    ),
    "/nodes": (
        _NAME,
        _column("Status", _node_status),
        _column("Roles", _node_roles),
        _AGE,
        _column("Version", _at("status", "nodeInfo", "kubeletVersion", default="")),
        _column("Internal-IP", _node_address, wide=True),
    ),
    "/events": (
        _column("Last Seen", _event_age),
        _column("Type", _at("type", default="")),
        _column("Reason", _at("reason", default="")),
        _column("Object", _event_object),
        _column("Message", lambda e: str(e.get("message") or "").strip()),
    ),
}
_CREATED_AT = (_NAME, _column("Created At", _at("metadata", "creationTimestamp")))


def _columns(resource: Resource) -> tuple[Column, ...]:
    if resource.custom:
        return (
            _NAME,
            *(map(_custom_column, resource.custom.columns) if resource.custom.columns else (_AGE,)),
        )
    return _TABLES.get(resource.collection, _CREATED_AT)


def _custom_column(column: Object) -> Column:
    definition = {
        "name": column["name"],
        "type": column["type"],
        "format": column.get("format", ""),
        "description": column.get("description", ""),
        "priority": column.get("priority", 0),
    }

    path = _parsed_path(column["jsonPath"])

    def cell(value: Object) -> Any:
        found = [match.value for match in path.find(value) if match.value is not None]
        if not found:
            return None
        if column["type"] == "date":
            return age_of(found[0])
        if column["type"] == "string":
            return ",".join(_text(item) for item in found)
        return found[0]

    return definition, cell


@lru_cache(maxsize=256)
def _parsed_path(path: str) -> Any:
    return parse(f"${path}")


def _text(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class ResponseView:
    """The form in which one client requested one resource."""

    resource: Resource
    as_table: bool = False
    include: str = "Metadata"

    def one(self, value: Object, headers: bool = True) -> Object:
        value = self._versioned(value)
        if self.as_table:
            return table(
                self.resource, [value], value["metadata"].get("resourceVersion", ""), self.include, headers
            )
        return value

    def many(self, values: list[Object], metadata: Object) -> Object:
        values = [self._versioned(value) for value in values]
        if self.as_table:
            found = table(self.resource, values, metadata["resourceVersion"], self.include)
            return {**found, "metadata": metadata}
        # Items of built-in lists carry no kind, as the list has it.
        said = () if self.resource.custom else ("kind", "apiVersion")
        items = [{key: each for key, each in value.items() if key not in said} for value in values]
        kind, version = self.resource.kind + "List", self.resource.api_version
        return {"kind": kind, "apiVersion": version, "metadata": metadata, "items": items}

    def _versioned(self, value: Object) -> Object:
        if value.get("apiVersion") != self.resource.api_version:
            return {**value, "apiVersion": self.resource.api_version}
        return value


def view(resource: Resource, accept: str, include: str) -> ResponseView:
    """Returns the first form in an Accept header that this server can write."""
    for choice in accept.split(","):
        words = [word.strip() for word in choice.split(";")]
        if words[0] not in ("application/json", "*/*", "application/*", ""):
            continue
        if "as=Table" in words:
            return ResponseView(resource, as_table=True, include=include or "Metadata")
        if not any(word.startswith("as=") for word in words):
            break
    return ResponseView(resource)
