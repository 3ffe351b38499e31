"""One job of many workers: the real loop, decisions, executor and client, against simulated sidecars over
TLS; the API server lives in this process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks.reconcile import BenchJob, Server, ground
from benchmarks.scale import ROOT
from benchmarks.scale_operator.crowd import address, pod_uid
from tiercheck_operator.app import collect_garbage_seldom
from tiercheck_operator.config import Config
from tiercheck_operator.controller.reconciler import JobLoop, Surroundings
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.manifests.owned import Credentials, build_secret
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model.observed import Observation, Patience
from tiercheck_operator.model.parsing import parse_job, parse_pod
from tiercheck_operator.model.status import Recovery
from tiercheck_operator.sidecars import JobSidecars

_PATIENCE = Patience(accused=600, suspect=600, silent=600, isolated=600)
"""On a busy machine nobody is to be taken for lost."""
RANKS = 8
"""Of each worker."""


class Crowd:
    """All simulated sidecars of a job, in one process."""

    def __init__(self, folder: Path, network: str, job_uid: str, workers: int) -> None:
        command = [sys.executable, "-m", "benchmarks.scale_operator.crowd"]
        self._process = subprocess.Popen(
            [*command, str(folder), network, job_uid, str(workers), str(RANKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._said()

    def cpu(self) -> float:
        """Processor seconds that it has used."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return float(self._said())

    def end(self) -> None:
        """Its standard input ends, and so does it."""
        self._process.communicate(timeout=60)

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulated sidecars ended with {self._process.wait()}")
        return line


class CrowdedJob(BenchJob):
    """A `BenchJob` in real time, whose sidecars are called over TLS."""

    def __init__(self, workers: int, server: Server, network: str) -> None:
        super().__init__("job", workers, server, ground(workers), Metrics())
        self._network = network
        raw = self.object
        raw["spec"]["procsPerWorker"] = RANKS
        nodes = ground(workers)
        self.around = Surroundings(
            lambda *_: list(self.pods.values()), lambda: nodes, cast(Kube, server), Config(patience=_PATIENCE), Metrics()
        )
        self.loop = JobLoop(raw, self.around)
        self.credentials: Credentials = issue(self.loop.uid)
        secret = build_secret(parse_job(raw), self.credentials)
        server._stored(f"/api/v1/namespaces/default/secrets/{secret['metadata']['name']}", secret)
        server.pod_created = self.pod_created

    def pod_created(self, raw: dict[str, Any]) -> None:
        super().pod_created(raw)
        pod = parse_pod(raw)
        assert pod is not None
        made = self.pods[pod.name]
        self.pods[pod.name] = replace(made, uid=pod_uid(pod.worker), ip=address(self._network, pod.worker))
        self.loop.wake()

    @property
    def client(self) -> JobSidecars:
        """Who listens to the sidecars."""
        found = self.loop._sidecars
        assert found is not None
        return found

    def observe(self, recovery: Recovery) -> Observation:
        """What the next look would see, in a recovery."""
        job = parse_job(self.object)
        return self.loop._observe(replace(job, status=replace(job.status, recovery=recovery)))

    async def running(self, seconds: float = 300.0) -> None:
        """Start the loop, and wait until the job trains."""
        self.loop.start()
        async with asyncio.timeout(seconds):
            while True:
                status = self.object.get("status") or {}
                if status.get("phase") == "Running" and not status.get("recovery"):
                    return
                await asyncio.sleep(0.1)

    async def pause(self) -> None:
        """The loop looks no more; its client goes on listening."""
        task = self.loop._task
        assert task is not None
        task.cancel()
        await asyncio.wait({task})
        self.loop._task = None


@contextmanager
def crowded_job(workers: int) -> Iterator[tuple[CrowdedJob, Crowd]]:
    """A job whose sidecars listen, and that has not begun."""
    collect_garbage_seldom()
    network = f"127.{130 + os.getpid() % 100}"
    job = CrowdedJob(workers, Server(), network)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tls.crt").write_bytes(job.credentials.certificate)
        (folder / "tls.key").write_bytes(job.credentials.key)
        crowd = Crowd(folder, network, job.loop.uid, workers)
        try:
            yield job, crowd
        finally:
            crowd.end()


class Stopwatch:
    """Seconds by the wall, and of this process's processor time."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.monotonic() - self._wall, time.process_time() - self._cpu
