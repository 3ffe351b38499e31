"""What parity groups survive, computed from the groups themselves and not from how they were made.

A group is lost if more of its workers vanish than it has holders, a member among them; nothing is claimed for
a level at which some node's domain is unknown, for it might be in any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.placement.problem import PlacementProblem
from tiercheck_operator.planning.topology import short_name

_COUNT = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}


def fits(ground: PlacementProblem, level: int, group: CodeGroup) -> bool:
    """Whether any one domain of that level may vanish without costing the group more than it can lose."""
    domain = ground.domain[level]
    where = [domain[worker] for worker in group.workers]
    return bool(group.holders) and min(where) >= 0 and max(Counter(where).values()) <= len(group.holders)


def _domains_to_lose(ground: PlacementProblem, level: int, group: CodeGroup) -> int:
    """How many domains of that level may vanish at once, whichever they are."""
    left, found = len(group.holders), 0
    for count in sorted(
        Counter(ground.domain[level][worker] for worker in group.workers).values(), reverse=True
    ):
        left -= count
        if left < 0:
            return found
        found += 1
    return found


def parity_tolerated(
    ground: PlacementProblem, groups: Sequence[CodeGroup]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(levels of which any one domain may vanish, sentences for people), widest first."""
    levels: list[str] = []
    sentences: list[str] = []
    best = 0
    for index, name in enumerate(ground.levels):
        if any(place < 0 for place in ground.domain[index]):
            continue
        count = min((_domains_to_lose(ground, index, group) for group in groups), default=0)
        if count:
            levels.append(name)
            if count > best or count == 1:
                sentences.append(f"any {_COUNT[count]} {name}{'' if count == 1 else 's'}")
            best = max(best, count)
            continue
        fatal = sorted({place for group in groups for place in _fatal(ground, index, group)})
        if len(fatal) <= 2 and len(fatal) < len(ground.domain_name[index]):
            names = " and ".join(short_name(ground.domain_name[index][place]) for place in fatal)
            sentences.append(f"any one {name} except {names}")
    workers = min((len(group.holders) for group in groups), default=0)
    if workers > best:
        sentences.append(f"any {_COUNT[workers]} worker{'' if workers == 1 else 's'}")
    return tuple(levels), tuple(sentences)


def _fatal(ground: PlacementProblem, level: int, group: CodeGroup) -> list[int]:
    counts = Counter(ground.domain[level][worker] for worker in group.workers)
    inside = {ground.domain[level][worker] for worker in group.members}
    return [place for place, count in counts.items() if count > len(group.holders) and place in inside]
