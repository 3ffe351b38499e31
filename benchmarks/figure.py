"""One row of the table: a ratio, what it is a ratio of, and the bound that it was promised to keep."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any


class Sense(str, enum.Enum):
    """Which side of the bound is the promised one."""

    AT_MOST = "≤"
    AT_LEAST = "≥"


@dataclass(frozen=True)
class Figure:
    """`ours` and `against` are for people; `ratio` and `bound` decide. No `ratio`: not measured, and `note`
    says why.

    No `bound`: the row is for information, and nothing is promised.
    """

    name: str
    ours: str = ""
    against: str = ""
    ratio: float | None = None
    bound: float | None = None
    sense: Sense = Sense.AT_MOST
    note: str = ""
    unit: str = "x"
    """How the ratio is written: "x", "%" for a share, or a unit of its own, such as " ms"."""

    @property
    def reached(self) -> bool | None:
        """None: not measured, or nothing is promised."""
        if self.ratio is None or self.bound is None:
            return None
        return self.ratio <= self.bound if self.sense is Sense.AT_MOST else self.ratio >= self.bound

    @property
    def ratio_text(self) -> str:
        if self.ratio is None:
            return "" if self.ours else "not measured"
        return _written(self.ratio, self.unit)

    @property
    def bound_text(self) -> str:
        return "" if self.bound is None else f"{self.sense.value} {_written(self.bound, self.unit)}"

    @property
    def verdict(self) -> str:
        """For the last column."""
        if self.ratio is None:
            return "" if self.ours else "not run"
        return {True: "yes", False: "MISSED", None: ""}[self.reached]

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "sense": self.sense.value, "reached": self.reached}

    @staticmethod
    def read(plain: dict[str, Any]) -> Figure:
        """Inverse of `plain`."""
        fields = {key: value for key, value in plain.items() if key != "reached"}
        return Figure(**{**fields, "sense": Sense(plain["sense"])})


@dataclass
class Outcome:
    """What one benchmark found: rows of the table, and the numbers that the plots are drawn from."""

    figures: list[Figure]
    data: dict[str, Any] = field(default_factory=dict)


def _written(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.2f} %"
    return f"{value:.3g}{unit}"
