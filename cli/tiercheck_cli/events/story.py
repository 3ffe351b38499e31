"""What happened to a job, in order of time: its Events, and the recoveries that its status remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck_cli.durations import short
from tiercheck_cli.events.recoveries import PastRecovery, recoveries
from tiercheck_operator.model.status import parse_time


@dataclass(frozen=True)
class Happening:
    """One line. `at` is unix seconds."""

    at: float
    kind: str
    """Normal, Warning, or Recovery."""
    reason: str
    message: str
    count: int = 1


def story(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> tuple[Happening, ...]:
    """Oldest first. Where an Event of a recovery's end is still there, the recovery is not told twice."""
    told = [_of_event(event) for event in events]
    ends = {
        entry.message.split(" ", 3)[1]
        for entry in told
        if entry.reason == "Recovered" and " " in entry.message
    }
    told += [
        _of_recovery(entry)
        for entry in recoveries(job)
        if entry.ended is not None and str(entry.attempt) not in ends
    ]
    return tuple(sorted(told, key=lambda entry: entry.at))


def _of_event(event: Mapping[str, Any]) -> Happening:
    series = event.get("series") or {}
    times = (
        event.get("lastTimestamp"),
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
    )
    known = [at for at in map(parse_time, times) if at is not None]
    created = parse_time((event.get("metadata") or {}).get("creationTimestamp"))
    return Happening(
        at=known[0] if known else created or 0.0,
        kind=str(event.get("type") or "Normal"),
        reason=str(event.get("reason") or ""),
        message=str(event.get("message") or ""),
        count=int(series.get("count") or event.get("count") or 1),
    )


def _of_recovery(entry: PastRecovery) -> Happening:
    lost = "1 step" if entry.lost_steps == 1 else f"{entry.lost_steps} steps"
    return Happening(
        at=entry.ended or 0.0,
        kind="Recovery",
        reason="Recovered",
        message=f"attempt {entry.attempt} after {entry.cause}: back at step {entry.step} ({entry.sources}), "
        f"{lost} lost, "
        f"{short(entry.total)} in all",
    )
