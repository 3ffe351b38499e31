"""Which resources are served, built-in ones and those that CRDs add, and which of them a URL means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.schema.structural import CustomVersion


@dataclass(frozen=True)
class Resource:
    """One resource in one version of its group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    singular: str = ""
    collection: str = ""
    """Where its objects are stored. Two versions of one resource share it."""
    custom: CustomVersion | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.collection:
            object.__setattr__(self, "collection", f"{self.group}/{self.plural}")
        if not self.singular:
            object.__setattr__(self, "singular", self.kind.lower())

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


def _core(plural: str, kind: str, **more: object) -> Resource:
    return Resource("", "v1", plural, kind, **more)  # type: ignore[arg-type]


BUILT_IN: tuple[Resource, ...] = (
    _core("namespaces", "Namespace", namespaced=False, short_names=("ns",),
    subresources=("status", "finalize")),
    _core("nodes", "Node", namespaced=False, short_names=("no",), subresources=("status",)),
    _core("pods", "Pod", short_names=("po",), subresources=("status", "binding", "eviction"),
    categories=("all",)),
    _core("services", "Service", short_names=("svc",), subresources=("status",), categories=("all",)),
    _core("secrets", "Secret"),
    _core("configmaps", "ConfigMap", short_names=("cm",)),
    _core("events", "Event", short_names=("ev",)),
    _core("serviceaccounts", "ServiceAccount", short_names=("sa",)),
    Resource("batch", "v1", "jobs", "Job", subresources=("status",), categories=("all",)),
    Resource(
        "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration",
        namespaced=False,
        categories=("api-extensions",),
    ),
    Resource("coordination.k8s.io", "v1", "leases", "Lease"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", short_names=("pdb",),
    subresources=("status",)),
    Resource(
        "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition",
        namespaced=False,
        short_names=("crd", "crds"), subresources=("status",), categories=("api-extensions",),
    ),
)  # fmt: skip

NAMESPACES, NODES, PODS = BUILT_IN[0], BUILT_IN[1], BUILT_IN[2]
WEBHOOKS = BUILT_IN[9]
CRDS = BUILT_IN[-1]
PDBS = BUILT_IN[-2]


class Registry:
    """All served resources, by group, version and plural."""

    def __init__(self) -> None:
        self._resources = {(r.group, r.version, r.plural): r for r in BUILT_IN}

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._resources.get((group, version, plural))

    def replace_custom(self, group: str, plural: str, versions: list[Resource]) -> None:
        """Serve exactly `versions` of this custom resource; none of them removes it."""
        kept = {
            k: r
            for k, r in self._resources.items()
            if not (r.custom and (r.group, r.plural) == (group, plural))
        }
        self._resources = kept | {(r.group, r.version, r.plural): r for r in versions}

    def groups(self) -> dict[str, list[str]]:
        """The versions of each named group, in order of registration."""
        found: dict[str, list[str]] = {}
        for group, version, _ in self._resources:
            if group and version not in found.setdefault(group, []):
                found[group].append(version)
        return found

    def of(self, group: str, version: str) -> list[Resource]:
        return [r for r in self if (r.group, r.version) == (group, version)]

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._resources.values())


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
