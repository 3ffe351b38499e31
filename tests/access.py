"""Gives tests the real API server where there is one, and what they need of a kubeconfig."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tiercheck_local.client import LocalAccess

REAL_SERVER = (
    pytest.mark.real,
    pytest.mark.skipif(
        not os.environ.get("KUBEBUILDER_ASSETS"),
        reason="KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver",
    ),
)
"""Marks of what needs that server."""
BOTH_SERVERS = ("embedded", pytest.param("real", marks=REAL_SERVER))
"""Parameters of what runs on the laptop's API server and on the real one."""


@dataclass(frozen=True)
class Access:
    """The server's URL, the headers of every request, and the TLS context (None for plain http)."""

    server: str
    headers: dict[str, str]
    tls: ssl.SSLContext | None


def load(kubeconfig: Path) -> Access:
    """Of a file as `write_kubeconfig` writes it."""
    access = LocalAccess(kubeconfig)
    return Access(access.server, dict(access.headers()), access.tls)


def server_tls(shown: Any, folder: Path) -> ssl.SSLContext:
    """Of a server that shows this certificate (a KeyPair, or a job's Credentials)."""
    (folder / "crt").write_bytes(shown.certificate)
    (folder / "key").write_bytes(shown.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    return context
