"""Which resource, object and subresource a URL means."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.resources import Registry, Resource


@dataclass(frozen=True)
class Target:
    resource: Resource
    namespace: str = ""
    """ "" is every namespace, or none."""
    name: str = ""
    subresource: str = ""


def resolve(registry: Registry, path: str) -> Target:
    """Raises ApiError 404 if nothing is served there."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise errors.no_such_path()
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and registry.find(group, version, rest[2]):
        namespace, rest = rest[1], rest[2:]
    if rest == ["bindings"] and namespace:
        rest = ["pods", "", "binding"]
    resource = registry.find(group, version, rest[0])
    if resource is None or len(rest) > 3 or (namespace and not resource.namespaced):
        raise errors.no_such_path()
    name, subresource = ([*rest, "", ""])[1:3]
    if subresource and subresource not in resource.subresources:
        raise errors.no_such_path()
    if name and resource.namespaced and not namespace:
        raise errors.no_such_path()
    return Target(resource, namespace, name, subresource)
