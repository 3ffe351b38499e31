"""Bytes and seconds as people write them."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def bytes_text(count: float) -> str:
    """In binary units."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if count >= 0.99 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """In s, ms or µs."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"


def rate_text(bytes_per_second: float) -> str:
    """In GB/s (10^9), as links and memory are sold."""
    return f"{bytes_per_second / 1e9:.2f} GB/s"
