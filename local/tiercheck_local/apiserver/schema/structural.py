"""Applies structural schemas of CRDs: prunes, fills in defaults, and reports errors."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from tiercheck_local.apiserver.errors import FieldCause, Object
from tiercheck_local.apiserver.schema.cel import Rules

_INT_OR_STRING = "x-kubernetes-int-or-string"
_OWN = ("apiVersion", "kind", "metadata")
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def _accept(value: Any, schema: Object, unknown: list[str], path: str = "", root: bool = False) -> Any:
    """Returns `value` with defaults and without fields that the schema does not name, listed in `unknown`.

    Nulls in fields that are not nullable count as absent, as in the real server. At the root and in embedded
    objects, apiVersion, kind and metadata are the server's own and always stay.
    """
    if isinstance(value, list):
        items = schema.get("items")
        if items is None:
            return value
        return [_accept(item, items, unknown, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    own = _OWN if root or schema.get("x-kubernetes-embedded-resource") else ()
    result = {}
    for key, item in value.items():
        at = _join(path, key)
        if key in own:
            result[key] = item
        elif key in known:
            if item is not None or known[key].get("nullable"):
                result[key] = _accept(item, known[key], unknown, at)
        elif isinstance(others, dict):
            result[key] = _accept(item, others, unknown, at)
        elif schema.get("x-kubernetes-preserve-unknown-fields") or others is True:
            result[key] = item
        else:
            unknown.append(at)
    for key, field in known.items():
        if key not in result and "default" in field:
            result[key] = _accept(copy.deepcopy(field["default"]), field, unknown, _join(path, key))
    return result


def faults(value: Any, schema: Object, path: str = "") -> Iterator[FieldCause]:
    """Yields everything that is wrong with `value`, CEL rules aside."""
    if value is None and schema.get("nullable"):
        return
    wrong = _wrong_type(value, schema, path)
    if wrong:
        yield wrong
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(_shown(choice) for choice in schema["enum"])
        message = f"Unsupported value: {_shown(value)}: supported values: {supported}"
        yield FieldCause(path, message, "FieldValueNotSupported")
    if wrong:
        return
    if isinstance(value, str):
        yield from _string_faults(value, schema, path)
    elif isinstance(value, bool):
        pass
    elif isinstance(value, (int, float)):
        yield from _number_faults(value, schema, path)
    elif isinstance(value, list):
        yield from _list_faults(value, schema, path)
    elif isinstance(value, dict):
        yield from _object_faults(value, schema, path)
    if "anyOf" in schema and all(any(faults(value, part, path)) for part in schema["anyOf"]):
        yield _invalid("", path, "must validate at least one schema (anyOf)")


def _wrong_type(value: Any, schema: Object, path: str) -> FieldCause | None:
    if schema.get(_INT_OR_STRING):
        kind, good = "integer,string", isinstance(value, (int, str)) and not isinstance(value, bool)
    elif "type" in schema:
        kind = schema["type"]
        good = isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
        good = good or (kind == "integer" and isinstance(value, float) and value.is_integer())
    else:
        return None
    if good:
        return None
    actual = f'"{_type_name(value)}"'
    message = f"Invalid value: {actual}: {_in_body(path)} must be of type {kind}: {actual}"
    return FieldCause(path or "<nil>", message, "FieldValueTypeInvalid")


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return next(name for name, types in _TYPES.items() if isinstance(value, types))


def _string_faults(value: str, schema: Object, path: str) -> Iterator[FieldCause]:
    if len(value) > schema.get("maxLength", len(value)):
        limit = schema["maxLength"]
        yield FieldCause(path, f"Too long: may not be more than {limit} bytes", "FieldValueTooLong")
    elif len(value) < schema.get("minLength", 0):
        yield _invalid(value, path, f"should be at least {schema['minLength']} chars long")
    elif "pattern" in schema and not _pattern(schema["pattern"]).search(value):
        yield _invalid(value, path, f"should match '{schema['pattern']}'")
    if schema.get("format") == "date-time" and not _is_time(value):
        yield _invalid(value, path, f"must be of type date-time: {_shown(value)}", "FieldValueTypeInvalid")


@lru_cache(maxsize=1024)
def _pattern(text: str) -> re.Pattern[str]:
    # RE2's \z is Python's \Z, and its $ never matches before a final newline.
    return re.compile(re.sub(r"(?<!\\)\$$", r"\\Z", text))


def _is_time(value: str) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _number_faults(value: float, schema: Object, path: str) -> Iterator[FieldCause]:
    bits = {"int32": 31, "int64": 63}.get(schema.get("format", ""))
    if bits and not -(2**bits) <= value < 2**bits:
        yield _invalid(value, path, f"must be of type {schema['format']}")
    if value < schema.get("minimum", value):
        yield _invalid(value, path, f"should be greater than or equal to {schema['minimum']}")
    if value > schema.get("maximum", value):
        yield _invalid(value, path, f"should be less than or equal to {schema['maximum']}")


def _list_faults(value: list[Any], schema: Object, path: str) -> Iterator[FieldCause]:
    yield from _count_faults(len(value), schema, path, "items")
    for index, item in enumerate(value):
        yield from faults(item, schema.get("items", {}), f"{path}[{index}]")
    kind = schema.get("x-kubernetes-list-type")
    seen: list[Any] = []
    for index, item in enumerate(value if kind in ("map", "set") else ()):
        identity = _map_key(item, schema) if kind == "map" else item
        if identity in seen:
            message = f"Duplicate value: {_shown(identity)}"
            yield FieldCause(f"{path}[{index}]", message, "FieldValueDuplicate")
        seen.append(identity)


def _map_key(item: Any, schema: Object) -> Any:
    keys = schema.get("x-kubernetes-list-map-keys", [])
    return {key: item[key] for key in keys if key in item} if isinstance(item, dict) else item


def _object_faults(value: Object, schema: Object, path: str) -> Iterator[FieldCause]:
    for key in schema.get("required", ()):
        if key not in value:
            yield FieldCause(_join(path, key), "Required value", "FieldValueRequired")
    yield from _count_faults(len(value), schema, path, "properties")
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for key, item in value.items():
        if key in known:
            yield from faults(item, known[key], _join(path, key))
        elif isinstance(others, dict):
            yield from faults(item, others, _join(path, key))


def _count_faults(count: int, schema: Object, path: str, what: str) -> Iterator[FieldCause]:
    most, least = (schema.get(f"{bound}{what.title()}") for bound in ("max", "min"))
    if most is not None and count > most:
        yield FieldCause(path, f"Too many: {count}: must have at most {most} items", "FieldValueTooMany")
    if least is not None and count < least:
        yield _invalid(count, path, f"should have at least {least} {what}")


def _invalid(value: Any, path: str, why: str, reason: str = "FieldValueInvalid") -> FieldCause:
    return FieldCause(path, f"Invalid value: {_shown(value)}: {_in_body(path)} {why}", reason)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _in_body(path: str) -> str:
    return f"{path} in body" if path else "in body"


def _shown(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


_BLOCKING = frozenset(
    {
        "FieldValueRequired",
        "FieldValueNotSupported",
        "FieldValueTooLong",
        "FieldValueTooMany",
        "FieldValueTypeInvalid",
    }
)
_NOT_CHECKED = FieldCause(
    "<nil>",
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation",
)


@dataclass(frozen=True, eq=False)
class CustomVersion:
    """The definition of one version of a CRD."""

    schema: Object
    rules: Rules
    columns: tuple[Object, ...]
    has_status: bool

    def accept(self, value: Object) -> tuple[Object, list[str]]:
        """Returns `value` pruned and with defaults, and the paths of the fields that were unknown."""
        unknown: list[str] = []
        return _accept(value, self.schema, unknown, root=True), unknown

    def faults(self, value: Object, old: Object | None) -> list[FieldCause]:
        """Returns what is wrong with `value`. Rules run only on a value of the shape that they assume."""
        body = {k: v for k, v in value.items() if k not in _OWN}
        found = list(faults(body, self.schema))
        if any(cause.reason in _BLOCKING for cause in found):
            return [*found, _NOT_CHECKED] if self.rules.any else found
        return found + list(self.rules.faults(value, old))
