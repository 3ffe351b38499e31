"""Gives tests the real API server where there is one, and what they need of a kubeconfig."""

from __future__ import annotations

import base64
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    config = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    headers = {"Authorization": f"Bearer {user['token']}"} if user.get("token") else {}
    authority = cluster.get("certificate-authority-data")
    trust = ssl.create_default_context(cadata=base64.b64decode(authority).decode()) if authority else None
    return Access(cluster["server"], headers, trust)


def server_tls(shown: Any, folder: Path) -> ssl.SSLContext:
    """Of a server that shows this certificate (a KeyPair, or a job's Credentials)."""
    (folder / "crt").write_bytes(shown.certificate)
    (folder / "key").write_bytes(shown.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    return context
