"""Converts between frozen dataclasses and API objects, and parses quantities and durations.

Each field is named once, where it is declared. Its API name is its own name in camelCase, or the path in
`Annotated[..., At("elsewhere.inTheObject")]`. A field that equals its default is not written.
docs/design/029-the-house.md explains why this is not msgspec.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class At:
    """A field's path in the object, with dots; empty: the object from which the class itself is read."""

    path: str


@dataclass(frozen=True)
class As:
    """Converters of a field: `read` from the API, `write` to it; None: by the field's type."""

    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None


ALWAYS = object()
"""Marks a field that is written even if it equals its default."""
INTERNAL = object()
"""Marks an internal field that the API object does not have."""
_PLAIN = frozenset((str, int, float, bool, type(None)))


class _Field(NamedTuple):
    name: str
    path: tuple[str, ...]
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    absent: Any
    """The value if the object lacks the field; MISSING: the field is required."""
    unwritten: Any
    """The value at which the field is not written."""


def from_api(kind: type[T], raw: Mapping[str, Any]) -> T:
    """Reads a dataclass from an API object, with defaults for fields that are absent.

    Null, empty lists and empty objects count as absent. Raises KeyError if a required field is missing, and
    may raise any exception on invalid values.
    """
    values = {}
    for field in _plan(_known(kind)):
        found: Any = raw
        for name in field.path:
            found = (found or {}).get(name)
        if found or isinstance(found, (int, float)) or (found is not None and field.absent is MISSING):
            values[field.name] = field.read(found)
        elif field.absent is MISSING:
            raise KeyError(".".join(field.path))
        else:
            values[field.name] = field.absent
    return kind(**values)


def to_api(value: Any) -> Any:
    """Converts a dataclass, or a tuple or mapping of them, to API form without None and empty objects."""
    if type(value) in _PLAIN:  # most are, and the check for a Mapping is far slower
        return value
    if isinstance(value, tuple):
        return [to_api(inner) for inner in value]
    if isinstance(value, Mapping):
        return {name: to_api(inner) for name, inner in value.items()}
    if not is_dataclass(value):
        return value
    raw: dict[str, Any] = {}
    for field in _plan(_known(type(value))):
        inner = getattr(value, field.name)
        silent = inner == field.unwritten or (inner is None and field.write is to_api)
        written = {} if silent else field.write(inner)
        if written != {}:
            for name in reversed(field.path):
                written = {name: written}
            _add(raw, written)
    return raw


def _add(raw: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and name in raw:
            _add(raw[name], value)
        else:
            raw[name] = value


def _known(kind: Any) -> Any:
    return kind  # mypy does not accept a class as hashable


@cache
def _plan(kind: type) -> tuple[_Field, ...]:
    found, hints = [], get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        _, marks = _unwrapped(hints[field.name])
        if INTERNAL in marks:
            continue
        first, *others = field.name.split("_")
        usual = first + "".join(map(str.title, others))
        path = next((mark.path for mark in marks if isinstance(mark, At)), usual)
        write = next((mark.write for mark in marks if isinstance(mark, As) and mark.write), to_api)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        unwritten = MISSING if ALWAYS in marks else default
        steps = tuple(path.split(".")) if path else ()
        found.append(_Field(field.name, steps, _reader(hints[field.name]), write, default, unwritten))
    return tuple(found)


def _reader(hint: Any) -> Callable[[Any], Any]:
    plain, marks = _unwrapped(hint)
    origin, inside = get_origin(plain), get_args(plain)
    for mark in marks:
        if isinstance(mark, As) and mark.read:
            return mark.read
    if origin in (tuple, frozenset):
        each = _reader(inside[0])
        return lambda raw: origin(each(inner) for inner in raw if inner not in (None, {}))
    if origin is Mapping and inside[1] is not Any:
        value = _reader(inside[1])
        return lambda raw: {str(name): value(inner) for name, inner in raw.items() if inner not in (None, {})}
    if is_dataclass(plain):
        return lambda raw: from_api(_known(plain), raw)
    return plain if origin is None and plain is not Any else lambda raw: raw


def _unwrapped(hint: Any) -> tuple[Any, list[Any]]:
    """Returns the type without annotations and None, and the annotations."""
    marks: list[Any] = []
    while get_origin(hint) in (Annotated, Union, types.UnionType):
        if get_origin(hint) is Annotated:
            marks += hint.__metadata__
            hint = hint.__origin__
        else:
            hint = next(each for each in get_args(hint) if each is not type(None))
    return hint, marks


_FACTOR: dict[str, Decimal | int] = {
    "": 1, "m": Decimal("0.001"), "u": Decimal("0.000001"), "n": Decimal("0.000000001"),
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_PATTERN = re.compile(r"\+?([0-9.]+)(?:[eE]([+-]?[0-9]+))?([a-zA-Z]*)")


_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"([0-9]+)([dhms])")


def parse_duration(text: str) -> float:
    """Returns the seconds of a duration such as 72h, 7d or 1h30m. Raises ValueError if it is none."""
    stripped = str(text).strip()
    if not re.fullmatch(f"({_DURATION.pattern})+", stripped):
        raise ValueError(f"not a duration: {text!r}")
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION.findall(stripped))


def parse_quantity(text: str | int) -> int:
    """Returns the bytes of a quantity such as 64Gi or 1.5G, rounded up. Raises ValueError if it is none."""
    return math.ceil(parse_amount(text))


def parse_amount(text: str | int) -> Decimal:
    """Returns the exact number of a quantity such as 250m or 64Gi. Raises ValueError if it is none."""
    match = _PATTERN.fullmatch(str(text).strip())
    if match is None or match[3] not in _FACTOR:
        raise ValueError(f"not a quantity: {text!r}")
    try:
        return Decimal(match[1]) * Decimal(10) ** int(match[2] or 0) * _FACTOR[match[3]]
    except ArithmeticError as error:
        raise ValueError(f"not a quantity: {text!r}") from error
