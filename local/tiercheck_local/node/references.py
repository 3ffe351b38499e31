"""Fetches the Secrets and ConfigMaps that a pod refers to, once, before anything of it starts."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from tiercheck_cli.api_server import CONFIG_MAPS, SECRETS
from tiercheck_local.client import Client
from tiercheck_local.node.environment import Lookup

_COLLECTIONS = {"Secret": SECRETS, "ConfigMap": CONFIG_MAPS}


def names(value: Any) -> Iterator[tuple[str, str]]:
    """(kind, name) of everything that the pod's spec refers to."""
    if isinstance(value, list):
        for item in value:
            yield from names(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key in {"secretRef", "secretKeyRef", "secret"} and isinstance(item, Mapping):
                yield "Secret", item.get("secretName") or item.get("name", "")
            elif key in {"configMapRef", "configMapKeyRef", "configMap"} and isinstance(item, Mapping):
                yield "ConfigMap", item.get("name", "")
            else:
                yield from names(item)


async def fetch(client: Client, pod: Mapping[str, Any]) -> Lookup:
    """A lookup over what exists now. Kinds "Secret/binary" and "ConfigMap/binary" give base64 of every key."""
    text: dict[tuple[str, str], dict[str, str]] = {}
    for kind, name in set(names(pod["spec"])):
        found = await client.find(_COLLECTIONS[kind], pod["metadata"]["namespace"], name) if name else None
        if found is None:
            continue
        encoded = dict(found.get("binaryData" if kind == "ConfigMap" else "data") or {})
        if kind == "ConfigMap":
            plain = dict(found.get("data") or {})
            encoded.update({key: base64.b64encode(value.encode()).decode() for key, value in plain.items()})
        text[f"{kind}/binary", name] = encoded
        text[kind, name] = {key: base64.b64decode(value).decode(errors="replace") for key, value in encoded.items()}
    return lambda kind, name: text.get((kind, name))
