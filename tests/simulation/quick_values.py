"""Makes frozen dataclasses quick to make, in a process that does nothing but play schedules.

A decision or a report is some hundred of them. Frozen ones set each field by a call, and `replace` asks each
field for what it is: together a sixth of a schedule. Here they are as quick as those that are not frozen.
Nothing else differs; the histories are the same to the last digest, which a test compares. Tests of the
product keep what freezes them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field
from typing import Any

_FACTORY: Any = object()
"""In the place of a value that a factory makes."""
_PREFIXES = ("tiercheck", "tests.")
_real = dataclasses.replace
_names: dict[type, tuple[str, ...]] = {}
"""Fields of each class that can be copied without a call of its constructor."""


def make_values_quick() -> None:
    """For the rest of this process, of every class that is imported by now."""
    for kind in list(_frozen_classes()):
        fields = tuple(dataclasses.fields(kind))
        if any(not field.init for field in fields) or "__slots__" in vars(kind):
            continue
        if not hasattr(kind, "__post_init__"):
            _names[kind] = tuple(field.name for field in fields)
        if getattr(getattr(kind.__init__, "__code__", None), "co_filename", "") == "<string>":
            kind.__init__ = _make_init(kind, fields)
            kind.__setattr__, kind.__delattr__ = object.__setattr__, object.__delattr__
    for module in _modules():
        if vars(module).get("replace") is _real:
            module.replace = _replace
    dataclasses.replace = _replace


def _modules() -> Iterator[Any]:
    return (module for name, module in list(sys.modules.items()) if name.startswith(_PREFIXES))


def _frozen_classes() -> Iterator[Any]:
    for module in _modules():
        for kind in list(vars(module).values()):
            known = vars(kind).get("__dataclass_params__") if isinstance(kind, type) else None
            if known is not None and known.frozen and kind.__module__ == module.__name__:
                yield kind


def _make_init(kind: Any, fields: tuple[Field[Any], ...]) -> Any:
    """The constructor that the class would have if it were not frozen."""
    places: dict[str, Any] = {"_FACTORY": _FACTORY}
    parameters = ["self"]
    lines = []
    for field in sorted(fields, key=lambda each: each.kw_only):
        name = field.name
        if field.kw_only and "*" not in parameters:
            parameters.append("*")
        if field.default_factory is not MISSING:
            places[f"make_{name}"] = field.default_factory
            parameters.append(f"{name}=_FACTORY")
            lines.append(f"self.{name} = make_{name}() if {name} is _FACTORY else {name}")
            continue
        if field.default is not MISSING:
            places[f"default_{name}"] = field.default
        parameters.append(name if field.default is MISSING else f"{name}=default_{name}")
        lines.append(f"self.{name} = {name}")
    if hasattr(kind, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n    " + "\n    ".join(lines or ["pass"]), places)
    return places["__init__"]


def _replace(value: Any, /, **changes: Any) -> Any:
    """As `dataclasses.replace`. What the value has cached beside its fields is not copied."""
    kind = value.__class__
    names = _names.get(kind)
    if names is None:
        return _real(value, **changes)
    made, known = kind.__new__(kind), value.__dict__
    there = made.__dict__
    if len(known) == len(names):
        there.update(known)
    else:
        for name in names:
            there[name] = known[name]
    there.update(changes)
    return made
