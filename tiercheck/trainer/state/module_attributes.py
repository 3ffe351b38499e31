"""Tracks plain attributes of modules: counters, flags, rates, short lists and random generators.

No state_dict shows these. A data-dependent initialization sets a flag at the first step, an annealed dropout
its rate at each. Only what has changed since the script began is stored: the script makes the rest anew,
perhaps on purpose with other values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tiercheck.trainer.state.user_state import generator_state, set_generator

_PLAIN = {bool, int, float, str, type(None)}
_LONGEST = 64
"""The most members of a list, tuple or dict that is stored."""
_MISSING = object()
_first: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""The values that each model had when the first `restore` of this process began."""


_Place = tuple[str, dict[str, Any], str]
"""The path of an attribute, and the module's dict and the name that hold it."""


class ModuleAttributes:
    """Tracks the public plain attributes of modules, except for `training`, which `frozen.modes_of` has."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """`modules`: the model as "", and others, by what the names of their tensors begin with."""
        self._modules = modules
        self._owners: list[tuple[str, dict[str, Any]]] = []
        self._sizes: list[int] = []
        self._places: list[_Place] = []
        self._began: dict[str, Any] = {}
        """The values with which the script began."""
        self._tensors: dict[str, tuple[int, int]] = {}
        self._collections: list[_Place] = []
        self._generators: list[_Place] = []
        self._values: list[Any] = []
        self._facts: dict[str, Any] = {}

    def begin(self) -> None:
        """Records what the script begins with, before a version is loaded."""
        self._owners = [
            (f"{before}{path}.".lstrip("."), vars(module))
            for before, whole in self._modules.items()
            for path, module in whole.named_modules()
        ]
        self._list()
        # A process that goes back begins again with a model that has trained.
        stored = (*self._places, *self._collections)
        now = {path: _copy(owner[name]) for path, owner, name in stored}
        self._began = _first.setdefault(self._modules[""], now)
        self._tensors = dict(self._marks())

    def facts(self) -> dict[str, Any]:
        """Returns the values to store, by module and name: those that are others than at the beginning.

        Of random generators the position, always."""
        try:
            if list(map(len, (owner for _, owner in self._owners))) != self._sizes:
                self._list()
            held = [owner[name] for _, owner, name in self._places]
        except KeyError:  # one was removed, another one added
            self._list()
            held = [owner[name] for _, owner, name in self._places]
        # One may be a tensor by now, which cannot be compared so.
        values = [value if type(value) in _PLAIN else id(value) for value in held]
        if values != self._values:
            self._values, self._facts = values, self._changed(self._places)
        # What is written in place looks the same at each look.
        return {
            "module_attributes": {**self._facts, **self._changed(self._collections)},
            "module_generators": {
                path: generator_state(owner[name]) for path, owner, name in self._generators
            },
        }

    def _changed(self, places: Sequence[_Place]) -> dict[str, Any]:
        found = ((path, owner.get(name)) for path, owner, name in places)
        return {
            path: _copy(value)
            for path, value in found
            if _is_stored(value) and not _is_same(value, self._began.get(path, _MISSING))
        }

    def put_back(self, facts: Mapping[str, Any]) -> None:
        """Restores what `facts` returned, in the modules that are here."""
        saved, drawn = facts.get("module_attributes", {}), facts.get("module_generators", {})
        for before, owner in self._owners:
            for path, value in {**saved, **drawn}.items():
                name = path.removeprefix(before)
                if not path.startswith(before) or "." in name:
                    continue
                present = owner.get(name)
                if path in drawn:
                    set_generator(present, value)
                elif type(present) is type(value) is list:
                    present[:] = value  # the script may hold it
                else:
                    owner[name] = value

    def changed_tensor(self) -> str:
        """Returns the name of a tensor that a module keeps as a plain attribute and that has changed."""
        marks = list(self._marks())
        return next((path for path, mark in marks if self._tensors.setdefault(path, mark) != mark), "")

    def _list(self) -> None:
        self._sizes = [len(owner) for _, owner in self._owners]
        public = [
            (f"{before}{name}", owner, name)
            for before, owner in self._owners
            for name in owner
            if not name.startswith("_") and name != "training"
        ]
        stored = [place for place in public if _is_stored(place[1][place[2]])]
        self._collections = [place for place in stored if type(place[1][place[2]]) in (list, dict)]
        self._places = [place for place in stored if type(place[1][place[2]]) not in (list, dict)]
        self._generators = [place for place in public if generator_state(place[1][place[2]]) is not None]

    def _marks(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for before, owner in self._owners:
            for name, value in owner.items():
                first = value[0] if type(value) in (list, tuple) and value else value
                # What weight norm and pruning compute of a parameter: `weight` of `weight_orig`.
                computed = any(key.startswith(f"{name}_") for key in owner["_parameters"])
                if isinstance(first, Tensor) and not computed and not name.startswith("_"):
                    yield f"{before}{name}", (id(first), -1 if first.is_inference() else first._version)


def _is_stored(value: Any) -> bool:
    """Returns whether it is a plain value, or a short collection of such."""
    kind = type(value)
    if kind is dict:
        return len(value) <= _LONGEST and _PLAIN.issuperset(map(type, (*value, *value.values())))
    if kind is list or kind is tuple:
        return len(value) <= _LONGEST and _PLAIN.issuperset(map(type, value))
    return kind in _PLAIN


def _copy(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def _is_same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and value == before)
