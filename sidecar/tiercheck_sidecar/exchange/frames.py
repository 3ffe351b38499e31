"""What travels on an exchange connection: short JSON messages with a length, and chunks with a small binary header.

Bytes of state go from the page cache to the socket (`sendfile`) and from the socket into the mapped slot (`recv_into`);
Python never holds them. The kernel's own socket timeouts bound every wait, so no call needs a poll around it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.manifest import Digests
from tiercheck.protocol.version import Version

T = TypeVar("T")

IO_TIMEOUT = 20.0
"""Seconds without any progress after which a connection counts as broken."""
LONGEST_STRANGER = 16 * 1024
"""Bytes of a message from someone who has not proved anything yet."""
LONGEST = 64 * 1024 * 1024
END = 0xFFFFFFFF
"""Instead of a chunk's index: no more chunks for now."""

_LENGTH = struct.Struct("<I")
_CHUNK = struct.Struct("<II")


class WireBroken(OSError):
    """The connection failed, timed out, or said something senseless. A new one may work."""


@dataclass(frozen=True)
class Ask:
    """From the side that connected. `op`:

    - "offer": will you keep this artifact? - "join": chunks of `transfer` follow, until END; answered by the damaged ones.
    - "commit": all chunks were sent. - "read": have you this artifact? Then its chunks are asked for by index, until END.
    - "corrupt": the chunks of this artifact do not match their digests.
    """

    op: str
    rank: int = -1
    version: Version | None = None
    world_size: int = 0
    digests: Digests | None = None
    transfer: str = ""


@dataclass(frozen=True)
class Say:
    """The answer. `state`: "send", "have", "busy", "refused", "found", "missing", "ok", "again", "bad"."""

    state: str
    message: str = ""
    transfer: str = ""
    world_size: int = 0
    digests: Digests | None = None
    damaged: tuple[int, ...] = ()


class Wire:
    """One connection. Used by one thread at a time; `close` may come from another."""

    def __init__(self, connection: socket.socket, timeout: float = IO_TIMEOUT) -> None:
        self._socket = connection
        connection.setblocking(True)
        self.patience(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(IO_TIMEOUT * 1000))

    def patience(self, seconds: float) -> None:
        """How long one call may wait for progress."""
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, message: object) -> None:
        """Raises WireBroken."""
        body = to_json(message)
        self._send_all(_LENGTH.pack(len(body)) + body)

    def receive(self, cls: type[T], longest: int = LONGEST) -> T:
        """Raises WireBroken."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > longest:
            raise WireBroken(f"a message of {length} bytes is refused")
        try:
            return msgspec.json.decode(self._take(length), type=cls)
        except msgspec.DecodeError as error:
            raise WireBroken(f"not a {cls.__name__}: {error}") from error

    def send_index(self, index: int) -> None:
        self._send_all(_LENGTH.pack(index))

    def receive_index(self) -> int:
        return int(_LENGTH.unpack(self._take(_LENGTH.size))[0])

    def send_end(self) -> None:
        self._send_all(_CHUNK.pack(END, 0))

    def send_chunk(self, file: int, index: int, offset: int, length: int) -> None:
        """From the open file `file`, without copying. Raises WireBroken."""
        try:
            self._socket.sendall(_CHUNK.pack(index, length), socket.MSG_MORE)
            out = self._socket.fileno()
            while length:
                sent = os.sendfile(out, file, offset, length)
                if sent == 0:
                    raise WireBroken("the slot is shorter than its artifact")
                offset += sent
                length -= sent
        except OSError as error:
            raise _broken(error) from error

    def receive_chunk_header(self) -> tuple[int, int]:
        """(index, length); index END ends the stream."""
        index, length = _CHUNK.unpack(self._take(_CHUNK.size))
        return index, length

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises WireBroken."""
        try:
            while view:
                got = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
                if got == 0:
                    raise WireBroken("the connection was closed")
                view = view[got:]
        except OSError as error:
            raise _broken(error) from error

    def _take(self, length: int) -> bytearray:
        buffer = bytearray(length)
        self.receive_into(memoryview(buffer))
        return buffer

    def _send_all(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise _broken(error) from error


def _broken(error: OSError) -> WireBroken:
    if isinstance(error, WireBroken):
        return error
    if isinstance(error, (BlockingIOError, TimeoutError)):
        return WireBroken("no progress in time")
    return WireBroken(str(error))
