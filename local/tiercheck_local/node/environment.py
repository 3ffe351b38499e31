"""Makes a container's environment, and its command after `$(VAR)` expansion, as a kubelet does.

Pure.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck_cli.api_server import CONFIG_MAPS, SECRETS
from tiercheck_local.client import Client
from tiercheck_operator.model.spelling import parse_amount

Object = Mapping[str, Any]
Lookup = Callable[[str, str], Mapping[str, bytes] | None]
"""("Secret" or "ConfigMap", name) -> its data, or None."""


class BadReference(ValueError):
    """A name, key or field that the container refers to does not exist: CreateContainerConfigError."""


@dataclass(frozen=True)
class PodFacts:
    """What the downward API knows beyond the pod's manifest."""

    pod: Object
    node: str
    pod_ip: str
    host_ip: str
    allocatable: Mapping[str, str]


def environment(container: Object, facts: PodFacts, lookup: Lookup) -> dict[str, str]:
    """The variables that the manifest asks for. Raises BadReference."""
    result: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if key in source:
                data = _data(kind, source[key], lookup)
                result.update({source.get("prefix", "") + name: value for name, value in data.items()})
    for entry in container.get("env") or []:
        if entry.get("valueFrom"):
            value = _value_from(entry["valueFrom"], container, facts, lookup)
            if value is not None:
                result[entry["name"]] = value
        else:
            result[entry["name"]] = expand(str(entry.get("value") or ""), result)
    return result


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` where NAME is known; `$$` is a literal `$`."""

    def replace(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return re.sub(r"\$\$|\$\(([^)]+)\)", replace, text)


def command_line(container: Object, variables: Mapping[str, str]) -> list[str]:
    """Command and arguments. No image is looked at, so its entry point is unknown. Raises BadReference."""
    words: Sequence[str] = [*(container.get("command") or []), *(container.get("args") or [])]
    if not container.get("command"):
        raise BadReference("the laptop cluster does not look into images: the container needs a command")
    return [expand(word, variables) for word in words]


def _data(kind: str, reference: Object, lookup: Lookup) -> Mapping[str, str]:
    data = lookup(kind, reference["name"])
    if data is None and not reference.get("optional"):
        raise BadReference(f"{kind.lower()} {reference['name']!r} not found")
    return {key: value.decode(errors="replace") for key, value in (data or {}).items()}


def _value_from(source: Object, container: Object, facts: PodFacts, lookup: Lookup) -> str | None:
    for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if key in source:
            reference = source[key]
            data = _data(kind, reference, lookup)
            if reference["key"] not in data and not reference.get("optional"):
                raise BadReference(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
            return data.get(reference["key"])
    if "fieldRef" in source:
        return field(source["fieldRef"]["fieldPath"], facts)
    if "resourceFieldRef" in source:
        return _resource(source["resourceFieldRef"], container, facts)
    raise BadReference(f"unsupported valueFrom: {', '.join(source)}")


def field(path: str, facts: PodFacts) -> str:
    """A field of the downward API. Raises BadReference."""
    metadata, spec = facts.pod["metadata"], facts.pod["spec"]
    keyed = re.match(r"^metadata\.(labels|annotations)\['([^']+)'\]$", path)
    if keyed:
        return str((metadata.get(keyed.group(1)) or {}).get(keyed.group(2), ""))
    simple = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "metadata.labels": _listed(metadata.get("labels")),
        "metadata.annotations": _listed(metadata.get("annotations")),
        "spec.nodeName": facts.node,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": facts.pod_ip,
        "status.podIPs": facts.pod_ip,
        "status.hostIP": facts.host_ip,
        "status.hostIPs": facts.host_ip,
    }
    if path not in simple:
        raise BadReference(f"unsupported fieldPath {path!r}")
    return str(simple[path])


def _listed(entries: Mapping[str, str] | None) -> str:
    return "\n".join(f'{key}="{value}"' for key, value in sorted((entries or {}).items()))


def _resource(reference: Object, container: Object, facts: PodFacts) -> str:
    section, _, name = reference["resource"].partition(".")
    resources = container.get("resources") or {}
    amount = (resources.get(section) or {}).get(name)
    if amount is None:  # as a kubelet: without a limit, what the node has
        amount = facts.allocatable.get(name, "0") if section == "limits" else "0"
    divisor = parse_amount(reference.get("divisor") or "1") or 1
    return str(math.ceil(parse_amount(amount) / divisor))


_COLLECTIONS = {"Secret": SECRETS, "ConfigMap": CONFIG_MAPS}


def _names(value: Any) -> Iterator[tuple[str, str]]:
    """(kind, name) of everything that the pod's spec refers to."""
    if isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key in {"secretRef", "secretKeyRef", "secret"} and isinstance(item, Mapping):
                yield "Secret", item.get("secretName") or item.get("name", "")
            elif key in {"configMapRef", "configMapKeyRef", "configMap"} and isinstance(item, Mapping):
                yield "ConfigMap", item.get("name", "")
            else:
                yield from _names(item)


async def fetch_references(client: Client, pod: Mapping[str, Any]) -> Lookup:
    """A lookup over what exists now."""
    known: dict[tuple[str, str], dict[str, bytes]] = {}
    for kind, name in set(_names(pod["spec"])):
        found = await client.find(_COLLECTIONS[kind], pod["metadata"]["namespace"], name) if name else None
        if found is None:
            continue
        encoded = found.get("binaryData" if kind == "ConfigMap" else "data") or {}
        known[kind, name] = {key: base64.b64decode(value) for key, value in encoded.items()}
        if kind == "ConfigMap":
            known[kind, name] |= {key: text.encode() for key, text in (found.get("data") or {}).items()}
    return lambda kind, name: known.get((kind, name))
