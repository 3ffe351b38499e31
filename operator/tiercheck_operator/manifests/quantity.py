"""Kubernetes quantities as whole bytes: limits are added up before they are written into a pod."""

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


def parse_quantity(text: str | int) -> int:
    """Bytes of a quantity such as 64Gi, 1.5G or 1024; rounded up. Raises ValueError if it is none."""
    match = _PATTERN.fullmatch(str(text).strip())
    if match is None or match[3] not in _FACTOR:
        raise ValueError(f"not a quantity: {text!r}")
    try:
        value = Decimal(match[1]) * Decimal(10) ** int(match[2] or 0) * _FACTOR[match[3]]
    except ArithmeticError as error:
        raise ValueError(f"not a quantity: {text!r}") from error
    return math.ceil(value)
