"""Runs a control plane that ends with its parent: the embedded one, or etcd and kube-apiserver."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import os
import secrets
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tiercheck_local.markers import free_ports

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Requests this signal from the kernel for when the thread that started this process ends.

    `parent`: that thread's process. Makes system calls only, so it may run before exec. Raises OSError."""
    if _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)  # it ended before the request


async def run_until_stopped(*work: Coroutine[Any, Any, Any]) -> bool:
    """Runs all of `work` until SIGTERM, SIGINT, or the end of standard input (the parent is gone).

    Returns whether it was the latter. Raises what `work` raises; `work` never ends by itself."""
    loop, stop, orphaned = asyncio.get_running_loop(), asyncio.Event(), False

    def read_lifeline() -> None:
        nonlocal orphaned
        if not os.read(sys.stdin.fileno(), 1):
            orphaned = True
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_reader(sys.stdin.fileno(), read_lifeline)
    tasks = [asyncio.create_task(each) for each in (*work, stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
    return orphaned


def start_child(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `command` in `folder`, output in `log`. The calling thread must live as long as the process."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment) if environment is not None else None,
            cwd=folder,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - it takes no lock
        )


def stop_child(process: subprocess.Popen[bytes], seconds: float = 10.0) -> None:
    """Sends SIGTERM, then SIGKILL after `seconds`. Does nothing if the process has ended."""
    process.terminate()
    await_end(process, seconds)


def await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits for a process that was asked to end, and kills it after `seconds`."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail_of(log: Path, lines: int = 15) -> str:
    """Returns the end of a log, for error messages."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


CONTEXT = "tiercheck-local"


def write_kubeconfig(path: Path, server: str, token: str = "", ca: bytes = b"") -> None:
    """Writes the file atomically, for its owner only: once it exists, the server can be used."""
    cluster: dict[str, Any] = {"server": server}
    if ca:
        cluster["certificate-authority-data"] = base64.b64encode(ca).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": CONTEXT,
        "clusters": [{"name": CONTEXT, "cluster": cluster}],
        "users": [{"name": CONTEXT, "user": {"token": token} if token else {}}],
        "contexts": [
            {"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT, "namespace": "default"}}
        ],
    }
    write_private(path.with_suffix(".tmp"), yaml.safe_dump(config, sort_keys=False).encode()).rename(path)


def write_private(path: Path, content: bytes) -> Path:
    """Writes a file that only its owner can read, and returns its path."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    return path


class ControlPlaneFailed(RuntimeError):
    """The control plane did not start; the message holds the end of its log."""


class ControlPlane(ABC):
    """An API server that can be started and stopped. Also a context manager that does both."""

    kubeconfig: Path
    """The path of the kubeconfig; valid between `start` and `stop`."""

    @abstractmethod
    def start(self) -> None:
        """Returns when the API answers. Raises ControlPlaneFailed."""

    @abstractmethod
    def stop(self) -> None:
        """Ends every process that `start` made. May be called twice."""

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str, seconds: float = 60.0
) -> None:
    """Waits until `ready`; if the process ends or `seconds` pass, stops it and raises ControlPlaneFailed."""
    deadline = time.monotonic() + seconds
    while not ready():
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            stop_child(process)
            why = f"ended with {ended}" if ended is not None else f"was not ready after {seconds:.0f} s"
            raise ControlPlaneFailed(f"{what} {why}. Its log ends with:\n{tail_of(log)}")
        time.sleep(0.02)


class EmbeddedControlPlane(ControlPlane):
    """The embedded API server. Watches can resume over the last `history` changes."""

    def __init__(self, directory: Path, port: int = 0, history: int = 10_000) -> None:
        self._directory = directory.absolute()
        self._arguments = ["--port", str(port), "--history", str(history)]
        self._process: subprocess.Popen[bytes] | None = None
        self.kubeconfig = self._directory / "kubeconfig"

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.kubeconfig.unlink(missing_ok=True)
        log = self._directory / "apiserver.log"
        command = [sys.executable, "-m", "tiercheck_local.apiserver", "--directory", str(self._directory)]
        process = self._process = start_child([*command, *self._arguments], log)
        wait_until(self.kubeconfig.exists, process, log, "the embedded API server")

    def stop(self) -> None:
        if self._process is not None:
            stop_child(self._process)
            self._process = None


class RealControlPlane(ControlPlane):
    """A real control plane. `assets` holds the executables `etcd` and `kube-apiserver`."""

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
            stop_child(self._processes.pop())

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
        process = start_child(command, log)
        self._processes.append(process)
        wait_until(lambda: _answers(f"{client}/health"), process, log, "etcd")
        return client

    def _start_api_server(self, etcd: str) -> None:
        (port,) = free_ports(1)
        url = f"https://127.0.0.1:{port}"
        token = secrets.token_urlsafe(24)
        write_private(self._directory / "tokens.csv", f'{token},admin,admin-uid,"system:masters"\n'.encode())
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
        process = start_child(command, log)
        self._processes.append(process)
        ca = certificates / "apiserver.crt"
        wait_until(
            lambda: ca.exists() and _answers(f"{url}/readyz", ca, token), process, log, "kube-apiserver"
        )
        write_kubeconfig(self.kubeconfig, url, token, ca.read_bytes())

    def _signing_keys(self) -> tuple[Path, Path]:
        """Makes the key pair for signing service account tokens; the server requires one."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        private = write_private(self._directory / "service-account.key", key.private_bytes(*form))
        shape = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        public = key.public_key().public_bytes(*shape)
        return private, write_private(self._directory / "service-account.pub", public)


def _answers(url: str, ca: Path | None = None, token: str = "") -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        trust = ssl.create_default_context(cafile=str(ca)) if ca else None
        with urllib.request.urlopen(request, timeout=2, context=trust) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def open_control_plane(kind: str, directory: Path) -> ControlPlane:
    """Returns a control plane of this kind ("embedded" or "real"), not started yet.

    Raises ValueError if the kind is unknown, or it is "real" and KUBEBUILDER_ASSETS is not set."""
    if kind == "embedded":
        return EmbeddedControlPlane(directory)
    if kind != "real":
        raise ValueError(f"unknown kind of control plane: {kind!r} (embedded, real)")
    if not (assets := os.environ.get("KUBEBUILDER_ASSETS")):
        raise ValueError(
            "a real control plane needs etcd and kube-apiserver: set KUBEBUILDER_ASSETS to their folder"
        )
    return RealControlPlane(directory, Path(assets))
