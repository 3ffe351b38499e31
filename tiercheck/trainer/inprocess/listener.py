"""Follows the sidecar's orders in a thread of its own, so that a rank learns that its attempt is over.

The launcher follows the same orders, and ends the process if it does not leave its step in time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tiercheck.protocol.directive import Phase
from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.local import LONGEST_LINE, Hello, Order, StepLeft
from tiercheck.protocol.names import SOCKET_NAME
from tiercheck.supervised import begin

_CONNECT_EVERY = 0.2


class OrderListener:
    """Follows orders for one rank. `interrupt` is called in its thread, once for each newer attempt.

    With a `refusal` it only reports why the process cannot stay.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world_size: int,
        attempt: int,
        interrupt: Callable[[], None],
        *,
        refusal: str = "",
    ) -> None:
        self._path, self._rank, self._world_size = run_dir / SOCKET_NAME, rank, world_size
        self.refusal = refusal
        self._attempt, self._interrupt = attempt, interrupt
        self._changed = threading.Condition()
        self._order: Order | None = None
        self._left = 0
        """The attempt for which the step was left; 0: none."""
        self._failed = False
        """True if a step of the attempt itself was left, because a collective failed."""
        self._socket: socket.socket | None = None
        self._closed = False
        begin("tiercheck-listener", self._listen)

    @property
    def is_interrupted(self) -> bool:
        """Returns whether a newer attempt than that of this rank has begun, and its process may stay."""
        order = self._order
        return order is not None and order.attempt > self._attempt

    def wait_interrupted(self, seconds: float) -> bool:
        """Waits for a newer attempt. After `seconds` reports the collective: it may be all that failed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_interrupted, seconds):
                self._failed = True
                self._tell()
            return self._changed.wait_for(lambda: self.is_interrupted)

    def leave_step(self) -> Order:
        """Reports that the step was left for the newest attempt, and returns its order."""
        with self._changed:
            order = self._order
            assert order is not None
            if self._left != order.attempt:
                self._left, self._failed = order.attempt, False
                self._tell()
            return order

    def wait_released(self, released: Callable[[], None]) -> Order:
        """Waits for the newest attempt's release. Calls `released` before that can be interrupted."""
        with self._changed:
            while True:
                order = self.leave_step()
                if order.phase is Phase.RELEASE and self._rank in order.stays:
                    self._attempt, self._failed = order.attempt, False
                    released()
                    return order
                self._changed.wait()

    def close(self) -> None:
        """Stops: the process does not stay any more, and the next failure of another rank ends it."""
        with self._changed:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _tell(self) -> None:
        said = StepLeft(self._attempt, failed=True) if self._failed else StepLeft(self._left)
        if said.attempt and self._socket is not None:
            with contextlib.suppress(OSError):  # sent again with the next connection
                self._socket.sendall(to_json(said) + b"\n")

    def _listen(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError, Malformed), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self._path))
                hello = Hello(
                    "listener", os.getpid(), self._rank, self._world_size, self._attempt, self.refusal
                )
                connection.sendall(to_json(hello) + b"\n")
                with self._changed:
                    self._socket = connection
                    self._tell()
                with connection.makefile("rb") as lines:
                    while line := lines.readline(LONGEST_LINE):
                        self._follow(from_json(line, Order))
            with self._changed:
                self._socket = None
            time.sleep(_CONNECT_EVERY)

    def _follow(self, order: Order) -> None:
        with self._changed:
            known = self._order
            if order.attempt <= self._attempt or self._rank not in order.listens:
                return  # if it is newer, the launcher ends this process
            self._order = order
            is_new = known is None or order.attempt > known.attempt
            self._changed.notify_all()
        if is_new:
            self._interrupt()
