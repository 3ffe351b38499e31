"""Writes what scripts keep so that reading it back runs no foreign code.

`torch.load(weights_only=True)` reads plain values and collections of them. Enums, deques, named tuples,
dataclasses, numpy's values and others are written as records: a dict with kind and members.
Anything else is refused while training, not at the restore.

Reading a record is safe, wherever it is from: values of the standard library and numpy are made by the fixed
table below. A class is only looked up, in what the script has imported already, without `getattr`, which
modules can answer by an import. It has to be an Enum, a named tuple or a dataclass, and its fields are filled
with what was read: no `__init__`, `__new__`, `__reduce__`, `__setstate__` or `__del__` of its own runs.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import io
import operator
import re
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import torch

from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.tensors.tensor_parts import NotCapturable

MARK = "tiercheck.value"
"""The key of the kind of a record; its members, if it has any, are under `of`."""
UNCHANGEABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device}
)
Leaf = Callable[[Any, dict[int, Any]], Any]
Apart = tuple[dict[str, Any], Sequence[Any]]
"""A record, and the members that it still lacks."""
_seen: set[type] = set()
"""The types that have been read back once, and contain nothing."""


def _in_order(new: Any, of: Sequence[Any]) -> Any:
    """Returns `new`, a set of the members `of`, and warns if it has another order than they."""
    if list(new) != list(of):
        _warn_of_order()
    return new


@functools.cache
def _warn_of_order() -> None:
    log.warning(
        "Order: a set in `state` comes back in another order than it had: a script that pops from it, or "
        "iterates over it, goes on differently. Keep a list there, or the keys of a dict"
    )


_CONSTANTS: dict[type, tuple[Callable[[Any], Sequence[Any]], Callable[..., Any]]] = {
    timedelta: (lambda v: (v.days, v.seconds, v.microseconds), timedelta),
    timezone: (lambda v: v.__getinitargs__(), timezone),
    date: (lambda v: (v.year, v.month, v.day), date),
    time: (
        lambda v: (v.fold, v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
        lambda fold, *of: time(*of, fold=fold),
    ),
    datetime: (
        lambda v: (v.fold, *v.timetuple()[:6], v.microsecond, v.tzinfo),
        lambda fold, *of: datetime(*of, fold=fold),
    ),
    range: (lambda v: (v.start, v.stop, v.step), range),
    slice: (lambda v: (v.start, v.stop, v.step), slice),
    frozenset: (tuple, lambda *of: _in_order(frozenset(of), of)),
    bytearray: (lambda v: (bytes(v),), bytearray),
    array: (lambda v: (v.typecode, v.tobytes()), array),
    Decimal: (lambda v: (str(v),), Decimal),
    Fraction: (lambda v: (v.numerator, v.denominator), Fraction),
    UUID: (lambda v: (str(v),), UUID),
    **{kind: (lambda v: (str(v),), kind) for kind in (PurePosixPath, PureWindowsPath, type(Path()))},
    type(...): (lambda v: (), lambda: ...),
}
"""The functions that take each type apart, and that make it from all its members at once."""
_FILLED: dict[type, Callable[[Any, list[Any]], object]] = {
    set: lambda new, of: (new.update(of), _in_order(new, of)),
    deque: lambda new, of: new.extend(of),
    SimpleNamespace: lambda new, of: vars(new).update(_paired(of)),
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict), lambda new, of: new.update(_paired(of))),
}
"""The types that may contain themselves: created empty, and then filled."""
_HASHED = {dict, OrderedDict, Counter, defaultdict, set, frozenset}
"""The types that must not have tensors as keys or members."""
_NAMED = {kind.__name__: kind for kind in (*_CONSTANTS, *_FILLED)}
_GENERATORS = {"getstate", "get_state", "bit_generator", "seed_seq"}
"""The names by which generators of random numbers are known: of Python, torch and numpy."""
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, *_FILLED)}


def to_record(value: Any) -> Apart | None:
    """Takes a value apart into a record; None: it is plain, a container of such, or unknown.

    Raises NotCapturable, without a name, for what would be a record but for its class.
    """
    kind = type(value)
    if kind in _HASHED and not any([*map(_is_odd, value)]) and kind in (dict, OrderedDict):
        return None
    if kind in _CONSTANTS:
        return {MARK: kind.__name__}, _CONSTANTS[kind][0](value)
    if kind in _FILLED:
        record: dict[str, Any] = {MARK: kind.__name__}
        if kind is deque:
            record["maxlen"] = value.maxlen
        if kind is defaultdict and value.default_factory is not None:
            record["factory"] = getattr(value.default_factory, "__name__", "")
            if _FACTORIES.get(record["factory"]) is not value.default_factory:
                raise NotCapturable("the default_factory of a defaultdict could not be read back: use a dict")
        pairs = vars(value) if kind is SimpleNamespace else value
        return record, _flat(pairs) if isinstance(pairs, Mapping) else list(pairs)
    if isinstance(value, enum.Enum):
        flag = isinstance(value, enum.Flag)
        return {MARK: "enum", "class": class_path(kind), "member": value.value if flag else value.name}, ()
    if isinstance(value, tuple) and hasattr(kind, "_fields") and not getattr(value, "__dict__", None):
        return {MARK: "namedtuple", "class": class_path(kind), "fields": list(kind._fields)}, tuple(value)
    if dataclasses.is_dataclass(kind):
        return object_to_record(value)
    return None if (written := _numpy_apart(value)) is None else (written, ())


def object_to_record(value: Any) -> Apart:
    """Takes apart an object that has plain attributes and nothing else. Raises NotCapturable."""
    kind: Any = type(value)
    if not is_record(kind):
        raise NotCapturable(
            f"{kind.__name__} has code of its own for being made, copied or deleted: keep its values"
        )
    record = {MARK: "object", "class": class_path(kind), "fields": _fields(kind)}
    return record, _flat(attributes_of_object(value))


def attributes_of_object(value: object) -> dict[str, Any]:
    """Returns the attributes of an object, those in slots too."""
    kind: Any = type(value)
    held = {name: each.__get__(value) for name, each in _slots(kind).items() if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def is_record(kind: type) -> bool:
    """Returns whether an object of this class is its attributes, and setting them runs no code of it."""
    own = (getattr(kind, name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__"))
    usual = {object.__reduce__, object.__reduce_ex__, getattr(object, "__getstate__", None), None}
    written = [each for each in (*own, getattr(kind, "__setstate__", None)) if each not in usual]
    return (
        getattr(kind, "__new__", None) is object.__new__
        and not hasattr(kind, "__del__")
        and all(each.__module__ == "dataclasses" for each in written)  # those of slots=True
    )


def encoded(value: Any, known: dict[int, Any], leaf: Leaf) -> Any:
    """Returns a copy in new containers, with records in place of what needs one.

    What is contained twice is so in the copy. `known`: copies by identity; `leaf` copies tensors and what is
    unknown.
    """
    kind = type(value)
    if kind in UNCHANGEABLE:
        return value
    if (found := known.get(id(value))) is not None:
        return found
    copy: Any
    # Most members are plain, and calls would take longest.
    if kind is dict and UNCHANGEABLE.issuperset(map(type, value)):
        copy = known[id(value)] = {}
        for key, each in value.items():
            copy[key] = each if type(each) in UNCHANGEABLE else encoded(each, known, leaf)
    elif kind is list:
        copy = known[id(value)] = []
        copy += [each if type(each) in UNCHANGEABLE else encoded(each, known, leaf) for each in value]
    elif kind is tuple:
        copy = known[id(value)] = tuple([encoded(each, known, leaf) for each in value])
    elif kind is torch.Tensor:
        copy = leaf(value, known)
    elif _is_number(value):
        copy = int(value)
    elif (apart := to_record(value)) is not None:
        copy = known[id(value)] = apart[0]
        if apart[1]:
            copy["of"] = [encoded(each, known, leaf) for each in apart[1]]
    elif kind is dict or kind is OrderedDict:
        copy = known[id(value)] = kind()
        for key, each in value.items():
            copy[encoded(key, known, leaf)] = encoded(each, known, leaf)
        if kind is OrderedDict and value.__dict__:
            vars(copy).update(encoded(value.__dict__, known, leaf))
    else:
        copy = leaf(value, known)
    return copy


def decoded(value: Any, *, lenient: bool = False) -> Any:
    """Reverses `encoded`; containers are changed in place.

    Raises NotCapturable for a class that is missing here, or another one now; `lenient`: leaves those records
    as they are.
    """
    known: dict[int, tuple[Any, Any]] = {}  # with the originals: what replaces them must not get their id

    def read(value: Any) -> Any:
        kind = type(value)
        if kind not in (dict, OrderedDict, list, tuple):
            return value
        if id(value) in known:
            return known[id(value)][1]
        new = value
        if kind is tuple:
            read_all = tuple(map(read, value))
            new = value if all(map(operator.is_, read_all, value)) else read_all
        elif kind is list:
            known[id(value)] = value, value
            value[:] = map(read, value)
        elif MARK in value:
            try:
                members = map(read, value.get("of", ()))
                new = rebuilt(value, members, lambda empty: known.update({id(value): (value, empty)}))
            except NotCapturable:
                if not lenient:
                    raise
        else:
            known[id(value)] = value, value
            for each in (value, getattr(value, "__dict__", {})):
                each.update({key: read(member) for key, member in each.items()})
        known[id(value)] = value, new
        return new

    return read(value)


def rebuilt(
    record: Mapping[str, Any],
    of: Iterable[Any],
    begun: Callable[[Any], None] = lambda _: None,
    *,
    any_class: bool = False,
) -> Any:
    """Rebuilds a value from `record` and its members `of`. Raises NotCapturable.

    `begun` gets what may contain itself before the first member is asked for. `any_class`: not only a
    dataclass.
    """
    name = record[MARK]
    if name in ("numpy", "numpy.dtype"):
        return _numpy_rebuilt(record)
    if name == "enum":
        return _member(find_class(record["class"]), record)
    if name == "namedtuple":
        kind = find_class(record["class"])
        if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            raise NotCapturable(f"{record['class']} is no named tuple here")
        _compare_fields(record, list(kind._fields))
        return tuple.__new__(kind, of)
    if name == "object":
        kind = find_class(record["class"])
        if not is_record(kind) or not (any_class or dataclasses.is_dataclass(kind)):
            raise NotCapturable(f"{record['class']} is no dataclass here")
        _compare_fields(record, _fields(kind))
        begun(new := object.__new__(kind))
        slots = _slots(kind)
        for key, each in _paired(list(of)).items():
            if key in slots:
                slots[key].__set__(new, each)
            else:
                new.__dict__[key] = each
        return new
    kind = _NAMED[name]
    if kind in _CONSTANTS:
        return _CONSTANTS[kind][1](*of)
    new = kind(_FACTORIES.get(record.get("factory", ""))) if kind is defaultdict else kind()
    begun(new := deque(maxlen=record["maxlen"]) if kind is deque else new)
    _FILLED[kind](new, list(of))
    return new


def read_plain(content: bytes, name: str, *, lenient: bool = False) -> Any:
    """Reads what `write_plain` wrote.

    Raises NotCapturable, with `name`, if reading could run code, or for records as `decoded` does.
    """
    try:
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return decoded(value, lenient=lenient)
    except Exception as error:  # pickle raises many kinds, all meaning the same here
        # torch's own text is pages long, and advises to read without the check.
        found = re.search(r"GLOBAL (\S+)|global (\S+)", str(error))
        why = f"a {found[1] or found[2]} in it could run code" if found else str(error).partition("\n")[0]
        raise NotCapturable(f"{name} cannot be read back: {why}") from None


def write_plain(value: Any, name: str) -> bytes:
    """Writes a value as bytes. Raises NotCapturable, with `name`, for what cannot be written."""
    buffer = io.BytesIO()
    try:
        torch.save(encoded(value, {}, lambda value, _: value), buffer)
    except Exception as error:  # pickle can raise anything for objects of the script
        raise NotCapturable(f"{name} cannot be written: {error}") from error
    return buffer.getvalue()


def check_readable(value: Any, name: str, within: frozenset[int] = frozenset()) -> None:
    """Raises NotCapturable, with `name`, for what a checkpoint could hold and never give back."""
    kind = type(value)
    if kind in UNCHANGEABLE or kind in _seen or id(value) in within or _is_number(value):
        return
    within |= {id(value)}
    try:
        apart = to_record(value)
    except NotCapturable as error:
        raise NotCapturable(f"{name}: {error}") from None
    if apart is not None:
        for each in apart[1]:
            check_readable(each, name, within)
        return
    if kind in (dict, OrderedDict):
        for key, each in value.items():
            check_readable(key, name, within)
            if type(each) not in UNCHANGEABLE:
                check_readable(each, f"{name}/{in_words(key)}", within)
        return
    if kind in (list, tuple):
        for each in value:
            if type(each) not in UNCHANGEABLE:
                check_readable(each, name, within)
        return
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # pickle can raise anything
        raise NotCapturable(
            f"{name}: a {kind.__module__}.{kind.__qualname__} could not be read back: {_remedy(value)}"
        ) from error
    if isinstance(value, torch.Tensor) or not (hasattr(value, "__iter__") or hasattr(value, "__dict__")):
        _seen.add(kind)


def _remedy(value: Any) -> str:
    """Returns what a script can keep in place of a value that could not be read back."""
    kind = type(value)
    if hasattr(kind, "state_dict") or _GENERATORS.intersection(dir(kind)):
        return "give it to `state` itself, under a name of its own"
    if callable(value):
        return "keep its name there, by which the script finds it"
    if hasattr(kind, "__next__"):
        return "keep its position there, and begin it anew after `restore`"
    return "keep its values there, or give `state` an object with state_dict and load_state_dict"


def is_readable(value: Any) -> bool:
    """Returns whether a value could be read back from a checkpoint."""
    try:
        check_readable(value, "")
    except NotCapturable:
        return False
    return True


def _is_number(value: Any) -> bool:
    """Returns whether a value is an int but for its class, as a step of `Checkpointer.steps` is."""
    if not isinstance(value, int) or type(value).__reduce__ is object.__reduce__:
        return False
    return value.__reduce__() == (int, (int(value),))


def in_words(key: Any) -> str:
    """Returns a key as messages name it. No tensor is printed, and no `__str__` of the script runs."""
    if type(key) in UNCHANGEABLE:
        return str(key)[:80]
    if isinstance(key, torch.Tensor):
        return f"<{type(key).__name__} of shape {tuple(key.shape)}>"
    return f"({', '.join(map(in_words, key))})" if type(key) is tuple else f"<{type(key).__name__}>"


def class_path(kind: type) -> str:
    """Returns the path by which another process finds the class. Raises NotCapturable."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    if _found(path) is not kind:
        raise NotCapturable(f"{kind.__module__} has no class {kind.__qualname__}: define it at its top")
    return path


