"""Encodes the protocol's dataclasses as JSON, and decodes them, with the standard library alone.

The trainer side may have nothing installed but torch, so it uses this module. Operator and sidecar decode the
same classes with msgspec, which accepts exactly what `to_json` writes (a test checks that). `plain_json`
limits the input of both.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from enum import Enum
from typing import Any, TypeVar, Union

from tiercheck.protocol.plain_json import Malformed, parse_json

__all__ = ["Malformed", "from_builtins", "from_json", "to_builtins", "to_json"]

T = TypeVar("T")

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_FIELDS: dict[type, tuple[str, ...] | None] = {}
_SCALARS = frozenset({str, int, float, bool, type(None)})


def to_json(value: object) -> bytes:
    """Returns a protocol dataclass as compact JSON."""
    return _ENCODER.encode(to_builtins(value)).encode()


def to_builtins(value: Any) -> Any:
    """Converts a value to dicts, lists and scalars, as in JSON."""
    if type(value) in _SCALARS:
        return value
    if (names := field_names(type(value))) is not None:
        return {
            name: content if type(content := getattr(value, name)) in _SCALARS else to_builtins(content)
            for name in names
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _SCALARS else to_builtins(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_builtins(item) for key, item in value.items()}
    return value


def field_names(kind: type) -> tuple[str, ...] | None:
    """Returns the encoded names of a dataclass, `op` first if its class has one; None: it is no dataclass."""
    if kind not in _FIELDS:
        found = dataclasses.is_dataclass(kind)
        names = tuple(field.name for field in dataclasses.fields(kind)) if found else None
        _FIELDS[kind] = (
            ("op", *names) if names is not None and "op" not in names and hasattr(kind, "op") else names
        )
    return _FIELDS[kind]


def from_json(text: bytes | str, cls: type[T]) -> T:
    """Decodes `text` into `cls`. Raises Malformed with the first error's path.

    Unknown fields are ignored, because a newer sender may add some. For a union of dataclasses, the `op` in
    `text` selects the class.
    """
    return from_builtins(parse_json(text), cls)


def from_builtins(raw: object, cls: type[T]) -> T:
    """Decodes the result of `parse_json` as `from_json` does. Raises Malformed."""
    return typing.cast(T, _decode(raw, cls, "$"))


def _decode(raw: Any, kind: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(raw, typing.get_args(kind), path)
    if origin is tuple:
        return _decode_all(raw, kind, path)
    if origin is list:
        return list(_decode_all(raw, kind, path))
    if origin is dict:
        return _decode_dict(raw, *typing.get_args(kind), path=path)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(raw, kind, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(raw)
        except ValueError as error:
            raise Malformed(f"{path}: {error}") from error
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if not isinstance(raw, kind) or (kind is int and isinstance(raw, bool)):
        raise Malformed(f"{path}: expected {kind.__name__}, found {type(raw).__name__}")
    return raw


def _decode_union(raw: Any, options: tuple[Any, ...], path: str) -> Any:
    if raw is None:
        if type(None) in options:
            return None
        raise Malformed(f"{path}: must not be null")
    kinds = [option for option in options if option is not type(None)]
    if len(kinds) == 1:
        return _decode(raw, kinds[0], path)
    named = raw.get("op") if isinstance(raw, dict) else None
    kind = next((each for each in kinds if each.op == named), None)
    if kind is None:
        raise Malformed(f"{path}.op: {named!r} is none of {', '.join(each.op for each in kinds)}")
    return _decode(raw, kind, path)


def _decode_all(raw: Any, kind: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise Malformed(f"{path}: expected a list")
    item = typing.get_args(kind)[0]
    return tuple(_decode(entry, item, f"{path}[{index}]") for index, entry in enumerate(raw))


def _decode_dict(raw: Any, key: Any, item: Any, *, path: str) -> dict[Any, Any]:
    """Decodes an object; its keys, which are strings in JSON, may represent whole numbers."""
    if not isinstance(raw, dict):
        raise Malformed(f"{path}: expected an object")
    try:
        keys = [key(name) for name in raw]
    except ValueError as error:
        raise Malformed(f"{path}: a key is no {key.__name__}") from error
    return dict(
        zip(keys, (_decode(entry, item, f"{path}.{name}") for name, entry in raw.items()), strict=True)
    )


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode_dataclass(raw: Any, kind: Any, path: str) -> Any:
    if not isinstance(raw, dict):
        raise Malformed(f"{path}: expected an object")
    hints = _type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in raw:
            values[field.name] = _decode(raw[field.name], hints[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise Malformed(f"{path}.{field.name}: missing")
    return kind(**values)
