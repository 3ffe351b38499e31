"""Runs real sidecar processes on loopback addresses, so that what is measured is what runs in a pod."""

from __future__ import annotations

import http.client
import itertools
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from benchmarks.machine import shared_memory
from tiercheck.protocol import names, signing
from tiercheck.protocol.directive import (
    DeltaMode,
    Directive,
    Peer,
    Phase,
    Policy,
    Restore,
    Source,
    SourceTable,
    Tier,
)
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import Report, RestoreState
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.sidecars import Signer
from tiercheck_sidecar.decoding import decode

T = TypeVar("T")
_JOB_UID = "benchmark"
_NETWORKS = itertools.count(1)


def until(condition: Callable[[], T], what: str, seconds: float = 120.0) -> T:
    """The first true value of `condition`. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"in vain for {seconds:.0f} s: {what}")
        time.sleep(0.02)
    return value


class Job:
    """One rank per worker. Use it as a context; leaving it ends all processes and removes all files.

    `limit`: bytes of each worker's memory volume. `copies`: how many next workers hold a worker's artifacts.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        limit: int,
        every: int | None = 1,
        delta: DeltaMode = DeltaMode.NONE,
        copies: int = 1,
    ) -> None:
        self.workers, self.limit = workers, limit
        self.copies = min(copies, workers - 1)
        self.policy = Policy(snapshot_every=every, remote_every=1_000_000, remote_keep=1, delta=delta)
        self.attempt = 0
        self.history = History()
        self.base: Version | None = None
        self._network = f"127.{os.getpid() % 100 + 100}.{next(_NETWORKS)}"
        self._root = Path(tempfile.mkdtemp(prefix="tcb-"))
        self._memory = Path(tempfile.mkdtemp(prefix="tiercheck-bench-", dir=shared_memory()))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        credentials = issue(_JOB_UID)
        self._token, self._signer = credentials.token, Signer(_JOB_UID, credentials.operator_key)
        folder = self._root / "credentials"
        folder.mkdir()
        (folder / "ca.crt").write_bytes(credentials.ca)
        (folder / "tls.crt").write_bytes(credentials.certificate)
        (folder / "tls.key").write_bytes(credentials.key)
        (folder / "token").write_text(credentials.token)
        (folder / names.OPERATOR_PUBLIC).write_bytes(credentials.operator_public)

    def __enter__(self) -> Job:
        try:
            for worker in range(self.workers):
                self.start(worker)
            for worker in range(self.workers):
                until(lambda worker=worker: self._ready(worker), f"sidecar {worker} is ready")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.rmtree(self._memory, ignore_errors=True)

    def start(self, worker: int) -> None:
        """Start the sidecar of `worker`."""
        with open(self._root / f"sidecar-{worker}.log", "ab") as log:
            self._processes[worker] = subprocess.Popen(
                [sys.executable, "-m", "tiercheck_sidecar"],
                env={**os.environ, **self._sidecar_env(worker)},
                stdout=log,
                stderr=log,
            )

    def lose(self, worker: int) -> None:
        """The pod is gone, and its memory with it; a new, empty one takes its place."""
        process = self._processes.pop(worker)
        process.kill()
        process.wait()
        shutil.rmtree(self.memory_dir(worker), ignore_errors=True)
        self.start(worker)
        until(lambda: self._ready(worker), f"sidecar {worker} is ready again")

    def begin(
        self, version: Version | None = None, sources: Mapping[int, tuple[Source, ...]] | None = None
    ) -> None:
        """Next attempt: restore `version` everywhere (None: from scratch), then release the trainers."""
        self.hold(version, sources)
        self.release(sources)

    def hold(
        self, version: Version | None = None, sources: Mapping[int, tuple[Source, ...]] | None = None
    ) -> None:
        """Next attempt, until every sidecar has what it is to restore."""
        self.attempt += 1
        self.history = (
            History((Branch(self.attempt, 0),))
            if version is None
            else self.history.after(self.attempt, version.step)
        )
        self.base = version
        for worker in range(self.workers):
            self._direct(worker, Phase.HOLD, sources or {})
        for worker in range(self.workers):
            until(lambda worker=worker: self._restored(worker), f"worker {worker} is restored")

    def release(self, sources: Mapping[int, tuple[Source, ...]] | None = None) -> None:
        """Let the trainers of this attempt start."""
        for worker in range(self.workers):
            self._direct(worker, Phase.RELEASE, sources or {})

    def trainer_env(self, rank: int) -> dict[str, str]:
        """What the launcher would set for the training command."""
        return {
            names.ENV_RUN_DIR: str(self._run_dir(rank)),
            names.ENV_ATTEMPT: str(self.attempt),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
        }

    def report(self, worker: int) -> Report:
        """What the sidecar tells the controller."""
        return decode(self._call(worker, "GET", "/v1/report"), Report)

    def peer(self, worker: int) -> Peer:
        """`worker` as others reach it."""
        return Peer(worker, f"{self._network}.{worker + 1}")

    def from_peer(self, worker: int) -> Source:
        return Source(Tier.PEER, self.peer(worker))

    def memory_dir(self, worker: int) -> Path:
        """The memory volume of `worker`."""
        return self._memory / f"worker-{worker}"

    def memory_used(self, worker: int) -> int:
        """Bytes of its memory volume that are really taken."""
        return sum(
            512 * path.stat().st_blocks for path in self.memory_dir(worker).rglob("*") if path.is_file()
        )

    def process_id(self, worker: int) -> int:
        return self._processes[worker].pid

    def log(self, worker: int) -> str:
        """What its sidecar has written."""
        return (self._root / f"sidecar-{worker}.log").read_text()

    def _restored(self, worker: int) -> bool:
        state = self.report(worker).restore.state
        if state is RestoreState.FAILED:
            raise RuntimeError(f"worker {worker} could not be restored:\n{self.log(worker)}")
        return state is RestoreState.READY

    def _run_dir(self, worker: int) -> Path:
        return self._root / f"r{worker}"

    def _sidecar_env(self, worker: int) -> dict[str, str]:
        return {
            names.ENV_JOB: "default/benchmark",
            names.ENV_JOB_UID: _JOB_UID,
            names.ENV_WORKER: str(worker),
            names.ENV_PROCS_PER_WORKER: "1",
            names.ENV_POD_UID: f"pod-{worker}",
            names.ENV_POD_IP: self.peer(worker).host,
            names.ENV_MEMORY_DIR: str(self.memory_dir(worker)),
            names.ENV_MEMORY_LIMIT: str(self.limit),
            names.ENV_RUN_DIR: str(self._run_dir(worker)),
            names.ENV_CREDENTIALS_DIR: str(self._root / "credentials"),
        }

    def _ready(self, worker: int) -> bool:
        if self._processes[worker].poll() is not None:
            raise RuntimeError(f"sidecar {worker} ended:\n{self.log(worker)}")
        connection = http.client.HTTPConnection(self.peer(worker).host, names.METRICS_PORT, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _call(self, worker: int, method: str, path: str, body: bytes | None = None) -> bytes:
        context = ssl.create_default_context(cafile=str(self._root / "credentials" / "ca.crt"))
        host = self.peer(worker).host
        connection = http.client.HTTPConnection(host, names.CONTROL_PORT)
        with socket.create_connection((host, names.CONTROL_PORT), timeout=10) as raw:
            connection.sock = context.wrap_socket(raw, server_hostname=names.TLS_SERVER_NAME)
            shown = {signing.HEADER: self._signer.sign_pod(f"pod-{worker}")}
            connection.request(method, path, body, {"Authorization": f"Bearer {self._token}", **shown})
            response = connection.getresponse()
            answer = response.read()
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{method} {path} on worker {worker}: {response.status} {answer!r}")
        return answer

    def _direct(self, worker: int, phase: Phase, sources: Mapping[int, tuple[Source, ...]]) -> None:
        restore = None
        if self.base is not None:
            restore = Restore(self.base, SourceTable.of(sources, range(worker, worker + 1)))
        holders = [(worker + distance) % self.workers for distance in range(1, self.copies + 1)]
        hosted = [(worker - distance) % self.workers for distance in range(1, self.copies + 1)]
        known = self.report(worker)
        directive = Directive(
            job_uid=_JOB_UID,
            worker=worker,
            workers=self.workers,
            procs_per_worker=1,
            attempt=self.attempt,
            phase=phase,
            history=self.history,
            policy=self.policy,
            restore=restore,
            holders=tuple(self.peer(other) for other in holders),
            hosted=tuple(self.peer(other) for other in hosted),
            coordinator=self.peer(0),
            master_host=self.peer(0).host,
            master_port=29500,
            pod_uid=f"pod-{worker}",
            instance=known.instance,
            number=known.followed + 1,
            revision=f"{self.attempt}-{phase.value}",
        )
        self._call(worker, "PUT", "/v1/directive", to_json(directive))
