"""A process's own log, without credentials: whatever a library puts into a message or a traceback."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable
from types import TracebackType

from tiercheck.redaction.text import redacted

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Redacting(logging.Formatter):
    def __init__(self, known: Iterable[str]) -> None:
        super().__init__(_FORMAT)
        self._known = tuple(known)

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record), self._known)


def log_redacted(level: int | str = logging.INFO, known: Iterable[str] = ()) -> None:
    """The root logger writes to stderr from now on, and so does whatever ends a thread or the process
    unexpectedly.

    `known`: credentials that this process holds.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Redacting(known))
    logging.basicConfig(level=level, handlers=[handler])
    sys.excepthook = _process_ended
    threading.excepthook = _thread_ended


def _process_ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("the process ends unexpectedly", exc_info=(kind, error, trace))


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is None or issubclass(ended.exc_type, SystemExit):
        return
    name = ended.thread.name if ended.thread is not None else "?"
    what = (ended.exc_type, ended.exc_value, ended.exc_traceback)
    logging.getLogger(__name__).critical("thread %s ended unexpectedly", name, exc_info=what)
