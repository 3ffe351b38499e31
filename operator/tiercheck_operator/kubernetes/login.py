"""How this process gets at the API server: by its pod's service account, or by a kubeconfig.

kopf reads both. The kubernetes package, whose models and helpers nobody uses here, would be a quarter of an
idle operator's memory; it alone asks other programs for credentials, as some kubeconfigs of people want.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import kopf

from tiercheck.protocol.names import join_address

_READ_EVERY = 60.0
"""Seconds; a service account's token is another one before the last hour of it is over."""


def log_in() -> kopf.ConnectionInfo:
    """From the service account if there is one, else $KUBECONFIG or ~/.kube/config. Raises LoginError."""
    settings = kopf.OperatorSettings()
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    found = kopf.login_with_service_account(settings=settings) if host and port else None
    if found is not None and host and port:
        return replace(found, server=f"https://{join_address(host, int(port))}")  # a name needs a DNS server
    found = kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        raise kopf.LoginError("there is neither a service account nor a kubeconfig")
    return found


class Access:
    """What `log_in` says, read again now and then. Safe for use by several threads."""

    def __init__(self, read: Callable[[], kopf.ConnectionInfo] = log_in) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known, self._read_at = read(), time.monotonic()
        self.server = self._known.server.rstrip("/")
        self.tls: ssl.SSLContext | None = None
        """None: the server speaks plain HTTP."""
        if self.server.startswith("https:"):
            self.tls = self._known.as_ssl_context()

    def info(self) -> kopf.ConnectionInfo:
        """As it is now; what cannot be read is as it was."""
        with self._lock:
            if time.monotonic() - self._read_at > _READ_EVERY:
                self._read_at = time.monotonic()
                try:
                    self._known = self._read()
                except (OSError, ValueError, LookupError, kopf.LoginError):
                    return self._known
            return self._known

    def headers(self) -> Mapping[str, str]:
        """Who we are."""
        return self.info().as_http_headers()
