"""Parses label and field selectors, which choose the objects of a list or a watch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck_local.apiserver.errors import bad_request

Labels = Mapping[str, str]
Predicate = Callable[[Mapping[str, Any]], bool]

_TOKEN = re.compile(r"\s*(==|!=|=|!|\(|\)|,|>|<|[^\s=!(),<>]+)")
_KEY = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Requirement:
    """One term of a label selector."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Labels) -> bool:
        present = self.key in labels
        value = labels.get(self.key)
        if self.operator == "exists":
            return present
        if self.operator == "absent":
            return not present
        if self.operator == "in":
            return value in self.values
        if self.operator == "notin":
            return value not in self.values
        try:
            number, bound = int(value or ""), int(self.values[0])
        except ValueError:
            return False
        return number > bound if self.operator == ">" else number < bound


def parse_labels(text: str) -> list[Requirement]:
    """Parses the whole grammar: `a=b,c!=d,e,!f,g in (h,i),j notin (k),l>1`. Raises ApiError 400."""
    tokens = _TOKEN.findall(text)
    requirements = []
    while tokens:
        requirements.append(_requirement(tokens, text))
        if tokens and (tokens.pop(0) != "," or not tokens):
            raise _unparsable(text)
    return requirements


def _requirement(tokens: list[str], text: str) -> Requirement:
    negated = tokens[0] == "!"
    if negated:
        tokens.pop(0)
    if not tokens or not _KEY.fullmatch(tokens[0]):
        raise _unparsable(text)
    key = tokens.pop(0)
    if negated:
        return Requirement(key, "absent")
    if not tokens or tokens[0] == ",":
        return Requirement(key, "exists")
    operator = tokens.pop(0)
    if operator in ("in", "notin"):
        return Requirement(key, operator, _values(tokens, text))
    value = tokens.pop(0) if tokens and tokens[0] != "," else ""
    if operator in ("=", "=="):
        return Requirement(key, "in", (value,))
    if operator == "!=":
        return Requirement(key, "notin", (value,))
    if operator in ("<", ">") and re.fullmatch(r"-?\d+", value):
        return Requirement(key, operator, (value,))
    raise _unparsable(text)


def _values(tokens: list[str], text: str) -> tuple[str, ...]:
    if not tokens or tokens.pop(0) != "(" or ")" not in tokens:
        raise _unparsable(text)
    values = []
    while (token := tokens.pop(0)) != ")":
        if token != ",":
            values.append(token)
    return tuple(values)


def _unparsable(text: str) -> Exception:
    return bad_request(f"unable to parse requirement: found unexpected token in label selector {text!r}")


def label_predicate(text: str) -> Predicate:
    """Returns a predicate. Raises ApiError 400 if `text` is no label selector."""
    requirements = parse_labels(text)

    def matches(value: Mapping[str, Any]) -> bool:
        labels = value.get("metadata", {}).get("labels") or {}
        return all(requirement.matches(labels) for requirement in requirements)

    return matches


_FIELDS: dict[str, frozenset[str]] = {
    "/pods": frozenset({"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.hostNetwork",
                        "spec.serviceAccountName", "status.phase", "status.podIP",
                        "status.nominatedNodeName"}),
    "/nodes": frozenset({"spec.unschedulable"}),
    "/secrets": frozenset({"type"}),
    "/namespaces": frozenset({"status.phase"}),
    "/services": frozenset({"spec.clusterIP", "spec.type"}),
    "/events": frozenset({
        "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
        "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
        "reason", "type", "source", "reportingComponent", "reportingController",
    }),
}  # fmt: skip


def field_predicate(text: str, collection: str) -> Predicate:
    """Returns a predicate. Raises ApiError 400 for a field that this collection cannot be selected by."""
    terms = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"([^=!]+)(==|!=|=)(.*)", part)
        if not found:
            raise bad_request(f"invalid selector: {text!r}; can't understand {part!r}")
        path, operator, value = found[1].strip(), found[2], found[3].strip()
        known = {"metadata.name", "metadata.namespace"} | _FIELDS.get(collection, frozenset())
        if path not in known:
            raise bad_request(f"field label not supported: {path}")
        terms.append((path, operator == "!=", value))

    def matches(value: Mapping[str, Any]) -> bool:
        return all((_field(value, path) == wanted) is not negated for path, negated, wanted in terms)

    return matches


def _field(value: Any, path: str) -> str:
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "false" if path in ("spec.unschedulable", "spec.hostNetwork") else ""
    return str(value)


def matches_selector(selector: Mapping[str, Any], labels: Labels) -> bool:
    """Evaluates a LabelSelector, also with the Gt and Lt of nodes. An empty one matches everything."""
    operators = {
        "In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "absent", "Gt": ">", "Lt": "<",
    }  # fmt: skip
    terms = [Requirement(key, "in", (value,)) for key, value in (selector.get("matchLabels") or {}).items()]
    terms += [
        Requirement(entry["key"], operators[entry["operator"]], tuple(entry.get("values") or ()))
        for entry in selector.get("matchExpressions") or []
    ]
    return all(term.matches(labels) for term in terms)
