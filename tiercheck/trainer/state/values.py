"""Copies, restores and compares values that a script may write in place: collections, arrays, tensors."""

from __future__ import annotations

import enum
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import chain, islice, repeat
from typing import Any

from torch import Tensor, nn

from tiercheck.trainer.state.readable import UNCHANGEABLE, is_record
from tiercheck.trainer.tensors.tensor_parts import have_same_bits, local_shard, write_count

DICTS = (dict, OrderedDict, Counter, defaultdict)
_COPIED = {set, deque, *DICTS[1:]}
_LARGEST = 65536
"""Bytes. Of a larger array the content is not compared."""
_MEMBERS = 64
"""The members of a collection that are looked at."""


def own_copy(value: Any) -> Any:
    """Returns a copy of what may be written in place: tensor, collection, array; others unchanged."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    kind = type(value)
    if kind in (list, tuple):
        return kind([own_copy(each) for each in value])
    if kind is dict:
        return {key: own_copy(each) for key, each in value.items()}
    return value.copy() if kind in _COPIED or kind is numpy_type("ndarray") else value


def put_back_value(present: Any, value: Any) -> Any:
    """Returns `value`, copied into `present` if possible, as the script may write to that in place."""
    if isinstance(value, Tensor):
        return present.copy_(value) if _fits(present, value) else value
    kind = type(value)
    if kind is not type(present):
        return value
    if kind in (list, tuple):
        members = [put_back_value(*pair) for pair in zip(chain(present, repeat(None)), value, strict=False)]
        if kind is tuple:
            return tuple(members)
        present[:] = members
        return present
    if kind in DICTS:
        members_by_key = {key: put_back_value(present.get(key), each) for key, each in value.items()}
        present.clear()
        present.update(members_by_key)
        return present
    if kind in (set, deque) and getattr(present, "maxlen", None) == getattr(value, "maxlen", None):
        members = list(value)
        present.clear()
        (present.update if kind is set else present.extend)(members)
        return present
    if kind is numpy_type("ndarray") and _fits(present, value) and present.flags.writeable:
        present[...] = value
        return present
    return value


def _fits(present: Any, value: Any) -> bool:
    return isinstance(present, type(value)) and (present.shape, present.dtype) == (value.shape, value.dtype)


def numpy_type(name: str) -> Any:
    """Returns a class of numpy's; an empty tuple, of which nothing is, if the script has not imported it."""
    return getattr(sys.modules.get("numpy"), name, ())


def is_same(value: Any, before: Any) -> bool:
    """Returns whether two values are equal: tensors, of sharded ones the shards, by their bits."""
    kind = type(value)
    if value is before:
        return True
    if kind in UNCHANGEABLE:
        return kind is type(before) and bool(value == before)
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return have_same_bits(local_shard(value), local_shard(before))
    if kind is not type(before):
        return False
    if kind is numpy_type("ndarray"):
        return value.dtype == before.dtype and value.shape == before.shape and bool((value == before).all())
    if kind in DICTS:  # of which the order counts too
        return list(value) == list(before) and all(map(is_same, value.values(), before.values()))
    if kind in (list, tuple, deque):
        return len(value) == len(before) and all(map(is_same, value, before))
    if hasattr(value, "__dict__") and is_record(kind):
        return is_same(vars(value), vars(before))
    return bool(value == before)


def mark(value: Any, deep: int = 2) -> Any:
    """Returns what shows that a value has changed, `deep` levels down; the type alone for what is no data."""
    if isinstance(value, nn.Module):
        value = next(value.parameters(), None)
    if isinstance(value, Tensor):
        return id(value), write_count(value)
    if isinstance(value, (list, tuple, dict, set, deque)):
        members = islice(value.values() if isinstance(value, dict) else value, _MEMBERS if deep else 0)
        return type(value), len(value), *[mark(each, deep - 1) for each in members]
    if type(value) is numpy_type("ndarray") and not value.dtype.hasobject and value.nbytes <= _LARGEST:
        return value.dtype, value.shape, zlib.crc32(value.tobytes())
    # In a tuple NaN is equal to itself.
    return (value,) if type(value) in UNCHANGEABLE or isinstance(value, enum.Enum) else type(value)


def has_tensors(value: Any, deep: int = 2) -> bool:
    """Returns whether it is a tensor, or a collection with one among its first members."""
    if isinstance(value, (list, tuple, dict, set, deque)) and deep:
        members = islice(value.values() if isinstance(value, dict) else value, _MEMBERS)
        return any(has_tensors(each, deep - 1) for each in members)
    return isinstance(value, Tensor)


def is_term(value: Any) -> bool:
    """Returns whether it is one number, or several, that a backward pass began with, as a part of a loss."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(is_term, value))
    return isinstance(value, Tensor) and not value.dim() and value.grad_fn is not None
