"""Reads Kubernetes quantities as whole bytes, and durations as seconds."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_FACTOR: dict[str, Decimal | int] = {
    "": 1, "m": Decimal("0.001"),
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_PATTERN = re.compile(r"([0-9.]+)(?:[eE]([+-]?[0-9]+))?([a-zA-Z]*)")


_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"([0-9]+)([dhms])")


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 72h, 7d or 1h30m. Raises ValueError if it is none."""
    stripped = str(text).strip()
    if not re.fullmatch(f"({_DURATION.pattern})+", stripped):
        raise ValueError(f"not a duration: {text!r}")
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION.findall(stripped))


def parse_quantity(text: str | int) -> int:
    """Bytes of a quantity such as 64Gi, 1.5G or 1024; rounded up. Raises ValueError if it is none."""
    return math.ceil(parse_amount(text))


def parse_amount(text: str | int) -> Decimal:
    """The exact number of a quantity such as 250m, 64Gi or 2. Raises ValueError if it is none."""
    match = _PATTERN.fullmatch(str(text).strip())
    if match is None or match[3] not in _FACTOR:
        raise ValueError(f"not a quantity: {text!r}")
    try:
        return Decimal(match[1]) * Decimal(10) ** int(match[2] or 0) * _FACTOR[match[3]]
    except ArithmeticError as error:
        raise ValueError(f"not a quantity: {text!r}") from error
