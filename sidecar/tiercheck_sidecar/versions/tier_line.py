"""Connects a sidecar to the coordinator: one lasting connection, both ways, over TLS.

It begins as a request of the control API that asks for another protocol, so port, certificate and token are
the same. From then on each message is its length in four bytes, and JSON. That costs the coordinator a
fraction of a request, and it can send the same bytes to all sidecars.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from tiercheck.protocol import names
from tiercheck.protocol.names import endpoint
from tiercheck.protocol.report import ConnectionFailure
from tiercheck.supervised import begin
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.exchange.frames import PeerSilent, wire_error
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.versions.report_updates import TierAnswer

PATH, PROTOCOL = "/v1/tiers", "tiercheck-tiers"
_LENGTH = 4
_MOST = 4 * 1024 * 1024
"""Bytes of the longest message."""
_MOST_AT_ONCE = 1024 * 1024
"""Bytes that are read before the messages in them are handled."""
_LONGEST_HEAD = 4096
_PATIENCE = 3.0
"""Seconds for an answer."""
_MOST_LATE = 5
"""The number of times `_PATIENCE` may pass without an answer, before a new connection is made."""
_CONNECT_PATIENCE = 10.0
"""Seconds for a connection: all sidecars connect to a new coordinator at once."""


class CallFailed(Exception):
    """A call with no answer or a refusal; the message is a sentence."""

    def __init__(self, message: str, how: ConnectionFailure | None = None) -> None:
        """Keeps in `how` why there was no answer; None: there was one."""
        super().__init__(message)
        self.how = how


class AnswerLate(CallFailed):
    """An answer that has not come in time, on a connection that works.
    A repeated full report would cost a busy coordinator more than waiting."""


class Messages:
    """Splits what is received, in pieces of any size, into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the messages that are complete with this piece. Raises Malformed."""
        rest, found, at = self._rest, [], 0
        rest += piece
        while len(rest) - at >= _LENGTH:
            length = int.from_bytes(rest[at : at + _LENGTH], "big")
            if length > _MOST:
                raise Malformed(f"a message of {length} bytes")
            if len(rest) - at < _LENGTH + length:
                break
            found.append(bytes(rest[at + _LENGTH : at + _LENGTH + length]))
            at += _LENGTH + length
        del rest[:at]
        return found


def framed(text: bytes) -> bytes:
    """Returns a message with its length in front."""
    return len(text).to_bytes(_LENGTH, "big") + text


class CoordinatorClient:
    """Calls the coordinator, and connects when needed. One thread sends, another one receives."""

    def __init__(self, config: SidecarConfig, host: str, on_verdict: Callable[[TierAnswer], None]) -> None:
        """The callback receives the verdicts that are no answers."""
        self.host = host
        """The coordinator's address (`protocol.names.endpoint`)."""
        self._config, self._on_verdict = config, on_verdict
        self._context = ssl.create_default_context(cafile=str(config.credentials_dir / "ca.crt"))
        self._lock = threading.Lock()
        """An SSL connection must not be used by two threads at a time."""
        self._answered = threading.Condition(self._lock)
        self._socket: ssl.SSLSocket | None = None
        self._answer: TierAnswer | None = None
        self._failure: OSError | None = None
        self._asked = self._late = 0

    def send(self, text: bytes, number: int) -> TierAnswer:
        """Sends the update `number`, and returns the answer.
        Raises CallFailed; AnswerLate if `wait` may still return the answer."""
        try:
            connection = self._socket or self._connect()
            with self._lock:
                self._answer, self._failure, self._asked, self._late = None, None, number, 0
            self._send(connection, framed(text))
        except (OSError, ValueError) as error:
            raise self._failed(error) from error
        return self.wait()

    def wait(self) -> TierAnswer:
        """Returns the answer to the last update. Raises CallFailed, AnswerLate."""
        with self._answered:
            self._answered.wait_for(lambda: self._answer or self._failure, _PATIENCE)
            answer, failure = self._answer, self._failure
        if answer is not None:
            return answer
        if failure is not None:
            raise self._failed(failure)
        self._late += 1
        if self._late >= _MOST_LATE:
            raise self._failed(TimeoutError("no answer in time"))
        raise AnswerLate(f"{self.host}: no answer in time", ConnectionFailure.SILENT)

    def _failed(self, error: Exception) -> CallFailed:
        self.close()
        silent = isinstance(error, OSError) and isinstance(wire_error(error), PeerSilent)
        return CallFailed(
            f"{self.host}: {error}", ConnectionFailure.SILENT if silent else ConnectionFailure.REFUSED
        )

    @property
    def is_open(self) -> bool:
        """Returns whether earlier reports still count as the base of a difference."""
        return self._socket is not None

    def close(self) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its reader closes it

    def _connect(self) -> ssl.SSLSocket:
        address, own = endpoint(self.host, names.CONTROL_PORT), (self._config.pod_ip, 0)
        raw = socket.create_connection(address, _CONNECT_PATIENCE, own)
        connection = self._context.wrap_socket(raw, server_hostname=names.TLS_SERVER_NAME)  # or it closes raw
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ask(connection)
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)
        self._socket = connection
        begin("verdicts", lambda: self._listen(connection))
        return connection

    def _ask(self, connection: ssl.SSLSocket) -> None:
        headers = {
            "Host": "coordinator",
            "Connection": "Upgrade",
            "Upgrade": PROTOCOL,
            "Authorization": f"Bearer {self._config.token}",
        }
        lines = [f"GET {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        connection.sendall("\r\n".join(lines).encode())
        head, end = b"", time.monotonic() + _CONNECT_PATIENCE
        while not head.endswith(b"\r\n\r\n"):  # byte by byte: a verdict may follow at once
            piece = connection.recv(1)
            if time.monotonic() > end:
                raise TimeoutError("its answer has no end")
            if not piece or len(head) > _LONGEST_HEAD:
                raise OSError("the answer is no HTTP")
            head += piece
        status = head.partition(b"\r\n")[0].decode(errors="replace")
        if " 101" not in status:
            raise CallFailed(f"{self.host}: {status}")

    def _send(self, connection: ssl.SSLSocket, data: bytes) -> None:
        end, view = time.monotonic() + _PATIENCE, memoryview(data)
        while view:
            wanted = select.POLLOUT
            try:
                with self._lock:
                    view = view[connection.send(view) :]
                continue
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                pass
            if time.monotonic() > end:
                raise TimeoutError("it takes nothing")
            _wait_for(connection, wanted, end - time.monotonic())

    def _listen(self, connection: ssl.SSLSocket) -> None:
        messages, failure = Messages(), OSError("the connection was closed")
        try:
            while True:
                _wait_for(connection, select.POLLIN, None)
                for text in messages.feed(self._read(connection)):
                    self._take(decode(text, TierAnswer))
        except OSError as error:
            failure = error
        except Malformed as error:
            failure = OSError(str(error))
        with self._answered:
            if self._socket is connection:
                self._socket = None
                self._failure = failure
                self._answered.notify_all()
            connection.close()

    def _read(self, connection: ssl.SSLSocket) -> bytes:
        found = bytearray()
        while len(found) < _MOST_AT_ONCE:
            try:
                with self._lock:
                    piece = connection.recv(65536)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if not piece:
                raise OSError("the connection was closed")
            found += piece
        return bytes(found)

    def _take(self, answer: TierAnswer) -> None:
        if answer.verdict is not None:
            self._on_verdict(answer)
            return
        with self._answered:
            if answer.to == self._asked:
                self._answer = answer
                self._answered.notify_all()


def _wait_for(connection: ssl.SSLSocket, what: int, seconds: float | None) -> None:
    poll = select.poll()
    poll.register(connection, what)
    poll.poll(None if seconds is None else max(0.0, seconds) * 1000)
