"""A lock that is the only way to what it guards, so that nobody can forget to take it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Guarded(Generic[T]):
    """`with guarded as content`: whoever has the content holds the lock, until the block ends. The same thread may enter again."""

    def __init__(self, content: T) -> None:
        self.__content = content
        self._lock = threading.RLock()

    def __enter__(self) -> T:
        self._lock.acquire()
        return self.__content

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
