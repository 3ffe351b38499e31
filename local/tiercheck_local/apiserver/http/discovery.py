"""Answers what clients request first: groups, versions and resources, and their schemas.

OpenAPI documents go as far as kubectl reads them, for validation and `explain`.
"""

from __future__ import annotations

import hashlib
import json

from tiercheck_local.apiserver.errors import Object
from tiercheck_local.apiserver.resources import Registry, Resource

VERSION: Object = {
    "major": "1",
    "minor": "33",
    "gitVersion": "v1.33.0+tiercheck-local",
    "platform": "linux/amd64",
}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SUBRESOURCES = {
    "binding": ("Binding", "", ["create"]),
    "eviction": ("Eviction", "policy/v1", ["create"]),
    "finalize": ("", "", ["update"]),
    "status": ("", "", ["get", "patch", "update"]),
}


def core_versions(address: str) -> Object:
    """Returns `/api`."""
    return {
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
    }


def groups(registry: Registry) -> Object:
    """Returns `/apis`."""
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group(n, v) for n, v in registry.groups().items()],
    }


def group(registry: Registry, name: str) -> Object | None:
    """Returns `/apis/<group>`."""
    versions = registry.groups().get(name)
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, versions)} if versions else None


def _group(name: str, versions: list[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def resources(registry: Registry, group_name: str, version: str) -> Object | None:
    """Returns `/api/v1` or `/apis/<group>/<version>`."""
    found = registry.of(group_name, version)
    if not found:
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group_name}/{version}" if group_name else version,
        "resources": [entry for resource in found for entry in _entries(resource)],
    }


def _entries(resource: Resource) -> list[Object]:
    main: Object = {
        "name": resource.plural,
        "singularName": resource.singular or resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": _VERBS,
    }
    if resource.short_names:
        main["shortNames"] = list(resource.short_names)
    if resource.categories:
        main["categories"] = list(resource.categories)
    entries = [main]
    for name in resource.subresources:
        kind, api_version, verbs = _SUBRESOURCES[name]
        entry: Object = {
            "name": f"{resource.plural}/{name}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": kind or resource.kind,
            "verbs": verbs,
        }
        if api_version:
            entry["group"], _, entry["version"] = api_version.partition("/")
        entries.append(entry)
    return entries


def openapi_index(registry: Registry) -> Object:
    """Returns `/openapi/v3`."""
    versions = sorted({(r.group, r.version) for r in registry})
    return {"paths": {_folder(g, v): {"serverRelativeURL": _url(registry, g, v)} for g, v in versions}}


def _folder(group: str, version: str) -> str:
    return f"apis/{group}/{version}" if group else f"api/{version}"


def _url(registry: Registry, group: str, version: str) -> str:
    digest = hashlib.sha256(
        json.dumps(openapi(registry, group, version), sort_keys=True).encode()
    ).hexdigest()
    return f"/openapi/v3/{_folder(group, version)}?hash={digest[:32].upper()}"


def openapi(registry: Registry, group: str, version: str) -> Object:
    """Returns `/openapi/v3/<group-version>`."""
    paths: Object = {}
    schemas: Object = {}
    for resource in registry.of(group, version):
        reversed_group = ".".join(reversed((resource.group or "core.api.k8s.io").split(".")))
        name = f"{reversed_group}.{resource.version}.{resource.kind}"
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
    operation: Object = {
        "x-kubernetes-action": verb,
        "x-kubernetes-group-version-kind": _identity(resource),
        "responses": {"200": {"description": "OK", "content": reference}},
    }
    if verb != "get":
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": "string"}}
            for name in ("dryRun", "fieldManager", "fieldValidation")
        ]
    return operation
