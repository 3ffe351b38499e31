"""Measures what one event costs the operator, by workers per job and by jobs.

The real loop of a job, the real decisions and the real executor run against an API server and sidecars that
live in this process and answer at once. So what is measured is the operator's own work: processor seconds per
reconcile, and calls to the API server.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from benchmarks.harness import Figure, Outcome, Scale
from tiercheck.protocol.directive import Directive, Phase, Tier
from tiercheck.protocol.report import (
    Holding,
    MemoryReport,
    RemoteReport,
    Report,
    RestoreReport,
    RestoreState,
    TrainerReport,
    TrainerState,
    Watermarks,
)
from tiercheck.protocol.version import Version
from tiercheck_local.apiserver.http.requests import merge
from tiercheck_operator.app import prepare_process
from tiercheck_operator.config import Config
from tiercheck_operator.controller.reconciler import JobLoop, ReconcilerContext
from tiercheck_operator.kubernetes.api_server import ApiFailure, ApiResource
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model.observed import ContainerState, NodeView, PodView, WorkerReport
from tiercheck_operator.model.parsing import parse_pod

WORKERS = (4, 16, 64, 256, 1000)
JOBS = (1, 10, 100, 500)
WORKERS_OF_MANY = 4
"""Of each job when the number of jobs is what changes."""
EVENTS = 40
EVENTS_OF_ALL = 5000
"""Of all jobs together when the number of jobs is what changes."""
LIMIT = 20 * 1024
"""Bytes of a job's object, by the project's promise."""
_TEMPLATE = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["train"]}]}}
_NODES_PER_RACK, _WORKERS_PER_NODE = 25, 8


@dataclass
class Server:
    """Just enough of an API server for jobs that are alone with their operator: it stores, merges and
    counts.
    """

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    pod_created: Callable[[dict[str, Any]], None] = lambda pod: None
    pod_deleted: Callable[[str], None] = lambda name: None
    version: int = 0
    may_write: bool = True

    async def find(self, where: ApiResource, namespace: str | None, name: str) -> dict[str, Any] | None:
        self.calls.append(f"GET {where.plural}")
        return self.objects.get(where.path(namespace, name))

    async def list(self, where: ApiResource, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Returns no object: none is another's, which is all that is listed."""
        self.calls.append(f"LIST {where.plural}")
        return []

    async def create(self, where: ApiResource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append(f"POST {where.plural}")
        key = f"{where.path(namespace).partition('?')[0]}/{body['metadata']['name']}"
        if key in self.objects:
            raise ApiFailure(409, "exists")
        made = self._stored(key, copy.deepcopy(dict(body)))
        if "/pods/" in key:
            self.pod_created(made)
        return made

    async def create_or_find(
        self, where: ApiResource, namespace: str, body: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        try:
            await self.create(where, namespace, body)
        except ApiFailure:
            return await self.find(where, namespace, body["metadata"]["name"])
        return None

    async def replace(self, where: ApiResource, namespace: str, name: str, body: Any) -> dict[str, Any]:
        self.calls.append(f"PUT {where.plural}")
        return self._stored(where.path(namespace, name), dict(body))

    async def patch(
        self, where: ApiResource, namespace: str, name: str, body: Any, subresource: str = ""
    ) -> dict[str, Any]:
        self.calls.append(f"PATCH {where.plural}")
        key = where.path(namespace, name)
        known = self.objects[key]
        if "status" not in body:
            return self._stored(key, merge(known, body))
        if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise ApiFailure(409, "conflict")
        return self._stored(key, {**known, "status": merge(known.get("status") or {}, body["status"])})

    async def delete(self, where: ApiResource, namespace: str, name: str, **_: object) -> bool:
        self.calls.append(f"DELETE {where.plural}")
        if where.plural == "pods":
            self.pod_deleted(name)
        return self.objects.pop(where.path(namespace, name), None) is not None or where.plural == "pods"

    def _stored(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.objects[key] = {
            **body,
            "metadata": {
                "uid": f"{zlib.crc32(key.encode()):08x}-{self.version}",
                **body["metadata"],
                "resourceVersion": str(self.version),
            },
        }
        return self.objects[key]


class Sidecars:
    """All sidecars of one job, in place of the client that listens to them. They do at once what they are
    told."""

    def __init__(self, job: BenchJob) -> None:
        self._job = job
        self.reports: dict[str, WorkerReport] = {}

    def follow(self, hosts: Mapping[str, str], keep: Collection[str] = ()) -> None:
        for uid in hosts:
            if uid not in self.reports:
                self._hear(uid, self._job.first_report(uid))
        for uid in self.reports.keys() - hosts.keys() - {*keep}:
            del self.reports[uid]

    def want_holdings(self, wanted: bool) -> None:
        """They always tell."""

    def probe(self, uid: str) -> None:
        known = self.reports[uid].report
        assert known is not None
        self._hear(uid, known)

    async def push(self, uid: str, directive: Directive) -> None:
        self.change(uid, **self._job.obey(uid, directive))

    def change(self, uid: str, **changes: Any) -> None:
        known = self.reports[uid].report
        assert known is not None
        self._hear(uid, replace(known, serial=known.serial + 1, **changes))

    async def close(self) -> None:
        self.reports = {}

    def _hear(self, uid: str, report: Report) -> None:
        self.reports[uid] = WorkerReport(report, self._job.now(), None)


class BenchJob:
    """One job, with its pods and sidecars, and its real loop, which is asked to look by hand."""

    def __init__(
        self, name: str, workers: int, server: Server, nodes: Mapping[str, NodeView], metrics: Metrics
    ) -> None:
        self.workers, self._server, self._nodes = workers, server, list(nodes)
        self._clock = 1_800_000_000.0
        self.pods: dict[str, PodView] = {}
        key = f"/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs/{name}"
        raw = {
            "apiVersion": "tiercheck.io/v1alpha1",
            "kind": "TierCheckJob",
            "metadata": {"name": name, "namespace": "default", "generation": 1},
            "spec": {"workers": workers, "template": _TEMPLATE, "tiers": {"peer": {"copies": 1}}},
        }
        self.key, self.sidecars = key, Sidecars(self)
        around = ReconcilerContext(
            lambda *_: list(self.pods.values()),
            lambda: nodes,
            cast(Kube, server),
            Config(progress_seconds=0.0),
            metrics,
            clock=self.now,
            sidecars=lambda *_, **__: cast(Any, self.sidecars),
        )
        self.loop = JobLoop(server._stored(key, raw), around)

    def now(self) -> float:
        self._clock += 1e-6
        return self._clock

    def later(self, seconds: float) -> None:
        self._clock += seconds

    def later_in_the_same_minute(self, seconds: float) -> None:
        """What a job owns is read again once a minute, which no event costs."""
        self.later(seconds)
        self.loop._read_at = self.now()

    def pod_created(self, raw: dict[str, Any]) -> None:
        """Scheduled and up at once."""
        pod = parse_pod(raw)
        assert pod is not None
        number = len(self.pods)
        node = self._nodes[(pod.worker // _WORKERS_PER_NODE) % len(self._nodes)]
        address = f"10.{number >> 16}.{(number >> 8) & 255}.{number & 255}"
        up = replace(pod.sidecar, state=ContainerState.UP)
        self.pods[pod.name] = replace(pod, node=node, ip=address, phase="Running", sidecar=up)

    def first_report(self, uid: str) -> Report:
        return Report(
            job_uid=self.loop.uid, worker=next(pod.worker for pod in self.pods.values() if pod.uid == uid),
            pod_uid=uid, instance="i", serial=1, attempt=0,
            revision="", phase=None,
            restore=RestoreReport(RestoreState.IDLE, None), trainer=TrainerReport(TrainerState.WAITING),
            holdings=(),
            remote=RemoteReport(False, None), watermarks=Watermarks(), memory=MemoryReport(1 << 30, 0, 0),
        )  # fmt: skip

    def obey(self, uid: str, directive: Directive) -> dict[str, Any]:
        """Restores at once, trains at once, and holds a version of its own and of those that it keeps copies
        of."""
        trainer = TrainerReport(TrainerState.WAITING)
        if directive.phase is Phase.RELEASE:
            now = self.now()
            trainer = TrainerReport(
                TrainerState.RUNNING, started_at=now, first_step_at=now, step=10, step_seconds=1.0
            )
        held = Version(5, 1)
        holdings = [Holding(directive.worker, held, Tier.LOCAL, 1 << 20)]
        holdings += [Holding(peer.worker, held, Tier.PEER, 1 << 20) for peer in directive.hosted]
        return {
            "attempt": directive.attempt, "revision": directive.revision, "phase": directive.phase,
            "trainer": trainer,
            "restore": RestoreReport(
                RestoreState.READY, directive.restore.version if directive.restore else None
            ),
            "holdings": tuple(holdings),
            "watermarks": Watermarks(held, held, None, held), "snapshot_every": 5,
        }  # fmt: skip

    @property
    def object(self) -> dict[str, Any]:
        return self._server.objects[self.key]

    async def look(self) -> None:
        """One reconcile."""
        await self.loop._reconcile()

    async def until_running(self, limit: int = 40) -> None:
        for _ in range(limit):
            status = self.object.get("status") or {}
            if status.get("phase") == "Running" and not status.get("recovery"):
                return
            self.later(0.1)
            await self.look()
        raise AssertionError(f"{self.key} does not run: {json.dumps(self.object.get('status'))[:2000]}")

    def uid_of(self, worker: int) -> str:
        return next(pod.uid for pod in self.pods.values() if pod.worker == worker)


def ground(workers: int) -> dict[str, NodeView]:
    nodes = max(2, -(-workers // _WORKERS_PER_NODE))
    racks = max(2, nodes // _NODES_PER_RACK)
    return {
        f"node-{number}": NodeView(
            f"node-{number}",
            {
                "kubernetes.io/hostname": f"node-{number}",
                "topology.kubernetes.io/rack": f"rack-{number % racks}",
            },
        )
        for number in range(nodes)
    }


async def _event(job: BenchJob, server: Server, happen: Callable[[int], None]) -> tuple[float, float]:
    """Median processor seconds, and calls to the API server, of `EVENTS` events."""
    seconds, calls = [], []
    for number in range(EVENTS):
        job.later_in_the_same_minute(1.0)
        happen(number)
        server.calls.clear()
        began = time.process_time()
        await job.look()
        seconds.append(time.process_time() - began)
        calls.append(len(server.calls))
    return sorted(seconds)[len(seconds) // 2], max(calls)


async def of_workers(workers: int) -> dict[str, float]:
    """A job of that many workers: what a heartbeat, a pod event and a recovery cost."""
    server = Server()
    job = BenchJob("job", workers, server, ground(workers), Metrics())
    server.pod_created = job.pod_created
    began = time.process_time()
    await job.until_running()
    started = time.process_time() - began

    def step(number: int) -> None:
        uid = job.uid_of(number % workers)
        trainer = replace(job.sidecars.reports[uid].report.trainer, step=11 + number)  # type: ignore[union-attr]
        job.sidecars.change(uid, trainer=trainer)

    def touched(number: int) -> None:
        name, pod = next(iter(job.pods.items()))
        job.pods[name] = replace(pod, resource_version=str(number))

    heartbeat, heartbeat_calls = await _event(job, server, step)
    pod, pod_calls = await _event(job, server, touched)
    attempt = job.object["status"]["attempt"]
    failed = TrainerReport(TrainerState.FAILED, 1, "Crashed", ended_at=job.now())
    job.sidecars.change(job.uid_of(1), trainer=failed)
    server.calls.clear()
    began = time.process_time()
    looks = 0
    while job.object["status"]["attempt"] == attempt or job.object["status"].get("recovery"):
        job.later(0.5)
        for uid in list(job.sidecars.reports):
            job.sidecars.probe(uid)
        await job.look()
        looks += 1
        if looks > 50:
            raise AssertionError(f"no recovery: {job.object['status']}")
    return {
        "start, CPU s": started,
        "heartbeat, CPU ms": 1000 * heartbeat,
        "heartbeat, API calls": heartbeat_calls,
        "pod event, CPU ms": 1000 * pod,
        "pod event, API calls": pod_calls,
        "recovery, CPU s": time.process_time() - began,
        "recovery, API calls": len(server.calls),
        "recovery, reconciles": looks,
        "object, bytes": len(json.dumps({**job.object, "spec": {}}, separators=(",", ":"))),
    }


async def of_jobs(jobs: int, events: int = EVENTS_OF_ALL) -> dict[str, float]:
    """That many jobs of a few workers each: what an event of one costs beside the others; `events` of all."""
    server, metrics = Server(), Metrics()
    nodes = ground(jobs * WORKERS_OF_MANY)
    made: dict[str, BenchJob] = {}
    server.pod_created = lambda raw: made[raw["metadata"]["labels"]["tiercheck.io/job"]].pod_created(raw)
    began = time.process_time()
    for number in range(jobs):
        name = f"job-{number}"
        made[name] = BenchJob(name, WORKERS_OF_MANY, server, nodes, metrics)
        await made[name].until_running()
    started = time.process_time() - began
    server.calls.clear()
    rounds = max(1, events // jobs)
    began = time.process_time()
    for turn in range(rounds):
        for job in made.values():
            job.later_in_the_same_minute(1.0)
            uid = job.uid_of(turn % WORKERS_OF_MANY)
            trainer = dataclasses.replace(job.sidecars.reports[uid].report.trainer, step=11 + turn)  # type: ignore[union-attr]
            job.sidecars.change(uid, trainer=trainer)
            await job.look()
    spent = time.process_time() - began
    return {
        "start of a job, CPU ms": 1000 * started / jobs,
        "event, CPU ms": 1000 * spent / (rounds * jobs),
        "event, API calls": len(server.calls) / (rounds * jobs),
    }


def run(scale: Scale) -> Outcome:
    """Calls to the API server must not grow with workers; processor time only as the workers themselves, and
    not with other jobs. Garbage is collected as in the operator."""
    prepare_process()
    asyncio.run(of_workers(4))  # first calls of everything
    sizes, crowds = ((4, 64), (1, 20)) if scale.quick else (WORKERS, JOBS)
    workers = {str(number): asyncio.run(of_workers(number)) for number in sizes}
    jobs = {str(number): asyncio.run(of_jobs(number)) for number in crowds}
    few, middle, many = next(iter(workers)), list(workers)[len(workers) // 2], list(workers)[-1]
    one, most = next(iter(jobs)), list(jobs)[-1]
    rows = [
        Figure(
            f"calls to the API server for a {event}, {many} workers against {few}",
            f"{workers[many][f'{event}, API calls']:.0f}",
            f"{workers[few][f'{event}, API calls']:.0f}",
            workers[many][f"{event}, API calls"] / max(1, workers[few][f"{event}, API calls"]),
            1.0,
        )
        for event in ("heartbeat", "pod event", "recovery")
    ]
    per_worker = {count: workers[count]["heartbeat, CPU ms"] / int(count) for count in workers}
    rows += [
        Figure(
            f"processor time of a heartbeat per worker, {many} workers against {middle}",
            f"{workers[many]['heartbeat, CPU ms']:.1f} ms in all",
            f"{workers[middle]['heartbeat, CPU ms']:.1f} ms in all",
            per_worker[many] / per_worker[middle],
            1.5,
        ),
        Figure(
            f"processor time of an event of one job, {most} jobs against {one}",
            f"{jobs[most]['event, CPU ms']:.2f} ms",
            f"{jobs[one]['event, CPU ms']:.2f} ms",
            jobs[most]["event, CPU ms"] / jobs[one]["event, CPU ms"],
            1.5,
            note=f"jobs of {WORKERS_OF_MANY} workers",
        ),
        Figure(
            f"object of a job of {many} workers, without its spec",
            f"{workers[many]['object, bytes']} bytes",
            f"{LIMIT} bytes",
            workers[many]["object, bytes"] / LIMIT,
            1.0,
        ),
    ]
    return Outcome(rows, {"workers": workers, "jobs": jobs})
