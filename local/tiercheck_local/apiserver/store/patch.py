"""Applies patches: each format takes an object and a patch and gives a new object."""

from __future__ import annotations

import copy
from typing import Any

from tiercheck_local.apiserver.errors import ApiError, bad_request, unsupported_media_type


def merge(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic_merge(target: Any, patch: Any) -> Any:
    """A strategic merge patch without lists is a merge patch. Raises ApiError 415 for one with lists."""
    if _has_lists(patch):
        raise unsupported_media_type(["application/merge-patch+json", "application/json-patch+json"])
    return merge(target, patch)


def _has_lists(patch: Any) -> bool:
    if isinstance(patch, dict):
        return any(key.startswith("$") or _has_lists(value) for key, value in patch.items())
    return isinstance(patch, list)


def json_patch(target: Any, operations: Any) -> Any:
    """JSON patch (RFC 6902). Raises ApiError: 422 if an operation cannot be applied, 400: malformed."""
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    result = copy.deepcopy(target)
    for operation in operations:
        try:
            result = _apply(result, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            # The real server does not say which operation failed either.
            raise ApiError(
                422, "Invalid", "the server rejected our request due to an error in our request", {}
            ) from error
    return result


def _apply(root: Any, operation: dict[str, Any]) -> Any:
    kind, path = operation["op"], _pointer(operation["path"])
    if kind == "test":
        if _get(root, path) != operation["value"]:
            raise ValueError("testing value failed")
        return root
    if kind == "remove":
        return _remove(root, path)
    if kind == "replace":
        _get(root, path)
        return _add(_remove(root, path) if path else root, path, operation["value"])
    if kind == "add":
        return _add(root, path, operation["value"])
    source = _pointer(operation["from"])
    value = copy.deepcopy(_get(root, source))
    if kind == "move":
        return _add(_remove(root, source), path, value)
    if kind == "copy":
        return _add(root, path, value)
    raise ValueError(f"unexpected kind: {kind}")


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError("a path begins with /")
    return [step.replace("~1", "/").replace("~0", "~") for step in text.split("/")[1:]]


def _get(value: Any, path: list[str]) -> Any:
    for step in path:
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def _add(root: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent, last = _get(root, path[:-1]), path[-1]
    if isinstance(parent, list):
        index = len(parent) if last == "-" else int(last)
        if not 0 <= index <= len(parent):
            raise IndexError("unable to access invalid index")
        parent.insert(index, value)
    elif isinstance(parent, dict):
        parent[last] = value
    else:
        raise KeyError("add operation does not apply: doc is missing path")
    return root


def _remove(root: Any, path: list[str]) -> Any:
    parent, last = _get(root, path[:-1]), path[-1]
    del parent[int(last) if isinstance(parent, list) else last]
    return root
