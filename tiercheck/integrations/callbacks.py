"""Warns of callbacks that keep something that changes, and that no version has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tiercheck.trainer.backends.backend import log

_FRAMEWORKS = ("transformers.", "lightning.", "pytorch_lightning.", "accelerate.", "tiercheck.")


class CallbackWatch:
    """Compares what callbacks keep with what they kept when first seen."""

    def __init__(self, remedy: str) -> None:
        """`remedy`: the methods by which a callback of this framework is saved."""
        self._remedy = remedy
        self._seen: dict[tuple[str, str], Any] = {}
        self._reported: set[str] = set()

    def look(self, callbacks: Iterable[object]) -> None:
        """Logs once for each of `callbacks`, which are not saved, that an attribute of it changes."""
        for callback in callbacks:
            kind = type(callback)
            if kind.__module__.startswith(_FRAMEWORKS) or kind.__name__ in self._reported:
                continue
            for name, value in vars(callback).items():
                mark = _mark(value)
                if self._seen.setdefault((kind.__name__, name), mark) != mark:
                    self._reported.add(kind.__name__)
                    log.warning(
                        "Callback: %s.%s changes, and is in no version: give the callback %s if training "
                        "depends on it",
                        kind.__name__,
                        name,
                        self._remedy,
                    )
                    break


def _mark(value: Any) -> Any:
    """Returns what shows that a value has changed; the type alone for what is no data."""
    if isinstance(value, nn.Module):
        value = next(value.parameters(), None)
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, (list, dict, set)):
        first = next(iter(value.values() if isinstance(value, dict) else value), None)
        return type(value), len(value), _mark(first) if isinstance(first, Tensor) else None
    return value if type(value) in (bool, int, float, str) else type(value)
