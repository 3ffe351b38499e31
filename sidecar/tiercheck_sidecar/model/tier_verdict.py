"""Defines what the coordinator decides about the job's versions, which every sidecar follows.

It also decides for all ranks how many steps lie between snapshots, and whether deltas join them. Snapshots of
different steps would never be complete anywhere. And where one rank takes no deltas, those of the others lead
to no version of the job, so no rank takes any then.

Spans describe in few bytes which versions a rank could be rebuilt to. All versions here belong to one
accepted history, in which a step has one attempt only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.artifacts.sizing import auto_cadence
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import History, Version


@dataclass(frozen=True)
class Span:
    """Every version of `attempt` from step `first` to step `last`, both included."""

    attempt: int
    first: int
    last: int


def spans(versions: Collection[Version]) -> tuple[Span, ...]:
    """Returns the shortest list of spans, in order of steps, that has exactly these versions."""
    found: list[Span] = []
    for version in sorted(versions):
        before = found[-1] if found else None
        if before is not None and (before.attempt, before.last + 1) == (version.attempt, version.step):
            found[-1] = Span(version.attempt, before.first, version.step)
        else:
            found.append(Span(version.attempt, version.step, version.step))
    return tuple(found)


def intersect(many: Iterable[Sequence[Span]]) -> tuple[Span, ...]:
    """Returns what all have in common; empty if there are none. Each must be in order of steps."""
    result: tuple[Span, ...] | None = None
    for runs in many:
        result = tuple(runs) if result is None else _overlap(result, runs)
        if not result:
            break
    return result or ()


def unite(runs: Iterable[Span]) -> tuple[Span, ...]:
    """Returns the versions of all runs, in order of steps.
    The time does not depend on their lengths, which the sender chooses."""
    found: list[Span] = []
    for run in sorted(runs, key=lambda run: (run.first, run.last)):
        before = found[-1] if found else None
        if before is not None and before.attempt == run.attempt and run.first <= before.last + 1:
            found[-1] = Span(run.attempt, before.first, max(before.last, run.last))
        elif run.first <= run.last:
            found.append(run)
    return tuple(found)


def newest(runs: Sequence[Span], history: History) -> Version | None:
    """Returns the accepted version with the highest step. Takes no longer for long runs."""
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


WITHOUT_DELTAS = 50
"""Steps between snapshots in a job without deltas and without another setting."""


@dataclass(frozen=True)
class Needs:
    """The sizes of one rank's artifacts."""

    snapshot: int
    """Bytes."""
    delta: int
    """Bytes; 0: it takes none."""
    takes_deltas: bool
    """True if the rank takes deltas, and has room and time for them."""


@dataclass(frozen=True)
class Cadence:
    """The job's snapshot interval and sizes. `every` is 0 as long as it is not decided."""

    every: int = 0
    """Steps between snapshots."""
    chain: int = 0
    """Steps that the room for deltas is made for; 0: each worker decides."""
    deltas: bool = True
    """True if ranks that can take deltas shall."""
    snapshot: int = 0
    """Bytes of the largest snapshot of any rank; 0: not known."""
    delta: int = 0
    """Bytes of the largest delta slot of any rank; 0: not known, or none."""


UNDECIDED = Cadence()


def decide(world_size: int, needs: Mapping[int, Needs], wanted: int | None) -> Cadence:
    """Returns the cadence from the sizes of all ranks and the user's setting `wanted`.
    With None, as many steps as deltas cost what a snapshot costs."""
    needs = {rank: each for rank, each in needs.items() if rank < world_size}  # there may have been more
    largest = max((each.snapshot for each in needs.values()), default=0)
    largest_delta = max((each.delta for each in needs.values()), default=0)
    if any(rank not in needs for rank in range(world_size)):
        return Cadence(wanted or 0, wanted or 0, True, 0, 0)
    chain = wanted or auto_cadence(
        sum(each.snapshot for each in needs.values()), sum(each.delta for each in needs.values())
    )
    deltas = all(each.takes_deltas for each in needs.values())
    every = wanted or (chain if deltas else WITHOUT_DELTAS)
    return Cadence(every, chain, deltas, largest, largest_delta)


@dataclass(frozen=True)
class TierVerdict:
    """The decisions of the coordinator, as each sidecar receives them."""

    attempt: int
    watermarks: Watermarks
    floor: Version | None = None
    """The version below which artifacts that lead only to older ones may be freed; None: nothing may."""
    anchor: Version | None = None
    """The newest snapshot that all holders of every rank have; without holders, that every rank has.
    No place frees it for a newer one."""
    backed: Version | None = None
    """A version that some holder can rebuild for every rank.
    None once this attempt has a peer watermark under this placement."""
    abandoned: tuple[Version, ...] = ()
    """Snapshots that may be freed although not older: they cannot become complete, or need not."""
    lost: Version | None = None
    """The local watermark, if it has rotted in some rank's memory and no copy can replace it.
    Nothing needs to be kept for it."""
    copy: Version | None = None
    """The snapshot that every rank should copy to its holders."""
    upload: Version | None = None
    """The snapshot that every rank should upload to the remote tier."""
    received: tuple[int, ...] = ()
    """Ranks that have an upload of that version on record at the coordinator."""
    cadence: Cadence = UNDECIDED
    spare: Version | None = None
    """The version `restore.proveSteps` before the floor, kept where there is room.
    The job may go back there to train these steps again and compare."""
    placement: str = ""
    """The placement under which it was found."""
    stored: tuple[Version, ...] | None = None
    """The newest versions of this history in the remote tier; None: not known yet.
    One sidecar lists it for all."""
    over: bool = False
    """True if the job is over and no more uploads will come: every sidecar may end."""
