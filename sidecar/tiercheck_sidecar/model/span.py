"""Writes runs of versions, so that a rank says in a few words what it could be rebuilt to.

All versions here belong to one accepted history, in which a step has one attempt only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tiercheck.protocol.version import History, Version


@dataclass(frozen=True)
class Span:
    """Every version of `attempt` from step `first` to step `last`, both included."""

    attempt: int
    first: int
    last: int


def spans(versions: Collection[Version]) -> tuple[Span, ...]:
    """The shortest list of spans, in order of steps, that has exactly these versions."""
    found: list[Span] = []
    for version in sorted(versions):
        before = found[-1] if found else None
        if before is not None and (before.attempt, before.last + 1) == (version.attempt, version.step):
            found[-1] = Span(version.attempt, before.first, version.step)
        else:
            found.append(Span(version.attempt, version.step, version.step))
    return tuple(found)


def intersect(many: Iterable[Sequence[Span]]) -> tuple[Span, ...]:
    """What all have; nothing if there are none. Each must be in order of steps."""
    result: tuple[Span, ...] | None = None
    for runs in many:
        result = tuple(runs) if result is None else _overlap(result, runs)
        if not result:
            break
    return result or ()


def unite(runs: Iterable[Span]) -> tuple[Span, ...]:
    """What any of them has, in order of steps. Takes no longer for long ones: how long they are is their
    sender's word."""
    found: list[Span] = []
    for run in sorted(runs, key=lambda run: (run.first, run.last)):
        before = found[-1] if found else None
        if before is not None and before.attempt == run.attempt and run.first <= before.last + 1:
            found[-1] = Span(run.attempt, before.first, max(before.last, run.last))
        elif run.first <= run.last:
            found.append(run)
    return tuple(found)


def newest(runs: Sequence[Span], history: History) -> Version | None:
    """The accepted version with the highest step. Takes no longer for long runs."""
    for run in reversed(runs):
        steps = history.steps_of(run.attempt)
        last = run.last if steps is None or steps[1] is None else min(run.last, steps[1])
        if steps is not None and last >= max(run.first, steps[0]):
            return Version(last, run.attempt)
    return None


def _overlap(one: Sequence[Span], other: Sequence[Span]) -> tuple[Span, ...]:
    found: list[Span] = []
    i = j = 0
    while i < len(one) and j < len(other):
        a, b = one[i], other[j]
        first, last = max(a.first, b.first), min(a.last, b.last)
        if a.attempt == b.attempt and first <= last:
            found.append(Span(a.attempt, first, last))
        if a.last <= b.last:
            i += 1
        else:
            j += 1
    return tuple(found)
