"""Gives a test that speaks HTTP itself the part of a kubeconfig that it needs."""

from __future__ import annotations

import base64
import ssl
from dataclasses import dataclass
from pathlib import Path

import yaml


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
