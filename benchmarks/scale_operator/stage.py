"""Runs the real operator for one job of many workers, against simulated sidecars over TLS.

The API server lives in this process. Telling every worker of a restore of another size is measured here too.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec

from benchmarks.harness import ROOT
from benchmarks.reconcile import BenchJob, Server, ground
from benchmarks.scale_operator.crowd import SAVED, Wanted
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.version import Branch, History
from tiercheck_local.markers import Octet
from tiercheck_operator.app import prepare_process
from tiercheck_operator.config import Config
from tiercheck_operator.controller.attempt.directives import due_directives
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.controller.reconciler import JobLoop, ReconcilerContext
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.manifests.owned import Credentials, build_secret
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.observed import Observation, Patience
from tiercheck_operator.model.parsing import parse_job, parse_pod
from tiercheck_operator.model.status import Recovery
from tiercheck_operator.sidecars import DirectiveEncoder, JobSidecars

_PATIENCE = Patience(unreachable=600, suspect=600, silent=600, isolated=600)
"""On a busy machine nobody is to be taken for lost."""
_DEADLINE = 1800.0
RANKS = 8
"""Of each worker."""


class Crowd:
    """Simulated sidecars, of any jobs, in one process; each at an address of its own."""

    def __init__(self) -> None:
        self._octet, self._members = Octet(), 0
        command = [sys.executable, "-c", "from benchmarks.scale_operator.crowd import main; main()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def add(self, folder: Path, job_uid: str, pod_uid: str, worker: int, workers: int) -> str:
        """One more sidecar, with the certificate in `folder`; its address."""
        host = f"127.{self._octet.value}.{128 + (self._members >> 8)}.{self._members & 255}"
        self._members += 1
        wanted = Wanted(host, str(folder), job_uid, pod_uid, worker, workers, RANKS)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(msgspec.json.encode(wanted).decode(), file=self._process.stdin, flush=True)
        if not self._process.stdout.readline():
            raise RuntimeError(f"the simulated sidecars ended with {self._process.wait()}")
        return host

    def end(self) -> None:
        """Their standard input ends, and so do they."""
        self._process.communicate(timeout=60)
        self._octet.release()


class CrowdedJob(BenchJob):
    """A `BenchJob` in real time, whose sidecars are called over TLS."""

    def __init__(self, workers: int, server: Server) -> None:
        super().__init__("job", workers, server, ground(workers), Metrics())
        self.hosts: list[str] = []
        """By worker."""
        raw = self.object
        raw["spec"]["procsPerWorker"] = RANKS
        nodes = ground(workers)
        config, kube = Config(patience=_PATIENCE), cast(Kube, server)
        around = ReconcilerContext(
            lambda *_: list(self.pods.values()), lambda: nodes, kube, config, Metrics()
        )
        self.loop = JobLoop(raw, around)
        self.credentials: Credentials = issue(self.loop.uid)
        secret = build_secret(parse_job(raw), self.credentials)
        server._stored(f"/api/v1/namespaces/default/secrets/{secret['metadata']['name']}", secret)
        server.pod_created = self.pod_created

    def pod_created(self, raw: dict[str, Any]) -> None:
        super().pod_created(raw)
        pod = parse_pod(raw)
        assert pod is not None
        made = self.pods[pod.name]
        self.pods[pod.name] = replace(made, uid=_pod_uid(pod.worker), ip=self.hosts[pod.worker])
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

    async def running(self, seconds: float = _DEADLINE) -> None:
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

    async def end(self) -> None:
        """The loop ends, and its connections."""
        await self.loop.stop()
        await self.loop._context.lines.close()


@contextmanager
def crowded_job(workers: int) -> Iterator[CrowdedJob]:
    """A job whose sidecars listen, and that has not begun."""
    prepare_process()
    job, crowd = CrowdedJob(workers, Server()), Crowd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            (folder / "tls.crt").write_bytes(job.credentials.certificate)
            (folder / "tls.key").write_bytes(job.credentials.key)
            for worker in range(workers):
                job.hosts.append(crowd.add(folder, job.loop.uid, _pod_uid(worker), worker, workers))
            yield job
        finally:
            crowd.end()


def _pod_uid(worker: int) -> str:
    return f"00000000-0000-4000-8000-{worker:012d}"


class Stopwatch:
    """Seconds by the wall, and of this process's processor time."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.monotonic() - self._wall, time.process_time() - self._cpu


async def ask(job: CrowdedJob) -> None:
    """Has all sidecars report what they hold, as after a failure."""
    client = job.client
    client.want_holdings(True)
    while not all(entry.report and entry.report.holdings for entry in client.reports.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def push(job: CrowdedJob, number: int) -> dict[str, float]:
    """One round of directives to restore in attempt `number` what one worker more has saved: what is to be
    told is decided, and told."""
    now = time.time()
    recovery = Recovery(
        cause="NodeLost", message="", detected_at=now, failed_at=now, attempt=number, step=SAVED.step,
        version_attempt=SAVED.attempt, decided_at=now,
    )  # fmt: skip
    watch = Stopwatch()
    obs = job.observe(recovery)
    situation = Situation.of(obs)
    history = History((Branch(1, 0, (obs.size + 1) * RANKS),)).after(number, SAVED.step, obs.size * RANKS)
    status = replace(obs.job.status, attempt=number, history=history)
    due = due_directives(obs, status, situation.members, situation.placement, Phase.HOLD)
    decided = watch.read()
    watch = Stopwatch()
    await job.loop._executor.run(obs.job, due, job.client)
    told = watch.read()
    lacking = [action for action in due if not _follows(job, action)]
    if lacking or len(due) != obs.size:
        raise RuntimeError(f"{len(due)} directives were due, and {len(lacking)} of them are not followed")
    encoder = DirectiveEncoder()
    size = max(sum(map(len, encoder.encode(action.directive))) for action in due)
    return {
        "deciding, s": decided[0],
        "deciding, CPU s": decided[1],
        "telling, s": told[0],
        "telling, CPU s": told[1],
        "bytes of a directive": size,
    }


def _follows(job: CrowdedJob, action: Push) -> bool:
    report = job.client.reports[action.pod_uid].report
    return report is not None and report.revision == action.directive.revision
