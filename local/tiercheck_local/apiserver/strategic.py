"""Strategic merge patch for the built-in kinds: lists of named things are merged by name instead of replaced.

The real server takes the merge keys from its Go types. Here they are a table of field names, enough for the kinds
that are served.
"""

from __future__ import annotations

from typing import Any

_MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "port"),
    "conditions": ("type",),
    "addresses": ("type",),
    "ownerReferences": ("uid",),
    "imagePullSecrets": ("name",),
    "secrets": ("name",),
    "hostAliases": ("ip",),
    "podIPs": ("ip",),
    "hostIPs": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
    "resourceClaims": ("name",),
}
_PRIMITIVE_SETS = frozenset({"finalizers", "podCIDRs"})


def strategic_merge(target: Any, patch: Any, field: str = "") -> Any:
    """Directives understood: `$patch` (delete, replace), `$retainKeys`, `$setElementOrder/x`, `$deleteFromPrimitiveList/x`."""
    if isinstance(patch, list):
        return _merge_list(target if isinstance(target, list) else [], patch, field)
    if not isinstance(patch, dict):
        return patch
    if patch.get("$patch") == "replace":
        return {k: v for k, v in patch.items() if k != "$patch"}
    if patch.get("$patch") == "delete":
        return {}
    result = dict(target) if isinstance(target, dict) else {}
    if "$retainKeys" in patch:
        result = {k: v for k, v in result.items() if k in patch["$retainKeys"]}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name, []) if item not in value]
        elif key.startswith("$"):
            continue
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = strategic_merge(result.get(key), value, key)
    for key, value in patch.items():
        if key.startswith("$setElementOrder/"):
            name = key.partition("/")[2]
            if name in result:
                result[name] = _ordered(result[name], value, name)
    return result


def _merge_list(target: list[Any], patch: list[Any], field: str) -> list[Any]:
    if field in _PRIMITIVE_SETS:
        return target + [item for item in patch if item not in target]
    key = _merge_key(field, patch)
    if key is None:
        return patch
    if any(item.get("$patch") == "replace" and len(item) == 1 for item in patch):
        return [item for item in patch if "$patch" not in item]
    result = list(target)
    for item in patch:
        at = next((i for i, old in enumerate(result) if old.get(key) == item.get(key)), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(strategic_merge({}, item))
        else:
            result[at] = strategic_merge(result[at], item)
    return result


def _merge_key(field: str, items: list[Any]) -> str | None:
    if not all(isinstance(item, dict) for item in items):
        return None
    named = [item for item in items if set(item) != {"$patch"}]
    return next((k for k in _MERGE_KEYS.get(field, ()) if all(k in item for item in named)), None)


def _ordered(items: list[Any], order: list[Any], field: str) -> list[Any]:
    """Items named in `order` take that order among themselves; the others keep their places."""
    if items and isinstance(items[0], dict):
        key = _merge_key(field, items)
        if key is None:
            return items
        place = {entry.get(key): index for index, entry in enumerate(order)}
        identity = [item.get(key) for item in items]
    else:
        place = {entry: index for index, entry in enumerate(order)}
        identity = items
    listed = iter(sorted((i for i, name in enumerate(identity) if name in place), key=lambda i: place[identity[i]]))
    return [items[next(listed)] if name in place else item for item, name in zip(items, identity, strict=True)]
