"""Defines which resources are served, built in or by CRDs, and resolves URLs to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.errors import FieldCause, Object
from tiercheck_local.apiserver.schema.cel import BadRule, Rules
from tiercheck_local.apiserver.schema.structural import CustomVersion
from tiercheck_operator.model.status import rfc3339


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
    custom: CustomVersion | None = field(default=None, compare=False)

    @property
    def collection(self) -> str:
        """Returns the collection of its objects, which all its versions share."""
        return f"{self.group}/{self.plural}"

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
        """Serves exactly `versions` of this custom resource; an empty list removes it."""
        kept = {
            k: r
            for k, r in self._resources.items()
            if not (r.custom and (r.group, r.plural) == (group, plural))
        }
        self._resources = kept | {(r.group, r.version, r.plural): r for r in versions}

    def groups(self) -> dict[str, list[str]]:
        """Returns the versions of each named group, in order of registration."""
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
    """The namespace; "" is every namespace, or none."""
    name: str = ""
    subresource: str = ""


def resolve(registry: Registry, path: str) -> Target:
    """Resolves a URL's path. Raises ApiError 404 if nothing is served there."""
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


def prepare_definition(crd: Object) -> list[FieldCause]:
    """Sets in place what the server sets on a CRD. Returns what is wrong with it."""
    spec = crd.get("spec") or {}
    names = spec.get("names") or {}
    missing = [
        FieldCause(f"spec.{field}", "Required value", "FieldValueRequired")
        for field, value in (("group", spec.get("group")), ("scope", spec.get("scope")),
                             ("names.plural", names.get("plural")), ("names.kind", names.get("kind")),
                             ("versions", spec.get("versions")))
        if not value
    ]  # fmt: skip
    if missing:
        return missing
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", names["kind"] + "List")
    spec.setdefault("conversion", {"strategy": "None"})
    wanted, name = f"{names['plural']}.{spec['group']}", crd["metadata"]["name"]
    found = []
    if name != wanted:
        found.append(
            FieldCause("metadata.name", f'Invalid value: "{name}": must be spec.names.plural+"."+spec.group')
        )
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        versions = " ".join(version.get("name", "") for version in spec["versions"])
        found.append(
            FieldCause(
                "spec.versions",
                f"Invalid value: [{versions}]: must have exactly one version marked as storage version",
            )
        )
    for index, version in enumerate(spec["versions"]):
        at = f"spec.versions[{index}].schema.openAPIV3Schema"
        if not (version.get("schema") or {}).get("openAPIV3Schema"):
            found.append(FieldCause(at, "Required value: schemas are required", "FieldValueRequired"))
        else:
            found.extend(_schema_faults(version["schema"]["openAPIV3Schema"], at))
    return found


def _schema_faults(schema: Object, at: str) -> Iterator[FieldCause]:
    if "type" not in schema and not any(
        schema.get(f"x-kubernetes-{x}") for x in ("preserve-unknown-fields", "int-or-string")
    ):
        yield FieldCause(
            f"{at}.type",
            "Required value: must not be empty for specified object fields",
            "FieldValueRequired",
        )
    for index, rule in enumerate(schema.get("x-kubernetes-validations", ())):
        try:
            Rules.check(rule)
        except BadRule as error:
            shown = rule.get("rule", "")
            yield FieldCause(
                f"{at}.x-kubernetes-validations[{index}].rule",
                f'Invalid value: "{shown}": compilation failed: {error}',
            )
    for name, inner in schema.get("properties", {}).items():
        yield from _schema_faults(inner, f"{at}.properties[{name}]")
    if isinstance(schema.get("items"), dict):
        yield from _schema_faults(schema["items"], f"{at}.items")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _schema_faults(schema["additionalProperties"], f"{at}.additionalProperties")


def established_status(crd: Object) -> Object:
    """Returns the status of a CRD once its resource is served."""
    spec = crd["spec"]
    earlier = {c["type"]: c for c in (crd.get("status") or {}).get("conditions", [])}
    stored = next(version["name"] for version in spec["versions"] if version.get("storage"))

    def condition(kind: str, reason: str, message: str) -> Object:
        return earlier.get(kind) or {
            "type": kind, "status": "True", "reason": reason, "message": message,
            "lastTransitionTime": rfc3339(time.time()),
        }  # fmt: skip

    return {
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
        "acceptedNames": spec["names"],
        "storedVersions": sorted({stored, *(crd.get("status") or {}).get("storedVersions", [])}),
    }


def resources_of(crd: Object) -> list[Resource]:
    """Returns the resources that this CRD defines, one per served version."""
    spec = crd["spec"]
    return [_resource(spec, version) for version in spec["versions"] if version.get("served")]


def _resource(spec: Object, version: Object) -> Resource:
    names, schema = spec["names"], version["schema"]["openAPIV3Schema"]
    has_status = "status" in (version.get("subresources") or {})
    custom = CustomVersion(
        schema=schema,
        rules=Rules(schema),
        columns=tuple(version.get("additionalPrinterColumns") or ()),
        has_status=has_status,
    )
    return Resource(
        group=spec["group"],
        version=version["name"],
        plural=names["plural"],
        kind=names["kind"],
        namespaced=spec["scope"] == "Namespaced",
        short_names=tuple(names.get("shortNames") or ()),
        subresources=("status",) if has_status else (),
        categories=tuple(names.get("categories") or ()),
        singular=names["singular"],
        custom=custom,
    )
