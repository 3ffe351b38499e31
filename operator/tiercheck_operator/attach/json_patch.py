"""An admission answer is a JSON patch (RFC 6902): this finds the one that turns what was sent into what is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def difference(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """Operations that turn `old` into `new`. Lists are replaced as a whole."""
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        return list(_members(old, new, path))
    return [{"op": "replace", "path": path, "value": new}]


def _members(old: dict[str, Any], new: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    for key in old:
        if key not in new:
            yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in new.items():
        at = f"{path}/{_escaped(key)}"
        if key not in old:
            yield {"op": "add", "path": at, "value": value}
        else:
            yield from difference(old[key], value, at)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
