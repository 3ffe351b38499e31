"""Tells whether the kernel sent a SIGKILL for want of memory, by the container's cgroup."""

from __future__ import annotations

from pathlib import Path

CGROUP = "/sys/fs/cgroup"
"""Where a container sees its own cgroup."""
_KILLS = (("memory.events", "oom_kill"), ("memory/memory.oom_control", "oom_kill"))
"""File and key, of cgroup v2 and v1."""
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_PEAKS = ("memory.peak", "memory/memory.max_usage_in_bytes")
_UNLIMITED = 1 << 60
"""cgroup v1 spells "no limit" as a number of about this size."""


class OutOfMemory:
    """Of the cgroup at `folder`. What cannot be read counts as nothing seen: then the kubelet's word is all
    there is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._kills()

    def begin(self) -> None:
        """A command starts: earlier kills are not its own."""
        self._before = self._kills()

    def verdict(self) -> str:
        """A sentence with numbers if the kernel has killed for want of memory since `begin`; empty if not."""
        number = self._kills() - self._before
        if number <= 0:
            return ""
        limit, peak = self._first(_LIMITS), self._first(_PEAKS)
        told = [f"the limit is {_gib(limit)}"] if limit is not None and limit < _UNLIMITED else []
        told += [f"the most that was used is {_gib(peak)}"] if peak is not None else []
        numbers = f"; {', '.join(told)}" if told else ""
        return f"The kernel's OOM killer ended {number} of its processes{numbers}."

    def _kills(self) -> int:
        for name, key in _KILLS:
            try:
                lines = (self._folder / name).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                words = line.split()
                if len(words) == 2 and words[0] == key and words[1].isdigit():
                    return int(words[1])
        return 0

    def _first(self, names: tuple[str, ...]) -> int | None:
        for name in names:
            try:
                return int((self._folder / name).read_text())
            except (OSError, ValueError):  # not there, or "max"
                continue
        return None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
