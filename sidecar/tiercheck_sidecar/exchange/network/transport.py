"""Carries the bytes of one connection: over TCP, or by UCX (`ucx`), which keeps them in order too.

What the two ends say, prove and protect is the same over each (`frames`, `handshake`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

CONGESTION_CONTROL = b"cubic"
"""Bulk copies inside a cluster: BBR, some hosts' default, paces by timers and by an estimate of the path that
is far too low whenever a busy machine lets a sender wait for its turn (measured on loopback: a quarter of the
rate, twice the sender's CPU).
"""
GIVEN_UP = 20.0
"""Seconds after which a connection is broken on which nothing was acknowledged."""


class TcpChannel:
    """A connection over TCP. The kernel's own timeouts bound every wait, so no call needs a poll around it.
    Used by one thread at a time; only `cut` may come from another. All raise OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVEN_UP * 1000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # so that an idle one is missed too
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(GIVEN_UP / 2))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(GIVEN_UP / 4))
        with contextlib.suppress(OSError):  # not every kernel has or allows it; then its default does
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)

    @property
    def near_end(self) -> tuple[str, int]:
        """IP address and port of our end."""
        host, port, *_ = self._socket.getsockname()
        return str(host), int(port)

    @property
    def far_end(self) -> tuple[str, int]:
        host, port, *_ = self._socket.getpeername()
        return str(host), int(port)

    def patience(self, seconds: float) -> None:
        """How long one call may wait for progress; then it raises BlockingIOError or TimeoutError."""
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        """All of it. `more`: what follows may travel with it."""
        self._socket.sendall(data, socket.MSG_MORE if more else 0)

    def send_file(self, file: int, offset: int, size: int) -> int:
        """Bytes of an open file, as many as are returned; 0: it has no more. The kernel sends them; nobody
        looks at them here."""
        return os.sendfile(self._socket.fileno(), file, offset, size)

    def receive_into(self, view: memoryview) -> int:
        """Fill `view` as far as possible; 0: the other end has closed."""
        return self._socket.recv_into(view, 0, socket.MSG_WAITALL)

    def cut(self) -> None:
        """End whatever another thread waits for; never raises. The descriptor stays its own: the number might
        be somebody else's at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Never raises; harmless twice."""
        self.cut()
        self._socket.close()
