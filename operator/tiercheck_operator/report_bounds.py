"""Clamps sidecar reports to plausible values and converts their times to the operator's clock.

One process serves all teams, and a report comes from one team's pod. A number that no job can have is clamped
to the nearest one that a job could have, so that arithmetic on it stays within what clocks, calendars and the
API can represent. Texts and lists are cut to what can be shown or planned with. No report is rejected for
this: a sidecar without a report would count as silent, and its worker as lost.

Nodes' clocks differ from the operator's, so sidecar times are converted before the two are subtracted.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from tiercheck.protocol.report import Holding, Problem, Report
from tiercheck.protocol.version import MOST_BLOCKS
from tiercheck_operator.model import conditions

LEAST, MOST = -(2**31), 2**53
"""Bounds of integers. Sums and differences of a few of them fit into the 64 bits of the API."""
_SMALL = {"deltas", "exit_code", "rank", "slowest_rank", "snapshot_every", "worker"}
"""Fields that have 32 bits in the API."""
_MOST_SMALL = 2**31 - 1
_LATEST = 253_370_764_800.0
"""Unix seconds in the year 9999, the last that RFC 3339 can write; more than any duration, too."""
_ANY = frozenset({bool, type(None)})
"""Types of which no value needs a bound."""
_LONGEST_TEXT = 1000
"""Characters. The status shows no more of a text."""
_MOST_ENTRIES = 4096
"""The number of list entries that are kept: the last ones, which are the newest versions."""
_FEW = {"failures": 8, "problems": 32, "proofs": 8, "sources": 8, "stalled": 8, "unreachable": 16}
"""Maximum lengths of lists that are meant for people."""
_FIELDS: dict[type, tuple[str, ...]] = {}
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")


def clamp_report(report: Report) -> Report:
    """Returns `report` with every number, text and reason within bounds; the same object if all are."""
    held = report.holdings
    if not held:
        return cast(Report, _within(report))
    found: Report = _within(replace(report, holdings=()))
    kept = held if all(map(_is_plausible, held)) else tuple(filter(_is_plausible, held))
    kept = kept[-_MOST_ENTRIES:]
    return replace(found, holdings=kept)


def _is_plausible(holding: Holding) -> bool:
    """Returns whether a holding can exist; planning iterates over its versions and blocks."""
    share = holding.share
    block = share is None or (0 <= share.index < MOST_BLOCKS and 0 < len(share.ranks) <= MOST_BLOCKS)
    return block and 0 <= holding.version.step <= MOST


def _within(value: Any) -> Any:
    kind = type(value)
    if kind in _ANY:
        return value
    if kind is int:
        return min(max(value, LEAST), MOST)
    if kind is float:
        return min(max(value, float(LEAST)), _LATEST)
    if kind is str:
        return value[:_LONGEST_TEXT]
    if kind is tuple:
        return tuple(map(_within, value[-_MOST_ENTRIES:])) if value else value
    if kind is Problem and not _REASON.fullmatch(value.reason):
        return replace(value, reason=conditions.INTERNAL_ERROR)
    changed = {}
    for name in _names(kind):
        old = getattr(value, name)
        of = type(old)
        if of in _ANY or (of is int and LEAST <= old <= _MOST_SMALL):  # most are
            continue
        if name in _FEW and of is tuple:
            old = old[: _FEW[name]]
        new = _within(old)
        if of is int and name in _SMALL:
            new = min(new, _MOST_SMALL)
        if new is not (was := getattr(value, name)) and new != was:
            changed[name] = new
    return replace(value, **changed) if changed else value


def _names(kind: type) -> tuple[str, ...]:
    """Returns the fields of a dataclass; none for any other type."""
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    return _FIELDS[kind]


def without_lists(report: Report, why: str) -> Report:
    """Returns `report` without its lists, and with one problem that states `why`."""
    return replace(
        report,
        restore=replace(report.restore, ranks=()),
        holdings=(),
        remote=replace(report.remote, versions=(), ranks=()),
        quarantined=(),
        problems=(Problem(conditions.BAD_REPORT, why),),
    )


def to_operator_clock(report: Report, ahead: float) -> Report:
    """Returns `report` with its times moved back by the seconds that the sender's clock is `ahead`."""
    if not ahead:
        return report
    trainer = report.trainer

    def moved(moment: float | None) -> float | None:
        return None if moment is None else moment - ahead

    return replace(
        report,
        trainer=replace(
            trainer,
            started_at=moved(trainer.started_at),
            first_step_at=moved(trainer.first_step_at),
            ended_at=moved(trainer.ended_at),
        ),
        unreachable=tuple(replace(each, since=each.since - ahead) for each in report.unreachable),
        proofs=tuple(replace(each, at=each.at - ahead) for each in report.proofs),
    )
