"""Reads the API server's objects so that each takes a bounded part of this process's memory.

Whoever may create an object decides how large and how deep it is, and one process reads those of all teams.
So an object is weighed as text, before anything is made of it. One that is too heavy or too deep becomes a
shell: its identity, its status if that is small, and under `UNREADABLE` a sentence for its owner.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.json import Decoder

from tiercheck.protocol import names
from tiercheck.protocol.plain_json import MOST_DEPTH, is_too_deep, parse_json
from tiercheck_operator.model.parsing import UNREADABLE

MOST_PAGE = 2 * 2**20
"""Bytes of a page of a list with more than one object."""
MOST_ANSWER = 12 * 2**20
"""Bytes of any answer. An object has 1.5 MiB at most in etcd, and may have some times as many as JSON."""
_MOST_JOB, _MOST_OTHER = 2**20, 4 * 2**20
"""Bytes of memory. A job is kept for as long as it exists, others for a moment."""
_ANY = 2**62
_VALUE_BYTES = 192
"""Bytes of memory for each value of a JSON text, at most: a dict with one key."""
_LONGEST_ANNOTATION = 16 * 1024
"""Characters. Longer ones are left out: nothing here reads one."""
_MOST_NAME = 4 * 1024
_KEPT_OF_SHELL = ("name", "namespace", "uid", "resourceVersion", "generation", "deletionTimestamp")

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_CUT = b'"%s"' % secrets.token_hex(16).encode()
"""Stands for what is too deep. Nobody else can write it."""
_PARTS = Decoder(dict[str, msgspec.Raw])
_ITEMS = Decoder(list[msgspec.Raw])


def most_of(path: str) -> int:
    """Bytes of memory that an object read from this path of the API may take."""
    if path.endswith("/customresourcedefinitions"):
        return _ANY  # administrators write them, and kopf ends for want of their group
    return _MOST_JOB if f"/{names.API_GROUP}/" in path else _MOST_OTHER


def weigh(text: bytes) -> int:
    """The most bytes of memory that a JSON text takes once it is decoded."""
    values = text.count(b",") + text.count(b"{") + text.count(b"[")
    wide = not text.isascii() or b"\\u" in text
    return _VALUE_BYTES * values + len(text) * (4 if wide else 1)


def without_depth(text: bytes) -> bytes:
    """The text with a mark in place of what is deeper than decoders can read."""
    if not is_too_deep(text):
        return text
    kept: list[bytes] = []
    depth = begin = 0
    for token in _TOKEN.finditer(text):
        bracket = token[0][:1]
        if bracket in b"{[":
            depth += 1
            if depth == MOST_DEPTH + 1:
                kept += [text[begin : token.start()], _CUT]
        elif bracket in b"}]":
            if depth == MOST_DEPTH + 1:
                begin = token.end()
            depth -= 1
    return b"".join([*kept, text[begin:]])


def read_object(text: bytes, most: int) -> dict[str, Any]:
    """The object without who wrote which field, which is half of it and decides nothing; its shell if it is
    too deep, or weighs more than `most`. Raises ValueError for what is no object."""
    try:
        return _read(without_depth(text), most)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no object: {error}") from error


def read_answer(text: bytes, most: int) -> dict[str, Any]:
    """A list with its objects as `read_object` reads them; else that object. Raises ValueError."""
    try:
        text = without_depth(text)
        parts = _PARTS.decode(text)
        if "items" not in parts:
            return _read(text, most)
        found = {key: parse_json(bytes(part)) for key, part in parts.items() if key != "items"}
        items = parts["items"]
        return {**found, "items": [_read(bytes(each), most) for each in _ITEMS.decode(items) or ()]}
    except msgspec.MsgspecError as error:
        raise ValueError(f"no list: {error}") from error


def read_event(line: bytes, most: int) -> bytes:
    """An event of a watch with its object as `read_object` reads it. Any error, and what is no event, become
    the one error after which a watch begins anew."""
    try:
        parts = _PARTS.decode(without_depth(line))
        kind = parse_json(bytes(parts["type"]))
        if kind == "BOOKMARK":
            return line
        if kind != "ERROR":
            return msgspec.json.encode({"type": kind, "object": _read(bytes(parts["object"]), most)})
    except (ValueError, LookupError, msgspec.MsgspecError):
        pass
    return b'{"type":"ERROR","object":{"code":410}}'


def _read(text: bytes, most: int) -> dict[str, Any]:
    parts = _PARTS.decode(text)
    metadata = _PARTS.decode(parts["metadata"]) if "metadata" in parts else {}
    metadata.pop("managedFields", None)
    annotations = _PARTS.decode(metadata["annotations"]) if "annotations" in metadata else {}
    long = [key for key, value in annotations.items() if len(bytes(value)) > _LONGEST_ANNOTATION]
    for key in long:
        del annotations[key]
    if long:
        metadata["annotations"] = msgspec.Raw(msgspec.json.encode(annotations))
    rest = [*metadata.values(), *(part for key, part in parts.items() if key != "metadata")]
    weight = sum(weigh(bytes(part)) for part in rest)
    deep = most < _ANY and any(_CUT in bytes(part) for part in rest)
    if deep or weight > most:
        why = (
            f"it is more than {MOST_DEPTH} levels deep"
            if deep
            else f"it would take {weight / 2**20:.1f} MiB of the operator's memory, "
            f"{most / 2**20:.0f} MiB are the most; make it shorter"
        )
        return _shell(parts, metadata, why)
    try:
        found = {key: parse_json(bytes(part)) for key, part in parts.items() if key != "metadata"}
        if "metadata" in parts:
            found["metadata"] = {key: parse_json(bytes(part)) for key, part in metadata.items()}
    except ValueError as error:
        return _shell(parts, metadata, f"it cannot be read: {error}")
    return found


def _shell(parts: Mapping[str, msgspec.Raw], metadata: Mapping[str, msgspec.Raw], why: str) -> dict[str, Any]:
    """Enough of an object to find it again and to tell its owner."""

    def small(table: Mapping[str, msgspec.Raw], key: str, most: int = _MOST_NAME) -> Any:
        text = bytes(table[key])
        with contextlib.suppress(ValueError):
            return parse_json(text) if _CUT not in text and weigh(text) <= most else None
        return None

    kept = {key: small(metadata, key) for key in _KEPT_OF_SHELL if key in metadata}
    labels = _PARTS.decode(metadata["labels"]) if "labels" in metadata else {}
    kept["labels"] = {key: small(labels, key) for key in (names.LABEL_JOB_UID,) if key in labels}
    found = {key: small(parts, key) for key in ("apiVersion", "kind") if key in parts}
    status = small(parts, "status", _MOST_JOB // 4) if "status" in parts else None
    return {**found, "metadata": kept, "status": status or {}, UNREADABLE: why}