def find_class(path: str, name: str = "it") -> Any:
    """Returns a class that the script has imported: to read a checkpoint never imports or runs anything.

    Raises NotCapturable, with the `name` of what is of the class.
    """
    found = _found(path)
    if not isinstance(found, type):
        module = path.partition(":")[0]
        remedy = "define it before the script calls" if module == "__main__" else f"import {module} before"
        raise NotCapturable(f"{name} is a {path.replace(':', '.')}, which is not here: {remedy} `restore`")
    return found


def _found(path: str) -> Any:
    module, _, qualified = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _compare_fields(record: Mapping[str, Any], here: list[str]) -> None:
    if record["fields"] != here:
        there, now = (", ".join(each) or "none" for each in (record["fields"], here))
        raise NotCapturable(f"{record['class']} has the fields {there} in the checkpoint, here {now}")


def _member(kind: Any, record: Mapping[str, Any]) -> Any:
    if not issubclass(kind, enum.Enum):
        raise NotCapturable(f"{record['class']} is no Enum here")
    member = record["member"]
    if issubclass(kind, enum.Flag):
        if kind._missing_.__func__ is not enum.Flag._missing_.__func__:  # type: ignore[attr-defined]
            raise NotCapturable(f"{record['class']} has a _missing_ of its own")
        return kind(member)
    if member not in kind._member_map_:
        raise NotCapturable(f"{record['class']} has no member {member} here")
    return kind._member_map_[member]


