"""Time as the API writes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def now(plus_seconds: float = 0) -> str:
    """RFC 3339, UTC, whole seconds."""
    return (datetime.now(UTC) + timedelta(seconds=plus_seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
