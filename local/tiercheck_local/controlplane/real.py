"""Runs etcd and kube-apiserver themselves, from a folder of binaries such as envtest's."""

from __future__ import annotations

import os
import secrets
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tiercheck_local.addresses import free_ports
from tiercheck_local.controlplane import lifetime
from tiercheck_local.controlplane.kubeconfig import write_kubeconfig
from tiercheck_local.controlplane.planes import ControlPlane, ControlPlaneFailed, wait_until


class RealControlPlane(ControlPlane):
    """`assets` holds the executables `etcd` and `kube-apiserver`."""

    def __init__(self, directory: Path, assets: Path) -> None:
        self._directory = directory.absolute()
        self._assets = assets
        self._processes: list[subprocess.Popen[bytes]] = []
        self.kubeconfig = self._directory / "kubeconfig"

    def start(self) -> None:
        for name in ("etcd", "kube-apiserver"):
            if not os.access(self._assets / name, os.X_OK):
                raise ControlPlaneFailed(f"no executable {name} in {self._assets}")
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._start_api_server(self._start_etcd())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        while self._processes:
            lifetime.stop(self._processes.pop())

    def _start_etcd(self) -> str:
        client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        log = self._directory / "etcd.log"
        command = [
            str(self._assets / "etcd"), "--name", "local", "--data-dir", str(self._directory / "etcd"),
            "--unsafe-no-fsync",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
            f"local={peer}",
        ]  # fmt: skip
        process = lifetime.start(command, log)
        self._processes.append(process)
        wait_until(lambda: _answers(f"{client}/health"), process, log, "etcd")
        return client

    def _start_api_server(self, etcd: str) -> None:
        (port,) = free_ports(1)
        url = f"https://127.0.0.1:{port}"
        token = secrets.token_urlsafe(24)
        self._write_private("tokens.csv", f'{token},admin,admin-uid,"system:masters"\n'.encode())
        key, public = self._signing_keys()
        certificates = self._directory / "certs"
        log = self._directory / "kube-apiserver.log"
        command = [
            str(self._assets / "kube-apiserver"), "--etcd-servers", etcd,
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}",
            f"--cert-dir={certificates}", f"--service-account-issuer={url}/",
            f"--service-account-key-file={public}", f"--service-account-signing-key-file={key}",
            f"--token-auth-file={self._directory / 'tokens.csv'}", "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24", "--allow-privileged=true",
            "--disable-admission-plugins=ServiceAccount",
        ]  # fmt: skip
        process = lifetime.start(command, log)
        self._processes.append(process)
        ca = certificates / "apiserver.crt"
        wait_until(
            lambda: ca.exists() and _answers(f"{url}/readyz", ca, token), process, log, "kube-apiserver"
        )
        write_kubeconfig(self.kubeconfig, url, token, ca.read_bytes())

    def _signing_keys(self) -> tuple[Path, Path]:
        """The key pair that service account tokens would be signed with; the server insists on one."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        private = self._write_private("service-account.key", key.private_bytes(*form))
        shape = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        return private, self._write_private("service-account.pub", key.public_key().public_bytes(*shape))

    def _write_private(self, name: str, content: bytes) -> Path:
        path = self._directory / name
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return path


def _answers(url: str, ca: Path | None = None, token: str = "") -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        trust = ssl.create_default_context(cafile=str(ca)) if ca else None
        with urllib.request.urlopen(request, timeout=2, context=trust) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
