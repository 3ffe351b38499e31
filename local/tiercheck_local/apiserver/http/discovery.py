"""What clients ask first: which groups, versions and resources are there."""

from __future__ import annotations

from tiercheck_local.apiserver.errors import Object
from tiercheck_local.apiserver.resources import Registry, Resource

VERSION: Object = {
    "major": "1",
    "minor": "33",
    "gitVersion": "v1.33.0+tiercheck-local",
    "gitCommit": "",
    "gitTreeState": "",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
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
    """`/api`"""
    return {
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
    }


def groups(registry: Registry) -> Object:
    """`/apis`"""
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group(n, v) for n, v in registry.groups().items()],
    }


def group(registry: Registry, name: str) -> Object | None:
    """`/apis/<group>`"""
    versions = registry.groups().get(name)
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, versions)} if versions else None


def _group(name: str, versions: list[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def resources(registry: Registry, group_name: str, version: str) -> Object | None:
    """`/api/v1` and `/apis/<group>/<version>`"""
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
        "singularName": resource.singular,
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
