"""What one reconcile found out, for the status to say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A reason and a message, on their way to a condition."""

    reason: str
    message: str


@dataclass(frozen=True)
class Findings:
    """What this reconcile found out, beyond the record itself."""

    unplaced: Finding | None = None
    """Why pods or copies have no place."""
    placed: Finding | None = None
    """Set when the placement was made in this reconcile."""
    waiting: Finding | None = None
    """What the next attempt waits for."""
    copied: bool = False
    """Every copy that the placement asks for has been made, of some version."""
    suspended: bool = False
    suspending: bool = False
    completed: bool = False
    failed: Finding | None = None
