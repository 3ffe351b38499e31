"""Connects a rank to its sidecar, with a deadline on everything: silence never hangs training."""

from __future__ import annotations

import select
import socket
import threading
import time
from pathlib import Path
from typing import TypeVar

from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.local import Hello, Reply, Welcome
from tiercheck.protocol.requests import Request

T = TypeVar("T")

_LONGEST_LINE = 1024 * 1024


class LinkBroken(OSError):
    """No answer, a senseless one, or the connection is gone. The link is closed; open a new one."""


class SidecarLink:
    """Answers come in the order of the requests, so after a missed deadline the link is of no use and closes
    itself."""

    def __init__(self, path: Path, hello: Hello, timeout: float) -> None:
        """Connect and say hello; `welcome` holds the answer. Raises LinkBroken."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sending = threading.Lock()
        self._received = b""
        self.closed = False
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(path))
            self._socket.setblocking(False)
        except OSError as error:
            self.close()
            raise LinkBroken(f"{path}: {error.strerror or error}") from error
        self.welcome = self._exchange(to_json(hello), Welcome, timeout)

    def ask(self, request: Request, timeout: float) -> Reply:
        """Send and wait for the answer. Raises LinkBroken."""
        return self._exchange(to_json(request), Reply, timeout)

    def tell(self, request: Request) -> bool:
        """Send without waiting for anything; False if that is not possible right now. Raises LinkBroken."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            line = to_json(request) + b"\n"
            if self._socket.send(line) != len(line):
                raise LinkBroken("a message was cut")  # cannot be: the kernel takes short messages whole
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            raise LinkBroken(str(error)) from error
        finally:
            self._sending.release()

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def _exchange(self, message: bytes, answer: type[T], timeout: float) -> T:
        deadline = time.monotonic() + timeout
        try:
            with self._sending:
                self._send(message + b"\n", deadline)
            return from_json(self._line(deadline), answer)
        except (OSError, Malformed) as error:
            self.close()
            raise LinkBroken(str(error)) from error

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._received:
            self._wait(select.POLLIN, deadline)
            piece = self._socket.recv(65536)
            if not piece:
                raise LinkBroken("the sidecar closed the connection")
            self._received += piece
            if len(self._received) > _LONGEST_LINE:
                raise LinkBroken("the sidecar's answer has no end")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise LinkBroken("the sidecar did not answer in time")
