"""What a placement survives, computed from the placement itself and not from how it was made.

A domain can vanish without loss if every worker inside it has a copy outside it. Nothing is claimed for a level at
which some node's domain is unknown, for it might be in any.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiercheck_operator.planning.ground import Ground
from tiercheck_operator.planning.topology import short_name


def fatal_domains(ground: Ground, level: int, holders: Sequence[tuple[int, ...]]) -> frozenset[int] | None:
    """The domains of that level whose loss would lose some worker's memory and all its copies. None: not known."""
    domain = ground.domain[level]
    if any(place < 0 for place in domain):
        return None
    return frozenset(
        domain[worker]
        for worker, kept in enumerate(holders)
        if not any(domain[holder] != domain[worker] for holder in kept)
    )


def tolerated(ground: Ground, holders: Sequence[tuple[int, ...]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(levels of which any one domain may vanish, sentences for people), widest first."""
    levels: list[str] = []
    sentences: list[str] = []
    for index, name in enumerate(ground.levels):
        fatal = fatal_domains(ground, index, holders)
        if fatal is None:
            continue
        if not fatal:
            levels.append(name)
            sentences.append(f"any one {name}")
        elif len(fatal) <= 2 and len(fatal) < len(ground.domain_name[index]):
            names = " and ".join(short_name(ground.domain_name[index][place]) for place in sorted(fatal))
            sentences.append(f"any one {name} except {names}")
    if holders and not levels and all(holders):
        sentences.append("any one worker")
    return tuple(levels), tuple(sentences)
