"""Serves the OpenAPI documents as far as kubectl reads them, for validation and `explain`."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tiercheck_local.apiserver.errors import Object
from tiercheck_local.apiserver.resources import Registry, Resource


def index(registry: Registry) -> Object:
    """`/openapi/v3`"""
    versions = sorted({(r.group, r.version) for r in registry})
    return {"paths": {_folder(g, v): {"serverRelativeURL": _url(registry, g, v)} for g, v in versions}}


def _folder(group: str, version: str) -> str:
    return f"apis/{group}/{version}" if group else f"api/{version}"


def _url(registry: Registry, group: str, version: str) -> str:
    digest = hashlib.sha256(
        json.dumps(document(registry, group, version), sort_keys=True).encode()
    ).hexdigest()
    return f"/openapi/v3/{_folder(group, version)}?hash={digest[:32].upper()}"


def document(registry: Registry, group: str, version: str) -> Object:
    """`/openapi/v3/<group-version>`"""
    paths: Object = {}
    schemas: Object = {}
    for resource in registry.of(group, version):
        name = _schema_name(resource)
        schemas[name] = _schema(resource)
        scope = "/namespaces/{namespace}" if resource.namespaced else ""
        paths[f"/{_folder(group, version)}{scope}/{resource.plural}/{{name}}"] = {
            verb: _operation(resource, verb, name) for verb in ("get", "put", "patch")
        }
        paths[f"/{_folder(group, version)}{scope}/{resource.plural}"] = {
            "post": _operation(resource, "post", name)
        }
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.33.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _schema_name(resource: Resource) -> str:
    reversed_group = ".".join(reversed((resource.group or "core.api.k8s.io").split(".")))
    return f"{reversed_group}.{resource.version}.{resource.kind}"


def _identity(resource: Resource) -> Object:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _schema(resource: Resource) -> Object:
    schema: Object = {"type": "object", "x-kubernetes-group-version-kind": [_identity(resource)]}
    if not resource.custom:
        return {**schema, "x-kubernetes-preserve-unknown-fields": True}
    properties = {**resource.custom.schema.get("properties", {})}
    properties.setdefault("apiVersion", {"type": "string"})
    properties.setdefault("kind", {"type": "string"})
    properties["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {**resource.custom.schema, **schema, "properties": properties}


def _operation(resource: Resource, verb: str, schema: str) -> Object:
    reference = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    actions = {"get": "get", "put": "put", "patch": "patch", "post": "post"}
    operation: Object = {
        "x-kubernetes-action": actions[verb],
        "x-kubernetes-group-version-kind": _identity(resource),
        "responses": {"200": {"description": "OK", "content": reference}},
    }
    if verb != "get":
        names: list[Any] = ["dryRun", "fieldManager", "fieldValidation"]
        operation["parameters"] = [{"name": n, "in": "query", "schema": {"type": "string"}} for n in names]
    return operation
