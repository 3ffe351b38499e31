"""Where an API server is and how to prove who we are: the part of a kubeconfig that the laptop cluster needs."""

from __future__ import annotations

import base64
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class UnusableKubeconfig(ValueError):
    """The file lacks something or asks for a way to log in that is not supported; the message says which."""


@dataclass(frozen=True)
class Access:
    """The server's URL, the headers of every request, and the TLS context (None for plain http)."""

    server: str
    headers: dict[str, str]
    tls: ssl.SSLContext | None


def load(path: Path) -> Access:
    """Read the current context of the kubeconfig at `path`. Raises UnusableKubeconfig, OSError."""
    config = yaml.safe_load(path.read_text())
    context = _named(config, "contexts", config.get("current-context", ""))["context"]
    cluster = _named(config, "clusters", context["cluster"])["cluster"]
    user = _named(config, "users", context["user"]).get("user", {}) if context.get("user") else {}
    if "exec" in user or "auth-provider" in user:
        raise UnusableKubeconfig(f"{path}: log-in plugins are not supported here; use a token or a client certificate")
    server = cluster["server"].rstrip("/")
    headers = {"Authorization": f"Bearer {_token(user)}"} if _token(user) else {}
    return Access(server, headers, _tls(cluster, user, path.parent) if server.startswith("https:") else None)


def _named(config: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    for entry in config.get(kind) or []:
        if entry["name"] == name:
            return dict(entry)
    raise UnusableKubeconfig(f"no entry {name!r} under {kind}")


def _token(user: dict[str, Any]) -> str:
    if "tokenFile" in user:
        return Path(user["tokenFile"]).read_text().strip()
    return str(user.get("token", ""))


def _tls(cluster: dict[str, Any], user: dict[str, Any], base: Path) -> ssl.SSLContext:
    authority = _data(cluster, "certificate-authority", base)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate, key = _data(user, "client-certificate", base), _data(user, "client-key", base)
    if certificate and key:
        # The ssl module reads a certificate chain from a file only.
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _data(entry: dict[str, Any], name: str, base: Path) -> bytes | None:
    if f"{name}-data" in entry:
        return base64.b64decode(entry[f"{name}-data"])
    return (base / entry[name]).read_bytes() if name in entry else None
