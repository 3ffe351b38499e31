"""Refuses while training what a checkpoint could not be read back from without running code.

`torch.load(weights_only=True)` reads plain values and collections of them. numpy's numbers and arrays, which
scripts get from a mean or a schedule, are none of those, so they are written as such. Everything else is
refused while training, not at the restore.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from tiercheck.trainer.state.leaves import NotCapturable

_MARK = "tiercheck.numpy"
"""Key of the type of what is written for a value of numpy's; the bytes are under `bytes`."""
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device}
_MAPPINGS = {dict, OrderedDict, Counter}
_SEQUENCES = {list, tuple, set}
_seen: set[type] = set()
"""Types that have come back once, and contain nothing."""


def must_come_back(value: Any, name: str) -> None:
    """Raises NotCapturable, with `name`, for what a checkpoint could hold and never give back."""
    kind = type(value)
    if kind in _PLAIN or kind in _seen or as_plain(value) is not None:
        return
    if kind in _MAPPINGS:
        for key, each in value.items():
            _must_be_key(key, name)
            must_come_back(each, f"{name}/{key}")
        return
    if kind in _SEQUENCES:
        for each in value:
            must_come_back(each, name)
        return
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # whatever pickle meets
        raise NotCapturable(
            f"{name}: a {kind.__module__}.{kind.__qualname__} could not be read back"
        ) from error
    if isinstance(value, torch.Tensor) or not (hasattr(value, "__iter__") or hasattr(value, "__dict__")):
        _seen.add(kind)


def comes_back(value: Any) -> bool:
    """Whether it does."""
    try:
        must_come_back(value, "")
    except NotCapturable:
        return False
    return True


def as_plain(value: Any) -> dict[str, Any] | None:
    """What is written for a number or an array of numpy's; None: it is none, or one of objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (isinstance(value, numpy.generic) or type(value) is numpy.ndarray):
        return None
    if value.dtype.hasobject or value.dtype.names is not None:
        return None
    written = bytearray(value.tobytes())
    content = (
        torch.frombuffer(written, dtype=torch.uint8)
        if written
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    shape = None if isinstance(value, numpy.generic) else list(value.shape)
    return {_MARK: value.dtype.str, "shape": shape, "bytes": content}


def without_numpy(value: Any) -> Any:
    """The same with `as_plain` in place of what is numpy's. What holds none of it is returned itself."""
    if (number := as_plain(value)) is not None:
        return number
    if type(value) in (dict, OrderedDict):
        items = {key: without_numpy(each) for key, each in value.items()}
        same = all(each is value[key] for key, each in items.items())
        return value if same else type(value)(items)
    if type(value) in (list, tuple):
        members = [without_numpy(each) for each in value]
        return (
            value
            if all(new is old for new, old in zip(members, value, strict=True))
            else type(value)(members)
        )
    return value


def with_numpy(value: Any) -> Any:
    """Inverse of `as_plain`, anywhere in `value`, whose dicts and lists are changed in place. Without numpy
    they stay as they are."""
    if isinstance(value, dict):
        if _MARK in value:
            return _decoded(value)
        for key, each in value.items():
            if (new := with_numpy(each)) is not each:
                value[key] = new
    elif type(value) is list:
        value[:] = map(with_numpy, value)
    elif type(value) is tuple:
        members = tuple(map(with_numpy, value))
        return value if all(new is old for new, old in zip(members, value, strict=True)) else members
    return value


def _decoded(value: Mapping[str, Any]) -> Any:
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return value
    flat = numpy.frombuffer(bytes(value["bytes"].tolist()), dtype=value[_MARK])
    return flat[0] if value["shape"] is None else flat.reshape(value["shape"]).copy()


def _must_be_key(key: Any, name: str) -> None:
    if as_plain(key) is not None:
        raise NotCapturable(
            f"{name}: {key!r} is a key of a {type(key).__name__}, which could not be read back; use a "
            "plain number"
        )
    must_come_back(key, name)
