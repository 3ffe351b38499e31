"""Serves all integrations: watches what callbacks keep, and replaces a method for its next call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.state.plain_attributes import AttributeWatch

FRAMEWORKS = ("transformers.", "lightning.", "pytorch_lightning.", "accelerate.", "tiercheck.")
"""The modules whose classes are looked after by the integrations themselves."""


class CallbackWatch:
    """Compares what callbacks keep with what they kept when first seen."""

    def __init__(self, remedy: str) -> None:
        """`remedy`: the methods by which a callback of this framework is saved."""
        self._remedy = remedy
        self._watches: dict[str, AttributeWatch] = {}
        self._reported: set[str] = set()

    def look(self, callbacks: Iterable[object]) -> None:
        """Logs once for each of `callbacks`, which are not saved, that an attribute of it changes."""
        for callback in callbacks:
            kind = type(callback)
            if kind.__module__.startswith(FRAMEWORKS) or kind.__name__ in self._reported:
                continue
            watch = self._watches.setdefault(kind.__name__, AttributeWatch())
            if found := watch.find(vars(callback).items()):
                self._reported.add(kind.__name__)
                log.warning(
                    "Callback: %s.%s changes, and is in no version: give the callback %s if training "
                    "depends on it",
                    kind.__name__,
                    found.rpartition(" ")[2],
                    self._remedy,
                )


def replace_next_call(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Lets the next call of a method call `replacement` instead, with the method before the arguments.

    Does nothing if `owner` lacks the method: other releases of a framework may."""
    vars(owner).pop(name, None)  # of an attempt that ended before that call
    if (method := getattr(owner, name, None)) is None:
        return

    def call_once(*arguments: Any) -> Any:
        vars(owner).pop(name, None)
        return replacement(method, *arguments)

    setattr(owner, name, call_once)
