"""The part of JSONPath that printer columns use: fields, indices, wildcards and equality filters."""

from __future__ import annotations

import re
from typing import Any

_STEP = re.compile(
    r"""\.(?P<field>[\w-]+)|\[['"](?P<quoted>[^'"]+)['"]\]|\[(?P<index>-?\d+)\]|(?P<all>\[\*\]|\.\*)"""
    r"""|\[\?\(@\.(?P<key>[\w.]+)\s*==\s*(?P<value>'[^']*'|"[^"]*"|[\w.]+)\)\]"""
)


def find(value: Any, path: str) -> list[Any]:
    """All that `path` leads to; empty if it leads nowhere. Raises ValueError on a path outside of the subset."""
    path = path.strip("{}")
    found, at = [value], 0
    while at < len(path):
        step = _STEP.match(path, at)
        if not step:
            raise ValueError(f"unsupported JSONPath: {path}")
        found = [item for source in found for item in _follow(source, step)]
        at = step.end()
    return [item for item in found if item is not None]


def _follow(value: Any, step: re.Match[str]) -> list[Any]:
    name = step["field"] or step["quoted"]
    if name is not None:
        return [value[name]] if isinstance(value, dict) and name in value else []
    if step["index"] is not None:
        index = int(step["index"])
        return [value[index]] if isinstance(value, list) and -len(value) <= index < len(value) else []
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if step["all"]:
        return items
    wanted = step["value"].strip("'\"")
    return [item for item in items if [str(x) for x in find(item, "." + step["key"])] == [wanted]]
