"""The recoveries of a job as its status tells them, newest first, for every view that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck.protocol.directive import Tier
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
