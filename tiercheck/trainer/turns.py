"""Which parameters a probe clones: few at a time, but in turn, so that none is left out for ever. Nothing random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_GRAIN = 1024
"""Elements: cuts lie at multiples of this."""


@dataclass(frozen=True)
class Candidate:
    """A parameter that may be cloned."""

    number: int
    """Its place in the optimizer's order."""
    size: int
    """Bytes that clones of it, its gradient and its state take."""
    elements: int = 0
    """How many it may be cut into; 0: only the whole is worth something."""


class Part(NamedTuple):
    """What is cloned of a parameter: the whole, or its elements from `begin` to before `end`."""

    number: int
    begin: int = 0
    end: int = 0

    @property
    def is_whole(self) -> bool:
        return self.end == 0


class Place(NamedTuple):
    """Where a turn begins."""

    number: int = 0
    element: int = 0


def choose(candidates: Sequence[Candidate], start: Place, room: int, most: int) -> tuple[list[Part], Place]:
    """At most `most` parts that take at most `room` bytes, from `start` on and around; and where the next turn begins.

    Only what is larger than `room` is cut. What can neither be cut nor fit is passed over. `candidates` are in order.
    """
    first = next((at for at, each in enumerate(candidates) if each.number >= start.number), 0)
    order = [*candidates[first:], *candidates[:first]]
    element = start.element if order and order[0].number == start.number else 0
    parts: list[Part] = []
    left = room
    for each in order:
        if len(parts) == most:
            return parts, Place(each.number)
        if each.size <= room:
            if each.size > left:
                return parts, Place(each.number)
            parts.append(Part(each.number))
            left -= each.size
        elif each.elements:
            begin = element if element < each.elements else 0
            end = min(each.elements, begin + left * each.elements // each.size // _GRAIN * _GRAIN)
            if end > begin:
                parts.append(Part(each.number, begin, end))
                left -= -(-each.size * (end - begin) // each.elements)
            if end < each.elements and (end > begin or left < room):
                return parts, Place(each.number, end)
        element = 0
    return parts, Place(order[0].number if order else 0)
