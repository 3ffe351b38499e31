"""Holds the launcher's connection to the sidecar, which breaks when the sidecar restarts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.local import LONGEST_LINE, Hello, LauncherEvent, Order


class SidecarConnection:
    """The connection to the sidecar. Never raises, and never blocks for long.

    An event that cannot be sent is sent again by the caller after the next connection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.channel: socket.socket | None = None
        """The socket, for a selector."""
        self._received = b""

    @property
    def connected(self) -> bool:
        return self.channel is not None

    def connect(self) -> bool:
        """Tries to connect once and sends a Hello. Returns whether that succeeded."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(1.0)
        try:
            connection.connect(str(self._path))
            connection.sendall(to_json(Hello(role="launcher", pid=os.getpid())) + b"\n")
        except OSError:
            connection.close()
            return False
        self.channel = connection
        self._received = b""
        return True

    def send(self, event: LauncherEvent) -> None:
        if self.channel is None:
            return
        try:
            self.channel.sendall(to_json(event) + b"\n")
        except OSError:
            self.close()

    def orders(self) -> list[Order]:
        """Returns received orders; call when the socket is readable. Closes it when the sidecar is gone."""
        if self.channel is None:
            return []
        try:
            piece = self.channel.recv(65536)
        except OSError:
            piece = b""
        if not piece:
            self.close()
            return []
        *lines, self._received = (self._received + piece).split(b"\n")
        if len(self._received) > LONGEST_LINE:
            self.close()
            return []
        try:
            return [from_json(line, Order) for line in lines if line]
        except Malformed:
            self.close()
            return []

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
