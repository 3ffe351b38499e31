"""What happened to a job: recoveries, as its status tells them, and in order of time with its Events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck_cli.terminal import short
from tiercheck_operator.model.conditions import plural
from tiercheck_operator.model.status import parse_time

EXACT_WORDS = {"Proven": "proven", "NotComparable": "unproven", "Differs": "differs"}
"""What the comparison of the steps trained again found, for people."""
TIERS = ("local", "peer", "remote")
"""Nearest first."""


@dataclass(frozen=True)
class PastRecovery:
    """One that has ended. Seconds are durations; `ended` is unix seconds."""

    attempt: int
    cause: str
    message: str
    reason: str
    step: int
    """0: from scratch."""
    lost_steps: int
    tiers: Mapping[str, int]
    """Ranks by where their state came from."""
    deltas: int
    rebuilt: int
    detect: float
    restore: float
    total: float
    ended: float | None
    exact: str = ""
    """Whether the steps trained again gave the same bits, as the status has it; empty: not known."""
    exact_message: str = ""

    @property
    def start(self) -> float:
        """From the state's being there to the first new step."""
        return max(0.0, self.total - self.detect - self.restore)

    @property
    def farthest(self) -> Tier | None:
        """The tier that the worst-off rank needed; None: training began from scratch."""
        return next(
            (tier for tier in (Tier.REMOTE, Tier.PEER, Tier.LOCAL) if self.tiers.get(tier.value)), None
        )

    @property
    def sources(self) -> str:
        """ "6 local, 2 peer"; "from scratch"."""
        named = [f"{self.tiers[tier]} {tier}" for tier in TIERS if self.tiers.get(tier)]
        return ", ".join(named) or "from scratch"


def recoveries(job: Mapping[str, Any]) -> tuple[PastRecovery, ...]:
    """Newest first; as many as the status keeps."""
    status = job.get("status") or {}
    told = [entry for entry in status.get("recoveries") or [] if entry]
    last = status.get("lastRecovery")
    if last and not any(entry.get("attempt") == last.get("attempt") for entry in told):
        told.append(last)
    return tuple(sorted((_read(entry) for entry in told), key=lambda entry: -entry.attempt))


def _read(raw: Mapping[str, Any]) -> PastRecovery:
    return PastRecovery(
        attempt=int(raw.get("attempt") or 0),
        cause=str(raw.get("cause") or "Unknown"),
        message=str(raw.get("message") or ""),
        reason=str(raw.get("reason") or ""),
        step=int(raw.get("step") or 0),
        lost_steps=int(raw.get("lostSteps") or 0),
        tiers={tier: int((raw.get("tiers") or {}).get(tier) or 0) for tier in TIERS},
        deltas=int(raw.get("deltas") or 0),
        rebuilt=int(raw.get("rebuilt") or 0),
        detect=float(raw.get("detectSeconds") or 0.0),
        restore=float(raw.get("restoreSeconds") or 0.0),
        total=float(raw.get("totalSeconds") or 0.0),
        ended=parse_time(raw.get("time")),
        exact=str(raw.get("exact") or ""),
        exact_message=str(raw.get("exactMessage") or ""),
    )


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
    lost = plural(entry.lost_steps, "step")
    return Happening(
        at=entry.ended or 0.0,
        kind="Recovery",
        reason="Recovered",
        message=f"attempt {entry.attempt} after {entry.cause}: back at step {entry.step} ({entry.sources}), "
        f"{lost} lost, {short(entry.total)} in all",
    )
