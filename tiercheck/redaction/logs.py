"""A process's own log, without credentials: whatever a library puts into a message or a traceback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

from tiercheck.redaction.text import redacted

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Redacting(logging.Formatter):
    def __init__(self, known: Iterable[str]) -> None:
        super().__init__(_FORMAT)
        self._known = tuple(known)

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record), self._known)


def log_redacted(level: int | str = logging.INFO, known: Iterable[str] = ()) -> None:
    """The root logger writes to stderr from now on. `known`: credentials that this process holds."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Redacting(known))
    logging.basicConfig(level=level, handlers=[handler])
