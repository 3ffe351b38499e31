"""Runs the rules of a CRD (`x-kubernetes-validations`), written in CEL, with celpy.

Evaluating a rule costs about a millisecond, and most writes change a small part of an object, so results are
cached by rule and input values.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from celpy import Environment
from celpy.adapter import json_to_cel
from celpy.celparser import CELParseError
from celpy.celtypes import IntType
from celpy.evaluation import CELEvalError

from tiercheck_local.apiserver.errors import FieldCause, Object
from tiercheck_operator.model.serialization import parse_amount

_lock = threading.Lock()
_environment = Environment()


_QUANTITIES: Any = {
    "quantity": lambda text: IntType(int(parse_amount(str(text)) * 1000)),
    "add": lambda one, other: IntType(one + other),
    "compareTo": lambda one, other: IntType((one > other) - (one < other)),
}
"""The part of the API server's functions that our rules use; a quantity is counted in thousandths."""


class BadRule(ValueError):
    """The text is not valid CEL."""


@lru_cache(maxsize=1024)
def _program(rule: str) -> Any:
    try:
        with _lock:  # celpy's parser is shared and keeps state
            return _environment.program(_environment.compile(rule), functions=_QUANTITIES)
    except CELParseError as error:
        raise BadRule(str(error)) from error


class Rules:
    """All rules of one schema, applied to whole objects."""

    def __init__(self, schema: Object) -> None:
        self._schema = schema
        self.any = _uses_rules(schema)

    @staticmethod
    def check(rule: Object) -> None:
        """Raises BadRule if the rule or its message cannot be compiled."""
        _program(rule.get("rule", ""))
        if rule.get("messageExpression"):
            _program(rule["messageExpression"])

    def faults(self, value: Object, old: Object | None) -> Iterator[FieldCause]:
        """Yields one cause per broken rule, from the root down. Transition rules need an old value there."""
        if self.any:
            yield from self._walk(value, old, self._schema, "", root=True)

    def _walk(
        self, value: Any, old: Any, schema: Object, path: str, root: bool = False
    ) -> Iterator[FieldCause]:
        if value is None or not _uses_rules(schema):
            return
        for rule in schema.get("x-kubernetes-validations", ()):
            yield from self._apply(rule, _visible(value, root), _visible(old, root), path)
        if isinstance(value, dict):
            before = old if isinstance(old, dict) else {}
            known, others = schema.get("properties", {}), schema.get("additionalProperties")
            for key, item in value.items():
                field = known.get(key, others if isinstance(others, dict) else None)
                if field is not None:
                    yield from self._walk(item, before.get(key), field, f"{path}.{key}" if path else key)
        elif isinstance(value, list):
            matched = _matched(value, old, schema)
            for index, item in enumerate(value):
                yield from self._walk(item, matched[index], schema.get("items", {}), f"{path}[{index}]")

    def _apply(self, rule: Object, value: Any, old: Any, path: str) -> Iterator[FieldCause]:
        text = rule["rule"]
        value, old = _needed(rule, value), _needed(rule, old)
        transition = "oldSelf" in text
        if transition and old is None:
            return
        said = rule.get("message") or f"failed rule: {text}"
        before = _canonical(old) if transition else None
        problem = _problem(text, rule.get("messageExpression"), said, _canonical(value), before)
        if problem is not None:
            at = path + rule.get("fieldPath", "") if path else rule.get("fieldPath", "").removeprefix(".")
            yield FieldCause(at or "<nil>", f"Invalid value: {problem}")


def _needed(rule: Object, value: Any) -> Any:
    """Returns the fields of `value` that the rule can read; without the others, the cache has more hits."""
    if not isinstance(value, dict):
        return value
    fields = _fields_read(rule["rule"] + "\n" + rule.get("messageExpression", ""))
    return value if fields is None else {key: value[key] for key in fields if key in value}


@lru_cache(maxsize=1024)
def _fields_read(text: str) -> tuple[str, ...] | None:
    """Returns the fields that the rule reads; None if it uses `self` as a whole."""
    words = re.findall(r"\b(?:self|oldSelf)\b(?:\.(\w+)\b(?!\s*\())?", text)
    return None if "" in words else tuple(sorted(set(words)))


@lru_cache(maxsize=4096)
def _problem(rule: str, expression: str | None, message: str, value: str, old: str | None) -> str | None:
    """Returns None if the rule holds, else the sentence to show. `value` and `old` are JSON."""
    known = {"self": json_to_cel(json.loads(value))}
    if old is not None:
        known["oldSelf"] = json_to_cel(json.loads(old))
    try:
        if bool(_program(rule).evaluate(known)):
            return None
    except CELEvalError as error:
        return f"rule evaluation failed: {error}"
    if expression is not None:
        with contextlib.suppress(CELEvalError):  # the server falls back to the fixed message
            return str(_program(expression).evaluate(known))
    return message


def _visible(value: Any, root: bool) -> Any:
    """Returns what rules may see of an object: at the root, only the names of its metadata."""
    if not root or not isinstance(value, dict):
        return value
    metadata = value.get("metadata") or {}
    return {**value, "metadata": {k: metadata[k] for k in ("name", "generateName") if k in metadata}}


def _matched(value: list[Any], old: Any, schema: Object) -> list[Any]:
    """Returns the predecessor of each item. Only the items of a list-map can be recognised again."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if schema.get("x-kubernetes-list-type") != "map" or not keys or not isinstance(old, list):
        return [None] * len(value)
    known = {tuple(str(item.get(k)) for k in keys): item for item in old}
    return [known.get(tuple(str(item.get(k)) for k in keys)) for item in value]


def _uses_rules(schema: Object) -> bool:
    # Kept beside the schema by identity: a schema lives as long as its CRD and never changes.
    found = _KNOWN.get(id(schema))
    if found is None or found[0] is not schema:
        inner = [
            *schema.get("properties", {}).values(),
            schema.get("items"),
            schema.get("additionalProperties"),
        ]
        used = bool(schema.get("x-kubernetes-validations")) or any(
            _uses_rules(s) for s in inner if isinstance(s, dict)
        )
        found = _KNOWN[id(schema)] = (schema, used)
    return found[1]


_KNOWN: dict[int, tuple[Object, bool]] = {}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
