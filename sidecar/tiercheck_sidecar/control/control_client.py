"""Calls another sidecar's control API, and checks its certificate against the job's own CA."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl

from tiercheck.protocol import names
from tiercheck.protocol.names import endpoint
from tiercheck.protocol.report import Break
from tiercheck_sidecar.exchange.frames import PeerSilent, wire_error
from tiercheck_sidecar.model.config import SidecarConfig

_MOST_BODY = 64 * 1024 * 1024
"""Bytes; the verdict of a job of ten thousand ranks is a hundredth of it."""


class CallFailed(Exception):
    """No answer, or a refusal; the message is a sentence."""

    def __init__(self, message: str, how: Break | None = None) -> None:
        """`how`: why there was no answer; None: there was one."""
        super().__init__(message)
        self.how = how


class ControlClient:
    """One kept-alive connection. Used by one thread."""

    def __init__(self, config: SidecarConfig, host: str, timeout: float = 3.0) -> None:
        self.host = host
        """Its address (`protocol.address`)."""
        self._config, self._timeout = config, timeout
        self._context = context_of(config)
        self._connection: http.client.HTTPConnection | None = None

    def call(self, method: str, path: str, body: bytes) -> bytes:
        """The body of a 200 answer. Raises CallFailed."""
        try:
            connection = self._connection or self._connect()
            connection.request(method, path, body, {"Authorization": f"Bearer {self._config.token}"})
            response = connection.getresponse()
            text = response.read(_MOST_BODY + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise call_failed(self.host, error) from error
        if response.status != 200:
            raise CallFailed(f"{self.host}: {response.status} {text[:300].decode(errors='replace')}")
        if len(text) > _MOST_BODY:
            self.close()
            raise CallFailed(f"{self.host}: an answer of more than {_MOST_BODY} bytes is refused")
        return text

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
        self._connection = None

    def _connect(self) -> http.client.HTTPConnection:
        address = endpoint(self.host, names.CONTROL_PORT)
        connection = http.client.HTTPConnection(*address, timeout=self._timeout)
        connection.sock = connect(self._config, self._context, self.host, self._timeout)
        self._connection = connection
        return connection


def context_of(config: SidecarConfig) -> ssl.SSLContext:
    """Trusts the job's own CA."""
    return ssl.create_default_context(cafile=str(config.credentials_dir / "ca.crt"))


def connect(config: SidecarConfig, context: ssl.SSLContext, host: str, seconds: float) -> ssl.SSLSocket:
    """To the control port of the sidecar at `host`. Raises OSError."""
    raw = socket.create_connection(endpoint(host, names.CONTROL_PORT), seconds, (config.pod_ip, 0))
    try:
        return context.wrap_socket(raw, server_hostname=names.TLS_SERVER_NAME)
    except OSError:
        raw.close()
        raise


def call_failed(host: str, error: Exception) -> CallFailed:
    """What is said of a connection that broke."""
    silent = isinstance(error, OSError) and isinstance(wire_error(error), PeerSilent)
    return CallFailed(f"{host}: {error}", Break.SILENT if silent else Break.REFUSED)
