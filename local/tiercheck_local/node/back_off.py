"""How long a kubelet waits before it starts a container again: pure.

At once after the first end, then 10 s, 20 s, 40 s and so on up to five minutes; a life of ten minutes makes
the next end the first again.
"""

from __future__ import annotations

FIRST = 10.0
_MOST, _FORGOTTEN = 30, 60
"""In times of the first wait."""


class BackOff:
    """Of one container. `first` in seconds; all other times follow from it."""

    def __init__(self, first: float = FIRST) -> None:
        self._first, self._next = first, 0.0

    def after(self, life: float) -> float:
        """Seconds to wait after an end, if the container had run for `life` seconds."""
        wait = 0.0 if life > _FORGOTTEN * self._first else self._next
        self._next = min(_MOST * self._first, max(self._first, 2 * wait))
        return wait


def go_duration(seconds: float) -> str:
    """As kubelets write it: 500ms, 40s, 2m40s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{f'{minutes:.0f}m' if minutes else ''}{rest:g}s"
