"""Times as the API writes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def timestamp(plus_seconds: float = 0) -> str:
    """Now, or a while from now, to the second: metav1.Time."""
    return (datetime.now(UTC) + timedelta(seconds=plus_seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp() -> str:
    """Now, to the microsecond: metav1.MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
