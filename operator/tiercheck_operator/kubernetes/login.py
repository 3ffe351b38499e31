"""How this process gets at the API server: by its pod's service account, or by a kubeconfig.

kopf reads both. The kubernetes package, whose models and helpers nobody uses here, would be a quarter of an
idle operator's memory; it alone asks other programs for credentials, as some kubeconfigs of people want.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import kopf

from tiercheck.protocol.names import join_address

log = logging.getLogger(__name__)

_READ_EVERY = 10.0
"""Seconds; a cluster's new authority, or a new token, is used that soon after the kubelet has written it."""
_FILES = ("ca_path", "certificate_path", "private_key_path")


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
        self._proof, self._tls = _trust_of(self._known)

    def info(self) -> kopf.ConnectionInfo:
        """As it is now; what cannot be read is as it was."""
        with self._lock:
            if time.monotonic() - self._read_at > _READ_EVERY:
                self._read_at = time.monotonic()
                with contextlib.suppress(OSError, ValueError, LookupError, kopf.LoginError):
                    known = self._read()
                    if _contents(known) != self._proof:
                        self._proof, self._tls = _trust_of(known)
                        log.info("the API server's authority, or our certificate, has changed")
                    self._known = known
            return self._known

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Another one once an authority or a certificate has changed; None: the server speaks plain HTTP."""
        self.info()
        return self._tls

    def headers(self) -> Mapping[str, str]:
        """Who we are."""
        return self.info().as_http_headers()


def _trust_of(info: kopf.ConnectionInfo) -> tuple[object, ssl.SSLContext | None]:
    """The proofs of both sides, and a TLS context made of them. Raises OSError, ValueError."""
    proof = _contents(info)
    return proof, info.as_ssl_context() if info.server.startswith("https:") else None


def _contents(info: kopf.ConnectionInfo) -> object:
    """The files that a TLS context is made of have the same names for ever."""
    paths = [getattr(info, name) for name in _FILES]
    return (
        [Path(os.fsdecode(path)).read_bytes() for path in paths if path],
        (info.ca_data, info.certificate_data, info.private_key_data, info.insecure),
    )
