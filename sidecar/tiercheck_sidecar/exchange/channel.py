"""Carries the bytes of one authenticated connection, and keeps it authenticated.

TCP carries them, or UCX, which keeps them in order too. Messages and proofs are the same over both
(`frames`, `handshake`).

Only the two ends can make the tags of frames, and no frame can be omitted, repeated or reordered: AES-256 in
Galois/counter mode (NIST SP 800-38D), with a key for each direction of each connection and the frame's number
as nonce. Authenticated frames are associated data only (GMAC) and are sent unchanged; encrypted ones are
enciphered as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import struct
import threading
import time
from functools import cache
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

CONGESTION_CONTROL = b"cubic"
"""The TCP congestion control for bulk copies inside a cluster.

BBR, some hosts' default, paces by timers and by an estimate of the path that is far too low whenever a busy
machine delays a sender (measured on loopback: a quarter of the rate, twice the sender's CPU)."""
GIVEN_UP = 20.0
"""Seconds without an acknowledgement after which a connection counts as broken."""


class TcpChannel:
    """A connection over TCP. The kernel's timeouts bound every wait, so no call needs a poll around it.

    One thread at a time uses it; only `cut` may be called from another. All methods raise OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVEN_UP * 1000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a dead peer when idle too
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(GIVEN_UP / 2))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(GIVEN_UP / 4))
        with contextlib.suppress(OSError):  # not every kernel has or allows it; its default works too
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)

    @property
    def near_end(self) -> tuple[str, int]:
        host, port, *_ = self._socket.getsockname()
        return str(host), int(port)

    @property
    def far_end(self) -> tuple[str, int]:
        host, port, *_ = self._socket.getpeername()
        return str(host), int(port)

    def patience(self, seconds: float) -> None:
        """Sets how long one call may wait for progress; then it raises BlockingIOError or TimeoutError."""
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        """Sends all of `data`. `more`: the kernel may send it together with what follows."""
        self._socket.sendall(data, socket.MSG_MORE if more else 0)

    def send_file(self, file: int, offset: int, size: int) -> int:
        """Sends bytes of an open file in the kernel. Returns how many; 0: the file has no more."""
        return os.sendfile(self._socket.fileno(), file, offset, size)

    def receive_into(self, view: memoryview) -> int:
        """Fills `view` as far as possible. Returns the bytes received; 0: the other end has closed."""
        return self._socket.recv_into(view, 0, socket.MSG_WAITALL)

    def wait_readable(self, seconds: float) -> bool:
        """Returns whether bytes or the end arrive within `seconds`; takes none."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def cut(self) -> None:
        """Ends another thread's wait; never raises. Keeps the descriptor: its number could be reused."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. Never raises; harmless twice."""
        self.cut()
        self._socket.close()


_UCX_PIECE = 1 << 20
"""Bytes that are read from a slot and sent at once."""
_CLOSING = 10**8
"""Nanoseconds that the end of a stream may take."""


@cache
def why_no_ucx() -> str:
    """Returns why UCX cannot be used here; empty if it can."""
    try:
        import ucxx._lib.arr
        import ucxx._lib.libucxx  # noqa: F401
    except (ImportError, OSError) as error:
        return f"this sidecar's image has no ucxx ({error})"
    return ""


class UcxChannel(TcpChannel):
    """Carries the bytes over UCX, if the image has its library (ucxx); raises OSError otherwise.

    UCX chooses devices and transports by its own settings (UCX_TLS, UCX_NET_DEVICES in the image). The two
    ends connect and authenticate over TCP, which shows each the other's address, as UCX would not. That
    connection stays, to detect when the other end is gone. `address` is for the `meet` of the other end.
    """

    def __init__(self, proven: TcpChannel) -> None:
        """`proven`: the authenticated TCP connection between the two ends."""
        if why_no_ucx():
            raise OSError(why_no_ucx())
        import ucxx._lib.libucxx as api
        from ucxx._lib.arr import Array

        self._api, self._array, self._socket = api, Array, proven._socket
        self._cut = threading.Event()
        self._seconds = 0.0
        self._endpoint: Any = None
        self._buffer = memoryview(bytearray(_UCX_PIECE))
        try:
            context = api.UCXContext({}, feature_flags=(api.Feature.STREAM, api.Feature.WAKEUP))
            self._worker: Any = api.UCXWorker(
                context, enable_delayed_submission=False, enable_python_future=False
            )
            self._worker.init_blocking_progress_mode()
        except Exception as error:  # whatever its bindings raise
            raise OSError(f"UCX cannot be used: {error}") from error
        self._poll = select.poll()
        self._poll.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self._poll.register(self._socket, select.POLLIN | select.POLLRDHUP)

    @property
    def address(self) -> str:
        return bytes(memoryview(self._worker.address)).hex()

    def meet(self, theirs: str) -> None:
        """Connects to the other end's UCX address. Raises OSError."""
        try:
            address = self._api.UCXAddress.create_from_buffer(bytes.fromhex(theirs))
            self._endpoint = self._api.UCXEndpoint.create_from_worker_address(
                self._worker, address, endpoint_error_handling=True
            )
        except Exception as error:  # whatever its bindings raise
            raise OSError(f"UCX does not reach the other end: {error}") from error

    def patience(self, seconds: float) -> None:
        self._seconds = seconds

    def send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        if len(data):
            self._wait(self._endpoint.stream_send(self._array(data)))

    def send_file(self, file: int, offset: int, size: int) -> int:
        got = os.preadv(file, [self._buffer[: min(size, _UCX_PIECE)]], offset)
        self.send(self._buffer[:got])
        return got

    def receive_into(self, view: memoryview) -> int:
        if len(view):
            self._wait(self._endpoint.stream_recv(self._array(view)))
        return len(view)

    def cut(self) -> None:
        self._cut.set()
        super().cut()

    def close(self) -> None:
        self._cut.set()
        if self._endpoint is not None:
            self._worker.cancel_inflight_requests(_CLOSING, 1)
            self._endpoint.close_blocking(_CLOSING, 1)
            self._endpoint = None
        super().close()

    def _wait(self, request: Any) -> None:
        """Waits until `request` is complete. Raises OSError, TimeoutError."""
        end = time.monotonic() + self._seconds
        while not request.completed:
            if self._cut.is_set():
                raise ConnectionAbortedError("the connection was cut")
            if self._worker.progress_once() or not self._worker.arm():
                continue
            ready = self._poll.poll(max(0.0, end - time.monotonic()) * 1000)
            if not ready:
                raise TimeoutError("no progress in time")
            if all(descriptor != self._worker.epoll_file_descriptor for descriptor, _ in ready):
                raise ConnectionResetError("the connection was closed")
        try:
            request.check_error()
        except Exception as error:  # whatever its bindings raise
            raise ConnectionResetError(f"UCX: {error}") from error


TAG = 16
"""Bytes of a tag."""
_KEY = 32


class Forged(Exception):
    """A received frame is not the one that the other end sent next."""


class Frame:
    """Authenticates a frame, and encrypts or decrypts it if required, piece by piece."""

    def __init__(self, context: Any, header: bytes, encrypted: bool) -> None:
        self._context, self._encrypted = context, encrypted
        context.authenticate_additional_data(header)

    def work(self, view: memoryview | bytearray) -> None:
        """Processes the next bytes of the frame, in place if the connection is encrypted."""
        if self._encrypted:
            self._context.update_into(view, view)
        else:
            self._context.authenticate_additional_data(view)

    def tag(self) -> bytes:
        """Returns the tag that ends a frame that is sent."""
        self._context.finalize()
        return bytes(self._context.tag)

    def check(self, tag: bytes | bytearray) -> None:
        """Checks that a received frame is the one that was sent. Raises Forged."""
        try:
            self._context.finalize_with_tag(bytes(tag))
        except InvalidTag as error:
            raise Forged("the bytes are not those that were sent") from error


class Direction:
    """One direction of a connection. Frames are numbered, and must be finished one after the other."""

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
    """Returns the directions from client to server, and back. Keys are derived by HKDF (RFC 5869).

    Their input is all that the two agreed on, with a fresh nonce of each."""
    salt = hashlib.sha256(said).digest()
    keys = HKDF(SHA256(), 2 * _KEY, salt, b"tiercheck exchange").derive(token.encode())
    return Direction(keys[:_KEY], encrypted), Direction(keys[_KEY:], encrypted)
