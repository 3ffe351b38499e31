"""Quantities mean what they mean to Kubernetes."""

from __future__ import annotations

from decimal import Decimal

import pytest

from tiercheck_local.quantity import parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        (3, "3"),
        ("1.5Gi", "1610612736"),
        ("2k", "2000"),
        ("1e3", "1000"),
        ("4Ei", str(4 * 2**60)),
    ],
)
def test_value(text: str | int, expected: str) -> None:
    assert parse(text) == Decimal(expected)


@pytest.mark.parametrize("text", ["", "Gi", "1 GiB", "1gi", "0x10", "1e", "--1"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse(text)
