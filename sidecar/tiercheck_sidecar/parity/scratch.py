"""Buffers that arriving chunks wait in until they are verified: few, and the last one used comes first, because it is in the cache."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tiercheck_sidecar.digest import CHUNK


class Scratch:
    """At most `count` buffers of one chunk, made when first needed. Who finds none waits, and TCP holds back the sender."""

    def __init__(self, count: int = 8) -> None:
        self._room = threading.BoundedSemaphore(count)
        self._free: list[memoryview] = []

    @contextlib.contextmanager
    def buffer(self) -> Iterator[memoryview]:
        with self._room:
            try:
                view = self._free.pop()
            except IndexError:
                view = memoryview(bytearray(CHUNK))
            try:
                yield view
            finally:
                self._free.append(view)
