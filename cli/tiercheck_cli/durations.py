"""Spells spans of time as people say them, in a few characters, and moments."""

from __future__ import annotations

import datetime


def clock(seconds: float) -> str:
    """2026-11-21 13:05:09, in UTC: clusters and their people are in many places."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def short(seconds: float) -> str:
    """An age or a duration: 40ms, 1.8s, 42s, 3m5s, 2h10m, 3d4h."""
    if seconds <= 0:
        return "0s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= (2 * size if unit == "m" else size):
            rest = whole % size // smaller
            return f"{whole // size}{unit}{f'{rest}{name}' if rest and whole < 10 * size else ''}"
    return f"{whole}s"


def age(seconds: float) -> str:
    """As `short`, in whole seconds: what the clocks of two machines say is no more exact than that."""
    return short(seconds) if seconds >= 9.95 else f"{max(0, round(seconds))}s"
