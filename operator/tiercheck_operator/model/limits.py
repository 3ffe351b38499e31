"""Keeps the status small enough for the API server to store.

Each field has a limit of its own. If all are reached at once, messages are cut first, and fields that
decisions read are cut last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiercheck_operator.model.status import SENTENCES, JobRecord, render_record

LIMIT = 17 * 1024
"""Bytes of the status as JSON; with spec, metadata and managedFields the object stays below 20 KiB."""
_MESSAGES = 5000
"""Characters of the messages of all conditions together."""
_LEAST = 40
"""Characters. Messages are never cut to fewer."""

_RECOVERIES = 3
"""The number of past recoveries that are dropped only after messages were cut."""


def fit_status(record: JobRecord) -> tuple[JobRecord, dict[str, Any]]:
    """Returns the record, shortened if it is too large, and its rendering for the API."""
    record = _with_messages(record, _MESSAGES)
    allowed = _MESSAGES
    while bytes_of(raw := render_record(record)) > LIMIT:
        if len(record.recoveries) > _RECOVERIES or (record.recoveries and allowed <= _LEAST):
            record = replace(record, recoveries=record.recoveries[:-1])
        elif allowed > _LEAST:
            allowed //= 2
            record = _with_sentences(_with_messages(record, allowed), max(_LEAST, allowed // 8))
        elif record.places:  # least harmful of the decisions' fields: a node is tried once more
            record = replace(record, places=record.places[:-1])
        else:
            break
    return record, raw


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def bytes_of(raw: Mapping[str, Any]) -> int:
    return len(_ENCODER.encode(raw).encode())


def longest_cut(lengths: Sequence[int], total: int) -> int:
    """Returns the greatest length to which all must be cut for their sum to be at most `total`."""
    left, many = total, len(lengths)
    for length in sorted(lengths):
        if length * many > left:
            return max(0, left // many)
        left, many = left - length, many - 1
    return max(lengths, default=0)


def _with_messages(record: JobRecord, total: int) -> JobRecord:
    lengths = [len(entry.message) for entry in record.conditions]
    if sum(lengths) <= total:
        return record
    most = max(_LEAST, longest_cut(lengths, total))
    cut = tuple(replace(entry, message=_cut(entry.message, most)) for entry in record.conditions)
    return replace(record, conditions=cut)


def _with_sentences(record: JobRecord, most: int) -> JobRecord:
    recovery = record.recovery
    if recovery is not None:
        recovery = replace(recovery, message=_cut(recovery.message, most), reason=_cut(recovery.reason, most))
    last = None if record.last_recovery is None else cut_sentences(record.last_recovery, most)
    checkpoint = record.checkpoint
    if checkpoint is not None:
        checkpoint = replace(checkpoint, deltas_reason=_cut(checkpoint.deltas_reason, most))
    return replace(
        record,
        checkpoint=checkpoint,
        recovery=recovery,
        last_recovery=last,
        recoveries=tuple(cut_sentences(each, most) for each in record.recoveries),
        places=tuple(replace(place, message=_cut(place.message, most)) for place in record.places),
    )


def cut_sentences(summary: Mapping[str, Any], most: int) -> Mapping[str, Any]:
    """Cuts the texts of an ended recovery's summary to `most` characters each."""
    return {key: _cut(value, most) if isinstance(value, str) and key in SENTENCES else value
            for key, value in summary.items()}  # fmt: skip


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
