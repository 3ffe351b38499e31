"""CustomResourceDefinitions: one becomes a served resource, with its schema's rules for every object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiercheck_local.apiserver.errors import FieldCause, Object
from tiercheck_local.apiserver.resources import Resource
from tiercheck_local.apiserver.schema.cel import BadRule, Rules
from tiercheck_local.apiserver.schema.structural import CustomVersion
from tiercheck_local.clock import timestamp


def prepare(crd: Object) -> list[FieldCause]:
    """Set in place what the server sets on a CRD. Returns what is wrong with it."""
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
        found.append(
            FieldCause(
                "spec.versions",
                f"Invalid value: {_versions(spec)}: must have exactly one version marked as storage version",
            )
        )
    for index, version in enumerate(spec["versions"]):
        at = f"spec.versions[{index}].schema.openAPIV3Schema"
        if not (version.get("schema") or {}).get("openAPIV3Schema"):
            found.append(FieldCause(at, "Required value: schemas are required", "FieldValueRequired"))
        else:
            found.extend(_schema_faults(version["schema"]["openAPIV3Schema"], at))
    return found


def _versions(spec: Object) -> str:
    return "[" + " ".join(version.get("name", "") for version in spec["versions"]) + "]"


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
    for name, field in schema.get("properties", {}).items():
        yield from _schema_faults(field, f"{at}.properties[{name}]")
    if isinstance(schema.get("items"), dict):
        yield from _schema_faults(schema["items"], f"{at}.items")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _schema_faults(schema["additionalProperties"], f"{at}.additionalProperties")


def established_status(crd: Object) -> Object:
    """The status of a CRD whose resource is being served."""
    spec = crd["spec"]
    earlier = {c["type"]: c for c in (crd.get("status") or {}).get("conditions", [])}
    stored = next(version["name"] for version in spec["versions"] if version.get("storage"))

    def condition(kind: str, reason: str, message: str) -> Object:
        return earlier.get(kind) or {
            "type": kind, "status": "True", "reason": reason, "message": message,
            "lastTransitionTime": timestamp(),
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
    """The resources that this CRD defines, one per served version."""
    spec = crd["spec"]
    return [_resource(spec, version) for version in spec["versions"] if version.get("served")]


def _resource(spec: Object, version: Object) -> Resource:
    names, schema = spec["names"], version["schema"]["openAPIV3Schema"]
    has_status = "status" in (version.get("subresources") or {})
    fields: list[Any] = version.get("selectableFields") or []
    custom = CustomVersion(
        schema=schema,
        rules=Rules(schema),
        columns=tuple(version.get("additionalPrinterColumns") or ()),
        has_status=has_status,
        selectable=frozenset(field["jsonPath"].removeprefix(".") for field in fields),
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
