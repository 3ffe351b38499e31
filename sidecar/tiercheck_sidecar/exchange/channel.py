"""Carries the bytes of one proven connection, and keeps it proven.

TCP carries them, or UCX (`ucx`), which keeps them in order too. What the two ends say and prove is the same
over each (`frames`, `handshake`).

Only the two ends can make the tags of frames, of which none can be left out, repeated or moved: AES-256 in
Galois/counter mode (NIST SP 800-38D), with a key for each direction of each connection and the frame's number
as nonce. Authenticated frames are its associated data alone (GMAC) and travel as they are; encrypted ones are
enciphered as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

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


TAG = 16
"""Bytes of a tag."""
_KEY = 32


class Forged(Exception):
    """A frame is not what the other end sent as the next one."""


class Frame:
    """One frame on its way, piece by piece."""

    def __init__(self, context: Any, header: bytes, encrypted: bool) -> None:
        self._context, self._encrypted = context, encrypted
        context.authenticate_additional_data(header)

    def work(self, view: memoryview | bytearray) -> None:
        """The next bytes of it, which are changed in place if the connection is encrypted."""
        if self._encrypted:
            self._context.update_into(view, view)
        else:
            self._context.authenticate_additional_data(view)

    def tag(self) -> bytes:
        """What ends a frame that is sent."""
        self._context.finalize()
        return bytes(self._context.tag)

    def check(self, tag: bytes | bytearray) -> None:
        """Whether a frame that was received is the one that was sent. Raises Forged."""
        try:
            self._context.finalize_with_tag(bytes(tag))
        except InvalidTag as error:
            raise Forged("the bytes are not those that were sent") from error


class Direction:
    """One way of a connection. Frames are numbered, and must be finished one after the other."""

    def __init__(self, key: bytes, encrypted: bool) -> None:
        self._key, self.encrypted = AES(key), encrypted
        self._number = 0

    def sending(self, header: bytes) -> Frame:
        return Frame(self._next().encryptor(), header, self.encrypted)

    def receiving(self, header: bytes) -> Frame:
        return Frame(self._next().decryptor(), header, self.encrypted)

    def _next(self) -> Cipher[GCM]:
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        return Cipher(self._key, GCM(nonce))


def directions(token: str, said: bytes, encrypted: bool) -> tuple[Direction, Direction]:
    """From the caller to the one who is called, and back. `said`: all that the two agreed on, with a fresh
    nonce of each (HKDF, RFC 5869)."""
    salt = hashlib.sha256(said).digest()
    keys = HKDF(SHA256(), 2 * _KEY, salt, b"tiercheck exchange").derive(token.encode())
    return Direction(keys[:_KEY], encrypted), Direction(keys[_KEY:], encrypted)
