"""Runs the sidecar's threads: a loop begins again after an error that nobody thought of.

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
"""Reason of the problem that something failed in a way that nobody thought of."""
MOST_DEATHS = 10
"""Of one vital loop in the last `REMEMBERED` seconds, then the process ends. With the pauses in between that
takes three minutes."""
_ADVICE = "Training goes on. The log of this sidecar has the details: please report them"

_FIRST, _LONGEST = 0.05, 1.0
"""Seconds until the next try; what waits to be accepted meanwhile stays in the kernel's queue."""
_UNUSABLE = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
"""Of the listener itself: no next try will be better."""
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Of this process or machine, and so worth telling; all others are troubles of the one who calls."""


class Threads:
    """Thread-safe. `changed` is called when there is a new problem; `end` ends the process."""

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
        """A thread that runs `body` until it returns. `vital`: without it nothing is kept or restored, so the
        process ends if it keeps dying. Raises RuntimeError if the system gives no thread.
        """

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
        """A thread for one connection, which is closed however `body` ends; at once, after `undo`, if the
        system gives no thread."""

        def run() -> None:
            try:
                with contextlib.closing(connection):
                    body()
            except BaseException:  # the other side comes again
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
        """Something of `name` went wrong: a clause. It is told for a while."""
        with self._lock:
            self._troubles[name] = (self._clock(), what)
        self._changed()

    def problems(self) -> tuple[Problem, ...]:
        """What went wrong lately."""
        with self._lock:
            now = self._clock()
            self._troubles = {
                name: each for name, each in self._troubles.items() if now - each[0] < REMEMBERED
            }
            told = [what for _, (_, what) in sorted(self._troubles.items())]
        if not told:
            return ()
        more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
        return (Problem(INTERNAL_ERROR, f"{'; '.join(told[:3])}{more}. {_ADVICE}"),)

    def pause(self, seconds: float) -> bool:
        """Wait; False if the sidecar stops."""
        return not self._stopped.wait(seconds)

    def stop(self) -> None:
        """Nothing that dies from here on begins again."""
        self._stopped.set()


def incoming(
    name: str, listener: socket.socket, threads: Threads, stopped: Callable[[], bool]
) -> Iterator[socket.socket]:
    """Each new connection, until `stopped`. Raises OSError if the listener cannot be used, though nobody
    stopped it."""
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
