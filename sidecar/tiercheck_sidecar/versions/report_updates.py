"""Encodes a worker's report to the coordinator: all of it once, and then only what changed.

Each connection sends a full report first and then only the differences to the last one that the coordinator
has accepted. If either side is unsure, the next report is full again. Holdings that several ranks have in
common are written once, and a text that was decoded before is not decoded again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from msgspec import Raw

from tiercheck.protocol.version import Version
from tiercheck_sidecar.decoding import decode, encode
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.versions.tally import (
    HeldCopies,
    Interned,
    RankHoldings,
    RankOwn,
    WorkerHead,
    WorkerState,
    many_versions,
    validate_holdings,
)

T = TypeVar("T", RankHoldings, HeldCopies)

_SOONEST, _LATEST = 0.05, 0.5
_WORKERS_PER_SECOND = 1000
"""Workers that may report per second, unless one would wait for longer than `_LATEST`."""


def min_report_interval(workers: int) -> float:
    """Returns the minimum of seconds between two messages of one sidecar to the coordinator."""
    return min(_LATEST, max(_SOONEST, workers / _WORKERS_PER_SECOND))


def upload_report_interval(workers: int) -> float:
    """Returns the same if only uploads are new: ranks finish them one by one, and the last one counts."""
    return max(_SOONEST, workers / _WORKERS_PER_SECOND)


def heartbeat(workers: int) -> float:
    """Returns the maximum of seconds between two messages when nothing changes."""
    return max(1.0, workers / _WORKERS_PER_SECOND)


@dataclass(frozen=True)
class HoldingsOf:
    """Ranks that have the same holdings."""

    ranks: tuple[int, ...]
    held: Raw


@dataclass(frozen=True)
class CopiesOf:
    """Ranks (each alone, or several coded together) of which the same copies are kept."""

    of: tuple[tuple[int, ...], ...]
    kept: Raw


@dataclass(frozen=True)
class ReportUpdate:
    """The changes since another report. Ranks that are not named are as they were."""

    number: int
    """The number of this message on its connection, from 1 on."""
    base: int = 0
    """The number of the message that this is the difference to; 0: it is full."""
    head: WorkerHead | None = None
    """The head of the report; None if unchanged."""
    ranks: tuple[HoldingsOf, ...] = ()
    own: tuple[RankOwn, ...] = ()
    copies: tuple[CopiesOf, ...] | None = None
    """All copies; None if unchanged."""


@dataclass(frozen=True)
class TierAnswer:
    """A message from the coordinator to one sidecar, as an answer or unasked."""

    to: int = 0
    """The number of the update that this answers; 0: none."""
    refused: str = ""
    """The reason of a refusal, as a sentence; empty if the update was accepted."""
    whole: bool = False
    """True if the update was not understood, and a full report is required."""
    verdict: TierVerdict | None = None
    """The new verdict, without ranks in `received`; None if unchanged."""
    upload: Version | None = None
    received: tuple[int, ...] = ()
    """The worker's own ranks that have an upload of that version on record."""


class UpdateRejected(Exception):
    """A difference that cannot be applied; a full report is required."""


class _Texts(Generic[T]):
    """Decodes each text once, as long as its value is in use."""

    def __init__(self, kind: type[T]) -> None:
        self._kind: type[T] = kind
        self._known: weakref.WeakValueDictionary[bytes, Interned[T]] = weakref.WeakValueDictionary()

    def intern(self, text: bytes, value: T | None = None) -> Interned[T]:
        """Returns the one value of a text; `value`: what is known to be its value. Raises Malformed."""
        found = self._known.get(text)
        if found is None:
            value = decode(text, self._kind) if value is None else value
            found = Interned(text, value, validate_holdings(value), many_versions(value))
            self._known[text] = found
        return found


class ReportInterner:
    """Builds reports that share equal parts. Used by one thread, or under a lock."""

    def __init__(self) -> None:
        self._held, self._kept = _Texts(RankHoldings), _Texts(HeldCopies)

    def build(
        self,
        head: WorkerHead,
        ranks: Iterable[tuple[RankOwn, RankHoldings]],
        copies: Iterable[tuple[tuple[int, ...], HeldCopies]] = (),
    ) -> WorkerState:
        """Returns a report.
        `copies`: those kept here of other workers' ranks, each of a rank or of several together."""
        own, shapes = {}, {}
        groups: dict[Interned[HeldCopies], list[tuple[int, ...]]] = {}
        for each, held in ranks:
            own[each.rank], shapes[each.rank] = each, self._held.intern(encode(held), held).shape(each)
        for of, kept in copies:
            groups.setdefault(self._kept.intern(encode(kept), kept), []).append(of)
        return WorkerState(head, own, shapes, tuple((tuple(of), shared) for shared, of in groups.items()))

    def updated(self, base: WorkerState | None, update: ReportUpdate) -> WorkerState:
        """Returns the report after an update. Raises UpdateRejected, Malformed."""
        head = update.head or (base.head if base else None)
        if head is None:
            raise UpdateRejected("it does not begin with a whole report")
        own: Mapping[int, RankOwn] = base.own if base else {}
        if update.own:
            own = {**own, **{each.rank: each for each in update.own}}
        shapes = dict(base.shapes) if base else {}
        held = {rank: shapes[rank].held for each in update.own if (rank := each.rank) in shapes}
        for group in update.ranks:
            held |= dict.fromkeys(group.ranks, self._held.intern(bytes(group.held)))
        if own.keys() != shapes.keys() | held.keys():
            raise UpdateRejected("it says only half of some rank")
        shapes |= {rank: each.shape(own[rank]) for rank, each in held.items()}
        copies = base.copies if base else ()
        if update.copies is not None:
            copies = tuple((each.of, self._kept.intern(bytes(each.kept))) for each in update.copies)
        return WorkerState(head, own, shapes, copies)


def is_urgent(report: WorkerState, accepted: WorkerState | None) -> bool:
    """Returns whether more than uploads has changed since the last accepted report."""
    changes = difference(accepted, report, 1, 0)
    return replace(changes, own=()) != ReportUpdate(1) or any(
        accepted is None or replace(accepted.own[each.rank], uploaded=each.uploaded) != each
        for each in changes.own
    )


def difference(base: WorkerState | None, report: WorkerState, number: int, base_number: int) -> ReportUpdate:
    """Returns the update from `base` to `report`; a full report if `base` is None or of other ranks."""
    if base is None or base.own.keys() != report.own.keys():
        base = None
    held: dict[Interned[RankHoldings], list[int]] = {}
    for rank, shape in report.shapes.items():
        if base is None or base.shapes[rank].held is not shape.held:
            held.setdefault(shape.held, []).append(rank)
    own = (each for rank, each in report.own.items() if base is None or base.own[rank] != each)
    copies = None if base is not None and base.copies == report.copies else report.copies
    return ReportUpdate(
        number,
        0 if base is None else base_number,
        None if base is not None and base.head == report.head else report.head,
        tuple(HoldingsOf(tuple(ranks), Raw(shared.text)) for shared, ranks in held.items()),
        tuple(own),
        None if copies is None else tuple(CopiesOf(of, Raw(shared.text)) for of, shared in copies),
    )
