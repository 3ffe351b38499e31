"""Tracks what modules keep as plain attributes: counters, flags, rates. No state_dict shows these.

A data-dependent initialization sets a flag at the first step, an annealed dropout its rate at each. Only what
has changed since the script began is stored: the script makes the rest anew, perhaps on purpose with other
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

_PLAIN = {bool, int, float, str, type(None)}
_MISSING = object()
_first: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""The values that each model had when the first `restore` of this process began."""


class ModuleAttributes:
    """Tracks the public plain attributes of modules, except for `training`, which `frozen.modes_of` has."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """`modules`: the model as "", and others, by what the names of their tensors begin with."""
        self._modules = modules
        self._owners: list[tuple[str, dict[str, Any]]] = []
        self._sizes: list[int] = []
        self._places: list[tuple[str, dict[str, Any], str]] = []
        self._began: dict[str, Any] = {}
        """The values with which the script began."""
        self._tensors: dict[str, tuple[int, int]] = {}
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
        now = {path: owner[name] for path, owner, name in self._places}
        self._began = _first.setdefault(self._modules[""], now)
        self._tensors = dict(self._marks())

    def facts(self) -> dict[str, Any]:
        """Returns the values to store: those that are others than at the beginning, by module and name."""
        try:
            if list(map(len, (owner for _, owner in self._owners))) != self._sizes:
                self._list()
            values = [owner[name] for _, owner, name in self._places]
        except KeyError:  # one was removed, another one added
            self._list()
            values = [owner[name] for _, owner, name in self._places]
        if values != self._values or not self._facts:
            self._values = values
            named = zip(self._places, values, strict=True)
            changed = {
                path: value
                for (path, _, _), value in named
                if type(value) in _PLAIN and not _is_same(value, self._began.get(path, _MISSING))
            }
            self._facts = {"module_attributes": changed}
        return self._facts

    def put_back(self, facts: Mapping[str, Any]) -> None:
        """Restores what `facts` returned, in the modules that are here."""
        saved = facts.get("module_attributes", {})
        for before, owner in self._owners if saved else ():
            for path, value in saved.items():
                name = path.removeprefix(before)
                if path.startswith(before) and "." not in name:
                    owner[name] = value

    def changed_tensor(self) -> str:
        """Returns the name of a tensor that a module keeps as a plain attribute and that has changed."""
        return next((path for path, mark in self._marks() if self._tensors.get(path, mark) != mark), "")

    def _list(self) -> None:
        self._sizes = [len(owner) for _, owner in self._owners]
        self._places = [
            (f"{before}{name}", owner, name)
            for before, owner in self._owners
            for name, value in owner.items()
            if type(value) in _PLAIN and not name.startswith("_") and name != "training"
        ]

    def _marks(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for before, owner in self._owners:
            for name, value in owner.items():
                if isinstance(value, Tensor) and not name.startswith("_"):
                    yield f"{before}{name}", (id(value), -1 if value.is_inference() else value._version)


def _is_same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and value == before)
