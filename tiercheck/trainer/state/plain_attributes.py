"""Tracks plain attributes of objects: counters, flags, rates, short collections and random generators.

No state_dict shows these. A data-dependent initialization sets a flag at the first step, an annealed dropout
its rate at each. Only what has changed since the script began is stored: the script makes the rest anew,
perhaps on purpose with other values.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, compress, count
from operator import itemgetter, ne
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.state.readable import UNCHANGEABLE, is_readable
from tiercheck.trainer.state.user_state import generator_state, is_metric, set_generator
from tiercheck.trainer.state.values import (
    DICTS,
    has_tensors,
    is_same,
    is_term,
    mark,
    numpy_type,
    own_copy,
    put_back_value,
)

_MOST = 256
"""The most values in a collection that is stored, which is compared at each step."""
_MISSING = object()
_PLAIN = UNCHANGEABLE - {torch.device}
"""Another process may have another device."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_attributes = itemgetter(1)

Owner = tuple[str, dict[str, Any], Collection[str]]
"""The beginning of the names of some attributes, the dict that holds them, and which private ones count."""
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "transformers.", "accelerate.")
"""The modules whose classes keep private attributes of no meaning to a script."""
_Place = tuple[int, str]
"""The number of an owner, and a name in it."""

_first: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""The values that each object had when the first `restore` of this process began."""


class PlainAttributes:
    """Tracks the plain attributes of a model's modules, or of other objects.

    Of private ones, only those that the script's own classes set."""

    def __init__(
        self,
        whole: object,
        owners: Callable[[], Iterable[Owner]],
        is_tracked: Callable[[str, str], bool] = lambda _, name: name != "training",
    ) -> None:
        """`whole`: what all of them belong to. `owners`: lists the dicts that hold them.

        `is_tracked`: of what an owner's names begin with, and a name. `training` of modules is stored by
        `frozen.modes_of`."""
        self._whole, self._list_owners, self._is_tracked = whole, owners, is_tracked
        self._owners: list[Owner] = []
        self._lengths: list[int] = []
        """The number of values of each owner, public or not: a change shows that one came or went."""
        self._places: list[_Place] = []
        self._held: list[tuple[dict[str, Any], str]] = []
        """The owner itself and the name of each place."""
        self._seen: list[int] = []
        """The identity of the value at each place."""
        self._alive: list[Any] = []
        """The plain values among them, so that no other gets the identity of one; no tensor is kept alive."""
        self._began: dict[str, Any] = {}
        self._changed: dict[_Place, Any] = {}
        """The values that are others now, and cannot change in place."""
        self._collections: dict[_Place, None] = {}
        self._generators: dict[_Place, None] = {}
        self._unsaved: dict[_Place, None] = {}
        self._watch = AttributeWatch()

    def begin(self) -> None:
        """Records what the script begins with, before a version is loaded."""
        self.list_places()
        stored = (place for place in self._places if place not in self._unsaved)
        now = {path: own_copy(value) for path, value in self._named(stored)}
        # A process that goes back begins again with a model that has trained.
        self._began = _first.setdefault(self._whole, now)
        self.list_places()
        self.changed_unsaved()

    def state_dict(self) -> dict[str, Any]:
        """Returns the values that are others than at the beginning, and all generators' states, by name."""
        try:
            seen = [id(owner[name]) for owner, name in self._held]
            if list(map(len, map(_attributes, self._owners))) != self._lengths:
                raise KeyError("one was added")
            if seen != self._seen:
                self._note_changes(list(compress(count(), map(ne, seen, self._seen))))
        except KeyError:
            self.list_places()
        written = ((place, self._owners[place[0]][1][place[1]]) for place in self._collections)
        changed = {
            **self._changed,
            **{at: own_copy(each) for at, each in written if self._is_other(at, each) and is_stored(each)},
        }
        owners = {number for number, _ in changed}
        return {
            "values": {self._path(place): value for place, value in changed.items()},
            "generators": {path: generator_state(each) for path, each in self._named(self._generators)},
            "forms": {self._owners[number][0]: self._forms(number) for number in owners},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, in the objects that are here.

        Values may describe what is beside them and in no version, such as a cache and its length. Where that
        is something else here, or not made yet, they stay as the script made them, with a warning.
        """
        owners = {before: owner for before, owner, _ in self._owners}
        generators, unfit = state.get("generators", {}), dict[str, str]()
        for before, forms in state.get("forms", {}).items():
            here = owners.get(before, {})
            if other := [name for name in forms if _form(here.get(name)) != forms[name]]:
                unfit[before] = other[0]
        for path, value in {**state.get("values", {}), **generators}.items():
            before, point, name = path.rpartition(".")
            if (owner := owners.get(before + point)) is None:
                continue
            if path in generators:
                set_generator(owner.get(name), value)
            elif before + point not in unfit:
                owner[name] = put_back_value(owner.get(name), value)
        if unfit:
            before, name = next(iter(unfit.items()))
            log.warning(
                "Attribute: the plain values of %d modules, %r first, stay as the script made them: beside "
                "them is %s, which is in no version: set these values after `restore`, or register that as a "
                "buffer",
                *(len(unfit), before.rstrip("."), name),
            )

    def changed_unsaved(self) -> str:
        """Returns the kind and the name of an attribute that changes and is in no version; empty: none."""
        grown = [each for each in self._named(self._collections) if not is_stored(each[1])]
        return self._watch.find(self._named(self._unsaved) + grown)

    def _named(self, places: Iterable[_Place]) -> list[tuple[str, Any]]:
        found = ((*self._owners[number][:2], name) for number, name in places)
        return [(f"{before}{name}", owner[name]) for before, owner, name in found if name in owner]

    def list_places(self) -> None:
        """Lists the attributes anew: an owner may have been replaced."""
        self._owners = list(self._list_owners())
        self._lengths = [len(owner) for _, owner, _ in self._owners]
        self._places = [
            (number, name)
            for number, (before, owner, private) in enumerate(self._owners)
            for name in owner
            if isinstance(name, str)
            and (name in private or name[:1] != "_")
            and self._is_tracked(before, name)
        ]
        self._held = [(self._owners[number][1], name) for number, name in self._places]
        self._seen, self._alive = [0] * len(self._places), [None] * len(self._places)
        self._changed, self._collections, self._generators, self._unsaved = {}, {}, {}, {}
        for at in range(len(self._places)):
            self._note(at)

    def _note_changes(self, places: list[int]) -> None:
        for at in places:
            self._note(at)
        if any(_is_record(owner[name]) for owner, name in map(self._held.__getitem__, places)):
            self.list_places()  # it is an owner

    def _note(self, at: int) -> None:
        """Notes what is at a place now. Raises KeyError."""
        place, (owner, name) = self._places[at], self._held[at]
        value = owner[name]
        is_constant = _is_constant(value)
        self._seen[at], self._alive[at] = id(value), value if is_constant else None
        for each in (self._collections, self._generators, self._unsaved):
            each.pop(place, None)
        self._changed.pop(place, None)
        if is_constant:
            if self._is_other(place, value):
                self._changed[place] = value
        elif is_stored(value):
            self._collections[place] = None
        elif generator_state(value) is not None:
            self._generators[place] = None
        # What weight norm and pruning compute of a parameter: `weight` of `weight_orig`.
        elif not is_term(value) and not any(
            key.startswith(f"{name}_") for key in owner.get("_parameters", ())
        ):
            self._unsaved[place] = None

    def _forms(self, number: int) -> dict[str, Any]:
        """Returns the forms of what an owner keeps beside its values, and that is in no version."""
        before, owner, _ = self._owners[number]
        beside = [name for name in owner if name not in _OF_EVERY_MODULE and self._is_tracked(before, name)]
        return {
            name: _form(owner[name])
            for name in beside
            if (number, name) in self._unsaved or (has_tensors(owner[name]) and not is_term(owner[name]))
        }

    def _is_other(self, place: _Place, value: Any) -> bool:
        return not is_same(value, self._began.get(self._path(place), _MISSING))

    def _path(self, place: _Place) -> str:
        return f"{self._owners[place[0]][0]}{place[1]}"


class AttributeWatch:
    """Finds attributes that change, where no version has them."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def find(self, attributes: Iterable[tuple[str, Any]]) -> str:
        """Returns the kind and the name of the first that is not what it was when first seen; empty: none."""
        found = ""
        for name, value in attributes:
            now = mark(value)
            if self._seen.setdefault(name, now) != now:
                found = found or f"{_kind(value)} {name}"
        return found


def owners_in(modules: Mapping[str, nn.Module]) -> Iterator[Owner]:
    """Yields the attributes of all modules, and of the objects in these that are nothing but plain values.

    `modules`: by what the names of their attributes begin with."""
    known: set[int] = set()
    for before, whole in modules.items():
        for path, module in whole.named_modules():
            if is_metric(module):
                continue  # `user_state.MetricStates` saves it
            start = f"{before}{path}.".lstrip(".")
            kind: Any = type(module)
            yield start, vars(module), names_set_by(kind, without=_LIBRARIES)
            for name, value in vars(module).items():
                # Such as a configuration, which a script may change in the middle.
                if not name.startswith("_") and id(value) not in known and _is_record(value):
                    known.add(id(value))
                    yield f"{start}{name}.", vars(value), ()


@functools.cache
def names_set_by(kind: type, of: tuple[str, ...] = ("",), without: tuple[str, ...] = ()) -> frozenset[str]:
    """Returns the names of attributes that methods of a class and of its bases set.

    `of`, `without`: the beginnings of the names of the modules with the bases that count, and do not."""
    bases = [base for base in kind.__mro__ if f"{base.__module__}.".startswith(of)]
    methods = (
        getattr(each, "fset", None) if isinstance(each, property) else getattr(each, "__func__", each)
        for base in bases
        if not f"{base.__module__}.".startswith(without)
        for each in vars(base).values()
        if isinstance(each, (FunctionType, property, classmethod))
    )
    return frozenset(
        instruction.argval
        for method in methods
        # What a decorator has around it may be no function of Python's.
        if isinstance(method, FunctionType) and isinstance(inner := inspect.unwrap(method), FunctionType)
        for instruction in dis.get_instructions(inner)
        if instruction.opname == "STORE_ATTR"
    )


def is_stored(value: Any) -> bool:
    """Returns whether it is a plain value, or a short collection of such, and could be read back."""
    return type(value) in _PLAIN or (_count(value) <= _MOST and is_readable(value))


def _is_record(value: Any) -> bool:
    if isinstance(value, (nn.Module, Tensor, type, ModuleType)) or callable(value) or _is_scalar(value):
        return False
    try:
        attributes = vars(value)
    except Exception:  # it has none; or of a `__getattr__` of the script's
        return False
    return type(attributes) is dict and bool(attributes) and all(map(is_stored, attributes.values()))


def _is_constant(value: Any) -> bool:
    """Returns whether it is stored, and cannot change in place."""
    kind = type(value)
    if kind is tuple:
        return len(value) <= _MOST and _PLAIN.issuperset(map(type, value))
    return kind in _PLAIN or (_is_scalar(value) and is_readable(value))


def _is_scalar(value: Any) -> bool:
    """Returns whether it is a member of an Enum or a number of numpy's."""
    return isinstance(value, (enum.Enum, numpy_type("generic")))


def _count(value: Any) -> int:
    """Returns the number of values in a collection; more than `_MOST` for what is none."""
    kind = type(value)
    if kind in _PLAIN or _is_scalar(value):
        return 1
    if kind is numpy_type("ndarray"):
        return _MOST + 1 if value.dtype.hasobject else 1 + value.nbytes // 8
    members: Iterable[Any]
    if kind in (list, set, frozenset, deque) or isinstance(value, tuple):
        members = value
    elif kind in DICTS:
        members = chain(value, value.values())
    else:
        return _MOST + 1
    counted = 1 + len(value)
    for each in members:
        if counted > _MOST:
            break
        counted += type(each) not in _PLAIN and _count(each)
    return counted


def _form(value: Any) -> Any:
    """Returns the shape of a tensor, the length of a collection of such, the class of another object."""
    if isinstance(value, Tensor):
        return list(value.shape)
    return len(value) if has_tensors(value) else type(value).__name__


def _kind(value: Any) -> str:
    return "tensor" if has_tensors(value) else type(value).__name__
