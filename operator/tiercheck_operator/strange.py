"""One object that nobody can make sense of must not take the operator down for all the others: it is left out, and said so once."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_REMEMBERED = 1000
"""Objects that were complained of; of more at once, some are complained of again."""


class Strange:
    """What was left out so far."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, None] = OrderedDict()

    def understood(self, kind: str, raw: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], T | None]) -> T | None:
        """`parse` of an object as the API server holds it; None where it raises, whatever it raises."""
        try:
            return parse(raw)
        except Exception as error:  # what others wrote is no bug of ours, however deep it is nested
            metadata = raw["metadata"]
            uid = str(metadata["uid"])
            if uid not in self._told:
                name = f"{metadata.get('namespace') or ''}/{metadata.get('name')}".lstrip("/")
                log.warning(
                    "%s %s makes no sense, and is left out: %s: %.200s", kind, name, type(error).__name__, error
                )
            self._told[uid] = None
            self._told.move_to_end(uid)
            if len(self._told) > _REMEMBERED:
                self._told.popitem(last=False)
            return None
