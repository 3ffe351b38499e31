"""Kubernetes quantities ("500m", "2Gi") as exact numbers: requests are added up and compared."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"^([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?)$")
_DECIMAL = {"m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("KMGTPE")}
_FACTORS = {**_DECIMAL, **_BINARY}


def parse(text: str | int | float) -> Decimal:
    """The number meant. Raises ValueError."""
    match = _FORM.match(str(text).strip())
    if match is None:
        raise ValueError(f"not a quantity: {text!r}")
    number, exponent, suffix = match.groups()
    return Decimal(number + (exponent or "")) * Decimal(_FACTORS.get(suffix or "", 1))
