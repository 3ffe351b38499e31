"""What a sidecar says of itself, as far as it can be true. One process decides for all teams, and a report is the word of one team's pod.

A number that no job has is brought to the nearest that some job could have, so that whatever is said, arithmetic on it stays within what
clocks, calendars and the API hold. Nothing is refused for it: a sidecar whose report were left out would count as silent, and its
worker as lost.
"""

from __future__ import annotations

import re
from dataclasses import is_dataclass, replace
from typing import Any

from tiercheck.protocol.artifact import MOST_BLOCKS, Share
from tiercheck.protocol.report import Holding, Problem, Report
from tiercheck_operator.model import conditions

LEAST, MOST = -(2**31), 2**53
"""Whole numbers. Sums and differences of a few fit into the 64 bits that the API has."""
_SMALL = {"deltas", "exit_code", "rank", "slowest_rank", "snapshot_every", "worker"}
"""Fields for which the API has 32 bits."""
_MOST_SMALL = 2**31 - 1
_LATEST = 253_370_764_800.0
"""The year 9999, the last that RFC 3339 can write; as a duration, no job's either."""
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")


def plausible(report: Report) -> Report:
    """`report` with every number and every reason such that it may be counted with, and be written. The same object if all are."""
    held = report.holdings
    found: Report = _within(replace(report, holdings=()))
    kept = held if all(map(_is_plausible, held)) else tuple(filter(_is_plausible, held))
    return replace(found, holdings=kept)


def _is_plausible(holding: Holding) -> bool:
    """What nobody can hold would be planned with, version by version and block by block."""
    share = holding.share
    return 0 <= holding.version.step <= MOST and (share is None or _is_block(share))


def _is_block(share: Share) -> bool:
    return 0 <= share.index < MOST_BLOCKS and 0 < len(share.ranks) <= MOST_BLOCKS


def _within(value: Any) -> Any:
    kind = type(value)
    if kind is int:
        return min(max(value, LEAST), MOST)
    if kind is float:
        return min(max(value, float(LEAST)), _LATEST)
    if kind is tuple:
        return tuple(map(_within, value))
    if kind is Problem and not _REASON.fullmatch(value.reason):
        return replace(value, reason=conditions.INTERNAL_ERROR)
    if is_dataclass(kind):
        changed = {name: new for name, old in vars(value).items() if (new := _field(name, old)) != old}
        return replace(value, **changed) if changed else value
    return value


def _field(name: str, value: Any) -> Any:
    return min(_within(value), _MOST_SMALL) if name in _SMALL and type(value) is int else _within(value)
