"""How objects leave the server: as JSON, as a list, or as a table, in the version that the URL named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiercheck_local.apiserver.errors import Object
from tiercheck_local.apiserver.http.table import table
from tiercheck_local.apiserver.resources import Resource

Shape = Callable[[Object], Object]


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class ResponseView:
    """What one client wants to see of one resource."""

    resource: Resource
    as_table: bool = False
    include: str = "Metadata"

    @property
    def name(self) -> str:
        """Equal for views that encode alike."""
        return f"{self.resource.api_version}{self.as_table}{self.include}"

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
        items = values if self.resource.custom else [_bare(value) for value in values]
        kind, version = self.resource.kind + "List", self.resource.api_version
        return {"kind": kind, "apiVersion": version, "metadata": metadata, "items": items}

    def _versioned(self, value: Object) -> Object:
        if value.get("apiVersion") != self.resource.api_version:
            return {**value, "apiVersion": self.resource.api_version}
        return value


def _bare(value: Object) -> Object:
    """Items of built-in lists carry no kind, as the list says it."""
    return {k: v for k, v in value.items() if k not in ("kind", "apiVersion")}


def view(resource: Resource, accept: str, include: str) -> ResponseView:
    """The first form in an Accept header that this server can write."""
    for choice in accept.split(","):
        words = [word.strip() for word in choice.split(";")]
        if words[0] not in ("application/json", "*/*", "application/*", ""):
            continue
        if "as=Table" in words:
            return ResponseView(resource, as_table=True, include=include or "Metadata")
        if not any(word.startswith("as=") for word in words):
            break
    return ResponseView(resource)
