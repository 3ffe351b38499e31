"""Runs the sidecar's threads, and restarts a loop after an unexpected error.

A loop that dies again and again ends the process instead: what it holds lies in the memory volume, and the
next process finds it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from tiercheck.protocol.report import Problem
from tiercheck.supervised import REMEMBERED, begin, describe, supervise

log = logging.getLogger(__name__)

INTERNAL_ERROR = "InternalError"
"""Reason of the problem that something failed in an unexpected way."""
MOST_DEATHS = 10
"""The number of failures of a vital loop within `REMEMBERED` seconds that ends the process.
With the pauses in between that takes three minutes."""
_ADVICE = "Training goes on. The log of this sidecar has the details: please report them"

_FIRST, _LONGEST = 0.05, 1.0
"""Seconds until the next try; connections wait in the kernel's queue meanwhile."""
_UNUSABLE = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
"""Errors of the listener itself, which a next try would meet again."""
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of this process or machine, which are reported; all others concern one client only."""


class Threads:
    """Runs and supervises threads. Thread-safe.
    `changed` is called when there is a new problem; `end` ends the process."""

    def __init__(
        self,
        changed: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._changed, self._clock, self._end = changed, clock, end or partial(os._exit, 1)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._troubles: dict[str, tuple[float, str]] = {}

    def loop(self, name: str, body: Callable[[], None], *, vital: bool = False) -> threading.Thread:
        """Runs `body` in a thread until it returns. Raises RuntimeError if the system gives no thread.
        `vital`: without it nothing is kept or restored, so the process ends if it keeps dying."""

        def died(error: BaseException, deaths: int) -> None:
            log.error("the loop %s failed, %d times by now", name, deaths, exc_info=error)
            times = "" if deaths == 1 else f", {deaths} times in {REMEMBERED / 60:.0f} minutes"
            self.trouble(name, f"its loop {name} failed and began again{times}: {describe(error)}")
            if vital and deaths >= MOST_DEATHS:
                log.critical("the loop %s fails again and again: the sidecar ends, to be started anew", name)
                self._end()

        return begin(name, lambda: supervise(body, died, self.pause, self._clock))

    def serve(
        self,
        name: str,
        connection: socket.socket,
        body: Callable[[], None],
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Serves one connection in a thread, and closes it however `body` ends.
        If the system gives no thread, closes it at once, after `undo`."""

        def run() -> None:
            try:
                with contextlib.closing(connection):
                    body()
            except BaseException:  # the other side reconnects
                log.exception("a connection of %s is closed", name)

        try:
            begin(name, run)
        except BaseException as error:
            undo()
            connection.close()
            self.trouble(
                name,
                f"a connection of {name} was closed, because there was no thread for it: {describe(error)}",
            )

    def trouble(self, name: str, what: str) -> None:
        """Reports for a while that something of `name` went wrong: a clause."""
        with self._lock:
            self._troubles[name] = (self._clock(), what)
        self._changed()

    def problems(self) -> tuple[Problem, ...]:
        """Returns what went wrong lately, as one problem."""
        with self._lock:
            now = self._clock()
            self._troubles = {
                name: each for name, each in self._troubles.items() if now - each[0] < REMEMBERED
            }
            found = [what for _, (_, what) in sorted(self._troubles.items())]
        if not found:
            return ()
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        return (Problem(INTERNAL_ERROR, f"{'; '.join(found[:3])}{more}. {_ADVICE}"),)

    def pause(self, seconds: float) -> bool:
        """Waits; returns False if the sidecar stops."""
        return not self._stopped.wait(seconds)

    def stop(self) -> None:
        """Stops the restart of loops that die from then on."""
        self._stopped.set()


def incoming(
    name: str, listener: socket.socket, threads: Threads, stopped: Callable[[], bool]
) -> Iterator[socket.socket]:
    """Yields each new connection, until `stopped`.
    Raises OSError if the listener cannot be used, although it was not stopped."""
    wait = _FIRST
    while not stopped():
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if stopped():
                return
            if error.errno in _UNUSABLE:
                raise
            log.warning("%s: no connection is accepted for now: %s", name, error)
            if error.errno in _SHORTAGES:
                threads.trouble(name, f"{name} accepts no connections: {os.strerror(error.errno or 0)}")
            threads.pause(wait)
            wait = min(_LONGEST, 2 * wait)
            continue
        wait = _FIRST
        yield connection
