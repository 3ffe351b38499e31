"""The few protobuf bodies that kubectl insists on sending: `kubectl drain`, `create namespace | configmap | secret`.

Everything else, and every answer, is JSON. The field numbers are those of the API's own generated.proto files.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.errors import Object

_MAGIC = b"k8s\0"
_Fields = dict[int, tuple[str, Any]]
"""Number -> (name, how to read it): "text", "bytes", "number", "flag", "map", "bytes map", "list" or nested fields."""

_METADATA: _Fields = {
    1: ("name", "text"),
    2: ("generateName", "text"),
    3: ("namespace", "text"),
    11: ("labels", "map"),
    12: ("annotations", "map"),
}
_DELETE_OPTIONS: _Fields = {
    1: ("gracePeriodSeconds", "number"),
    2: ("preconditions", {1: ("uid", "text"), 2: ("resourceVersion", "text")}),
    4: ("propagationPolicy", "text"),
    5: ("dryRun", "list"),
}
_KINDS: dict[str, _Fields] = {
    "DeleteOptions": _DELETE_OPTIONS,
    "Eviction": {1: ("metadata", _METADATA), 2: ("deleteOptions", _DELETE_OPTIONS)},
    "Namespace": {1: ("metadata", _METADATA)},
    "ConfigMap": {
        1: ("metadata", _METADATA), 2: ("data", "map"), 3: ("binaryData", "bytes map"), 4: ("immutable", "flag"),
    },
    "Secret": {
        1: ("metadata", _METADATA), 2: ("data", "bytes map"), 3: ("type", "text"), 4: ("stringData", "map"),
        5: ("immutable", "flag"),
    },
}  # fmt: skip


def decode(body: bytes) -> Object:
    """The object in a Kubernetes protobuf envelope. Raises ApiError: 415 for other kinds, 400 if it is malformed."""
    if not body.startswith(_MAGIC):
        raise errors.bad_request("the object provided is unrecognized (must be of type Unknown)")
    try:
        envelope = dict(_fields(body[len(_MAGIC) :]))
        about = {number: raw.decode() for number, raw in _fields(envelope[1])}
        kind = about.get(2, "")
        if kind not in _KINDS:
            raise errors.unsupported_media_type(["application/json", "application/yaml"])
        return {"apiVersion": about.get(1, ""), "kind": kind, **_message(envelope.get(2, b""), _KINDS[kind])}
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        raise errors.bad_request(f"the object provided is unrecognized: {error}") from error


def _message(raw: bytes, known: _Fields) -> Object:
    result: Object = {}
    for number, value in _fields(raw):
        if number not in known:
            continue
        name, kind = known[number]
        if kind in ("map", "bytes map"):
            entry = dict(_fields(value))
            item = entry.get(2, b"")
            text = item.decode() if kind == "map" else base64.b64encode(item).decode()
            result.setdefault(name, {})[entry.get(1, b"").decode()] = text
        elif kind == "list":
            result.setdefault(name, []).append(value.decode())
        elif isinstance(kind, dict):
            result[name] = _message(value, kind)
        elif kind == "text":
            if value:
                result[name] = value.decode()
        else:
            result[name] = bool(value) if kind == "flag" else value
    return result


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an integer, or the bytes of a string, map entry or message."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        if tag & 7 == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, at = _varint(raw, at)
            if at + length > len(raw):
                raise ValueError("truncated")
            yield tag >> 3, raw[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {tag & 7}")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