@functools.cache
def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


@functools.cache
def _slots(kind: type) -> dict[str, Any]:
    found = (vars(base).items() for base in reversed(kind.__mro__))
    return {
        name: each
        for items in found
        for name, each in items
        if inspect.ismemberdescriptor(each) and not name.startswith("__")
    }


def _is_odd(key: Any) -> bool:
    """Returns whether a key needs a record, which cannot be a key. Raises NotCapturable for a tensor."""
    if type(key) in UNCHANGEABLE:
        return False
    if isinstance(key, torch.Tensor):
        raise NotCapturable(f"{in_words(key)} is a key, and is another one after a restore: use its name")
    return any(map(_is_odd, key)) if type(key) is tuple else to_record(key) is not None


def _flat(pairs: Mapping[Any, Any]) -> list[Any]:
    return [each for pair in pairs.items() for each in pair]


def _paired(of: list[Any]) -> dict[Any, Any]:
    return dict(zip(of[::2], of[1::2], strict=True))


def _numpy_apart(value: Any) -> dict[str, Any] | None:
    """Takes apart a number, array or dtype of numpy's; None: it is none, or its dtype is not just a name."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (isinstance(value, (numpy.generic, numpy.dtype)) or type(value) is numpy.ndarray):
        return None
    kind = value if isinstance(value, numpy.dtype) else value.dtype
    if kind.hasobject or kind.names is not None or numpy.dtype(kind.str) != kind:
        return None
    if kind is value:
        return {MARK: "numpy.dtype", "dtype": kind.str}
    array = isinstance(value, numpy.ndarray)
    order = "F" if array and value.flags.fnc else "C"
    written = bytearray(value.tobytes(order))
    content = (
        torch.frombuffer(written, dtype=torch.uint8)
        if written
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    shape = list(value.shape) if array else None
    return {MARK: "numpy", "dtype": kind.str, "shape": shape, "order": order, "bytes": content}


def _numpy_rebuilt(record: Mapping[str, Any]) -> Any:
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        raise NotCapturable("it has values of numpy, which is not installed here") from None
    kind = numpy.dtype(record["dtype"])
    if record[MARK] == "numpy.dtype":
        return kind
    flat = numpy.frombuffer(record["bytes"].numpy(), dtype=kind)
    shape, order = record["shape"], record["order"]
    return flat[0] if shape is None else flat.reshape(shape, order=order).copy(order)
