"""Carries a proven connection's bytes by UCX, where the image has its library (ucxx).

The two ends meet and prove themselves over TCP, which tells each what address the other has: UCX would not.
Then each tells the other its UCX worker's address, and what follows goes by UCX's streams. The TCP
connection stays, to say when the other end is gone. Frames keep their tags.

UCX chooses devices and transports by its own settings (UCX_TLS, UCX_NET_DEVICES in the image).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from functools import cache
from typing import Any

from tiercheck_sidecar.exchange.channel import TcpChannel
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, wire_error

log = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes that are read from a slot and sent at once."""
_CLOSING = 10**8
"""Nanoseconds that the end of a stream may take."""


@cache
def why_no_ucx() -> str:
    """Why UCX carries nothing here; empty if it can."""
    try:
        import ucxx._lib.arr
        import ucxx._lib.libucxx  # noqa: F401
    except (ImportError, OSError) as error:
        return f"this sidecar's image has no ucxx ({error})"
    return ""


def ask_for_ucx(wire: Wire) -> None:
    """Let UCX carry what follows on a proven connection, unless one of its ends cannot. Raises
    WireBroken."""
    try:
        channel = UcxChannel(wire.channel)
    except OSError as error:
        log.warning("TCP carries copies, not UCX: %s", error)
        return
    wire.send(Ask("ucx", address=channel.address))
    said = wire.receive(Say)
    if said.state != "ok":
        log.warning("TCP carries copies, not UCX: %s", said.message)
        return
    try:
        channel.meet(said.address)
    except OSError as error:  # the other end has moved already
        raise wire_error(error) from error
    wire.move(channel)


def answer_ucx(wire: Wire, address: str) -> None:
    """What the other end does meanwhile. Raises WireBroken."""
    try:
        channel = UcxChannel(wire.channel)
        channel.meet(address)
    except OSError as error:
        wire.send(Say("refused", str(error)))
        return
    wire.send(Say("ok", address=channel.address))
    wire.move(channel)


class UcxChannel(TcpChannel):
    """`address` is for the other end, whose own is for `meet`. Raises OSError if UCX cannot be used."""

    def __init__(self, proven: TcpChannel) -> None:
        """`proven`: what the two ends have met over."""
        if why_no_ucx():
            raise OSError(why_no_ucx())
        import ucxx._lib.libucxx as api
        from ucxx._lib.arr import Array

        self._api, self._array, self._socket = api, Array, proven._socket
        self._cut = threading.Event()
        self._seconds = 0.0
        self._endpoint: Any = None
        self._buffer = memoryview(bytearray(_PIECE))
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
        """Raises OSError."""
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
        got = os.preadv(file, [self._buffer[: min(size, _PIECE)]], offset)
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
        """Raises OSError, TimeoutError."""
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
