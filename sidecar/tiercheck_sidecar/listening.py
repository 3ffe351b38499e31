"""Accepts connections for as long as the listener lives: a shortage of descriptors passes, and with it the trouble."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator

from tiercheck_sidecar.supervision import Threads

log = logging.getLogger(__name__)

_FIRST, _LONGEST = 0.05, 1.0
"""Seconds until the next try; what waits to be accepted meanwhile stays in the kernel's queue."""
_UNUSABLE = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
"""Of the listener itself: no next try will be better."""
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Of this process or machine, and so worth telling; all others are troubles of the one who calls."""


def incoming(
    name: str, listener: socket.socket, threads: Threads, stopped: Callable[[], bool]
) -> Iterator[socket.socket]:
    """Each new connection, until `stopped`. Raises OSError if the listener cannot be used, though nobody stopped it."""
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
