"""Plain HTTP connections that carry the bulk bytes: out of the mapped slot, and into it, without a copy of our own in between.

Why not a client library: none can go on with a multipart upload of an earlier process, and all of them collect a download in memory
of their own first (`docs/design/007-remote-resume.md`). Requests are signed by botocore, their payload is not.
"""

from __future__ import annotations

import base64
import http.client
import random
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from tiercheck_sidecar.remote import s3_errors
from tiercheck_sidecar.remote.errors import RemoteClosed
from tiercheck_sidecar.remote.objects import Arrived
from tiercheck_sidecar.remote.verify import nothing_arrived

CONNECT_SECONDS = 5
STALL_SECONDS = 20
"""Without any progress on a connection."""
ANSWER_SECONDS = 120
"""For a server to store a part that it has received."""
TRIES = 5
_BACKOFF = (0.2, 5.0)
_SLICE = 4 * 1024 * 1024
_ARRIVAL = 512 * 1024
"""Small enough to be still in a core's cache when it is verified."""
_LONGEST_ANSWER = 64 * 1024
"""Bytes of an error, or of what is said to an upload."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """Of an error; else what was not asked to go into memory."""
    received: int = 0
    """Bytes that went into the caller's memory."""


class Lines:
    """Thread-safe. Connections are kept for the next request."""

    def __init__(
        self,
        sign: Callable[[str, str, dict[str, str]], dict[str, str]],
        location: str,
        tls: Callable[[], ssl.SSLContext],
        proxies: Mapping[str, str],
        closed: threading.Event,
    ) -> None:
        """`sign(method, url, headers)` gives the headers to send; it may raise RemoteError."""
        self._sign, self._location, self._closed, self._proxies = sign, location, closed, proxies
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: memoryview | bytes = b"",
        into: memoryview | None = None,
        *,
        arrived: Arrived = nothing_arrived,
    ) -> Answer:
        """The answer, whatever its status; what a server in trouble says is asked again, with full jitter, `TRIES` times.

        A body of an answer 200 or 206 goes `into` memory as far as it fits, and `arrived` is told. Raises RemoteError if there is
        no answer.
        """
        for number in range(TRIES):
            last = number == TRIES - 1
            try:
                answer = self._once(method, url, headers, body, into, arrived=arrived)
            except (OSError, http.client.HTTPException) as error:
                if last or isinstance(error, ssl.SSLCertVerificationError):
                    raise s3_errors.from_socket(error, self._location) from error
            else:
                if last or not s3_errors.is_passing(answer.status, answer.body):
                    return answer
            # Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
            if self._closed.wait(random.uniform(0, min(_BACKOFF[1], _BACKOFF[0] * 2**number))):
                raise RemoteClosed
        raise AssertionError("unreachable")

    def close(self) -> None:
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: memoryview | bytes,
        into: memoryview | None,
        *,
        arrived: Arrived,
    ) -> Answer:
        signed = self._sign(method, url, dict(headers))
        connection = self._take() or self._connect(url)
        try:
            connection.putrequest(method, self._target(url), skip_host=True, skip_accept_encoding=True)
            for name, value in signed.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            self._send(connection, memoryview(body))
            _patience(connection, ANSWER_SECONDS if body else STALL_SECONDS)
            response = connection.getresponse()
            _patience(connection, STALL_SECONDS)
            received, rest = 0, b""
            if into is not None and response.status in (200, 206):
                received = _receive(connection.sock, response, into, arrived)
            else:
                rest = response.read(_LONGEST_ANSWER)
            reusable = response.isclosed() and not response.will_close
            answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, rest, received)
        except BaseException:
            connection.close()
            raise
        if reusable and not self._closed.is_set():
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _send(self, connection: http.client.HTTPConnection, body: memoryview) -> None:
        # In slices, so that closing interrupts it.
        for begin in range(0, len(body), _SLICE):
            if self._closed.is_set():
                raise RemoteClosed
            try:
                connection.send(body[begin : begin + _SLICE])
            except (BrokenPipeError, ConnectionResetError):
                return  # the server may have refused before it had read all: its answer says why

    def _take(self) -> http.client.HTTPConnection | None:
        """An idle connection that the server has not closed."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if not poll.poll(0):  # nothing is to be read from one that is well
                return connection
            connection.close()

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        proxy = urlsplit(self._proxies.get(parts.scheme, ""))
        host, port = parts.hostname or "", parts.port
        if proxy.hostname:
            host, port = proxy.hostname, proxy.port or 80
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            with self._lock:
                self._tls = self._tls or self._make_tls()
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._tls)
            if proxy.hostname:
                connection.set_tunnel(parts.hostname or "", parts.port or 443, _proxy_headers(proxy))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sock.settimeout(None)
        _patience(connection, STALL_SECONDS)
        return connection

    def _target(self, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme == "http" and self._proxies.get("http"):
            return url
        return parts.path + (f"?{parts.query}" if parts.query else "")


def _patience(connection: http.client.HTTPConnection, seconds: int) -> None:
    """How long one call may wait for progress. By the kernel's own timeouts: Python's would make every call two or three."""
    if connection.sock is not None:  # http.client lets go of it when the server is going to close
        value = struct.pack("ll", seconds, 0)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _receive(
    connection: socket.socket | None, response: http.client.HTTPResponse, into: memoryview, arrived: Arrived
) -> int:
    done = 0
    arrived(done)
    if connection is not None and response.length is not None and len(into) <= response.length:
        done = _receive_plainly(connection, response, into, arrived)
    while done < len(into):
        got = response.readinto(into[done : done + _SLICE])
        if not got:
            break
        done += got
        arrived(done)
    if done == len(into) and not response.length:
        response.read()  # so that http.client sees the end
    return done


def _receive_plainly(
    connection: socket.socket, response: http.client.HTTPResponse, into: memoryview, arrived: Arrived
) -> int:
    """Past http.client, whose layers cost a call each for whatever the kernel has at the moment."""
    early = response.fp.peek() if response.fp is not None else b""  # came with the headers
    done = response.readinto(into[: min(len(early), len(into))])
    encrypted = isinstance(connection, ssl.SSLSocket)
    while done < len(into):
        end = min(len(into), (done // _ARRIVAL + 1) * _ARRIVAL)
        while done < end:
            with into[done:end] as piece:
                # The kernel waits for all of it, an encrypted record is all that there is at once.
                got = connection.recv_into(piece) if encrypted else connection.recv_into(piece, 0, socket.MSG_WAITALL)
            if got == 0:
                return done
            done += got
            if response.length is not None:
                response.length -= got
        arrived(done)
    return done


def _proxy_headers(proxy: Any) -> dict[str, str]:
    if not proxy.username:
        return {}
    word = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": "Basic " + base64.b64encode(word).decode()}
