"""Measures what many workers, and many jobs, cost the operator: directives and memory.

Peak memory is that of the real operator process, beside the laptop's API server and simulated sidecars.
"""

from __future__ import annotations

import asyncio
import base64
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import MIB, ROOT, Figure, Outcome, Scale
from benchmarks.reconcile import ground
from benchmarks.scale_operator.stage import RANKS, Crowd, ask, crowded_job, push
from tiercheck.protocol import names
from tiercheck_local.cluster import LocalCluster
from tiercheck_operator.kubernetes.api_server import NODES, PODS, Object

_JOBS = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/default/{names.PLURAL}"
_DEADLINE = 1800.0
_THREADS = 4
_CALM = 40.0
"""Seconds after which an operator that was started again has heard from everybody."""


class Cluster(LocalCluster):
    """An API server alone. What scheduler and kubelets would do to pods is done by `Kubelets`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, [])

    def start_controllers(self) -> None:
        """Nobody is to say that nodes without a kubelet are gone."""


class Kubelets:
    """Gives every pod a node, an address and a sidecar that answers there, as soon as it is seen."""

    def __init__(self, cluster: Cluster, crowd: Crowd, nodes: int, workers: int, folder: Path) -> None:
        self._cluster, self._crowd, self._nodes, self._workers = cluster, crowd, nodes, workers
        self._folder, self._up = folder, set[str]()

    def look(self) -> None:
        """All pods that are new."""
        new = [pod for pod in self._cluster.pods() if pod["metadata"]["uid"] not in self._up]
        hosts = [self._sidecar(pod) for pod in new]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(self._bring_up, new, range(len(self._up), len(self._up) + len(new)), hosts))
        self._up |= {pod["metadata"]["uid"] for pod in new}

    def _sidecar(self, pod: Object) -> str:
        metadata = pod["metadata"]
        job, uid = metadata["labels"][names.LABEL_JOB], metadata["labels"][names.LABEL_JOB_UID]
        place = self._folder / uid
        if not place.exists():
            place.mkdir()
            path = f"/api/v1/namespaces/default/secrets/{job}-credentials"
            for name, text in self._cluster.api.request("GET", path)["data"].items():
                (place / name).write_bytes(base64.b64decode(text))
        worker = int(metadata["labels"][names.LABEL_WORKER])
        return self._crowd.add(place, uid, metadata["uid"], worker, self._workers)

    def _bring_up(self, pod: Object, number: int, host: str) -> None:
        name, api = pod["metadata"]["name"], self._cluster.api
        target = {"apiVersion": "v1", "kind": "Node", "name": f"node-{number // 8 % self._nodes}"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        api.bind("default", name, binding)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        status = {
            "phase": "Running",
            "podIP": host,
            "podIPs": [{"ip": host}],
            "startTime": now,
            "initContainerStatuses": [_running(names.SIDECAR_CONTAINER, now)],
            "containerStatuses": [_running(names.TRAINER_CONTAINER, now)],
        }
        api.patch(PODS, "default", name, {"status": status}, subresource="status")


def _running(name: str, now: str) -> dict[str, Any]:
    state = {"running": {"startedAt": now}}
    return {
        "name": name, "state": state, "ready": True, "started": True, "restartCount": 0, "image": "i",
        "imageID": "",
    }  # fmt: skip


def measure(jobs: int, workers: int) -> dict[str, float]:
    """MiB of an operator that sees so many jobs begin, and of one that is started beside them all, which is
    ready when it knows all there is."""
    with tempfile.TemporaryDirectory() as name, Cluster(Path(name)) as cluster:
        cluster.apply_crds(ROOT / "crds")
        nodes = ground(jobs * workers)
        for node in nodes.values():
            made = {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": node.name, "labels": dict(node.labels)},
            }
            cluster.api.create(NODES, None, made)
            ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"pods": "1000"}}
            cluster.api.patch(NODES, None, node.name, {"status": ready}, subresource="status")
        (folder := Path(name) / "tls").mkdir()
        crowd = Crowd()
        try:
            kubelets = Kubelets(cluster, crowd, len(nodes), workers, folder)
            first = cluster.start_operator(_PATIENT)
            for number in range(jobs):
                cluster.apply(_job(number, workers))
            _until_running(cluster, kubelets, jobs)
            began = {"peak while they begin, MiB": _peak(first)}
            first.kill()
            first.wait()
            second = cluster.start_operator(_PATIENT)
            cluster.wait_for(lambda: _is_ready(cluster.metrics_address), _DEADLINE, "another operator")
            time.sleep(_CALM)
            return {**began, "peak of another operator, MiB": _peak(second)}
        finally:
            crowd.end()


_PATIENT = {f"TIERCHECK_{name}_SECONDS": "600" for name in ("UNREACHABLE", "SUSPECT", "SILENT", "ISOLATED")}


def _job(number: int, workers: int) -> Object:
    template = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["train"]}]}}
    spec = {"workers": workers, "procsPerWorker": RANKS, "template": template}
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": f"job-{number}", "namespace": "default"},
        "spec": spec,
    }


def _until_running(cluster: Cluster, kubelets: Kubelets, jobs: int) -> None:
    end = time.monotonic() + _DEADLINE
    while sum(1 for _ in _running_jobs(cluster)) < jobs:
        if time.monotonic() > end:
            raise TimeoutError(f"{jobs} jobs do not all run after {_DEADLINE:.0f} s")
        began = time.monotonic()
        kubelets.look()
        time.sleep(max(1.0, 2 * (time.monotonic() - began)))


def _running_jobs(cluster: Cluster) -> Iterator[Mapping[str, Any]]:
    for job in cluster.api.request("GET", _JOBS)["items"]:
        status = job.get("status") or {}
        if status.get("phase") == "Running" and not status.get("recovery"):
            yield job


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=_DEADLINE):
            return True
    except OSError:
        return False


def _peak(process: subprocess.Popen[bytes]) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / MIB for line in lines if line.startswith("VmHWM:"))


WORKERS = (512, 4000)
PUBLISHED = {512: 84.0, 4000: 5700.0}
"""Processor seconds of one round of directives of another size, before sources were told in a table."""
_LIMIT = {512: 1.0, 4000: 10.0}
"""Seconds, as promised."""
_MOST_MEMORY = 200
"""MiB, as promised."""
_TURNS = 3
"""Of telling a restore of another size."""
_IDLE = 65.0
"""Seconds, after which no connection but those of the long polls is left."""


def run(scale: Scale, parts: Collection[str] = (), earlier: Mapping[str, Any] | None = None) -> Outcome:
    """Rows for the sizes that something is promised of; the numbers have all. `parts`: only these are
    measured, and the others are as `earlier`: workers, or jobs and workers of each ("500 x 4")."""
    sizes, idle = ((8, 16), 0.0) if scale.quick else (WORKERS, _IDLE)
    known = earlier if parts and earlier is not None else {}
    found: dict[int, dict[str, Any]] = {int(size): each for size, each in known.get("workers", {}).items()}
    memory: dict[str, dict[str, float]] = {**known.get("memory", {})}
    for workers in sizes:
        if not parts or str(workers) in parts:
            found[workers] = asyncio.run(_of(workers, idle))
    crowds = ((1, 8), (2, 4)) if scale.quick else ((1, 1000), (500, 4))
    for jobs, workers in crowds:
        if not parts or f"{jobs} x {workers}" in parts:
            memory[f"{jobs} x {workers}"] = measure(jobs, workers)
    rows = [_row(workers, found[workers]) for workers in sizes if workers in found]
    for jobs, workers in crowds:
        figures = memory.get(f"{jobs} x {workers}")
        if figures is None:
            continue
        most = max(value for name, value in figures.items() if name.endswith("MiB"))
        crowd = f"{jobs:,} job{'s' if jobs > 1 else ''} of {workers:,} workers"
        rows.append(
            Figure(
                f"peak memory of the operator, {crowd}",
                f"{most:.0f} MiB",
                f"promised: {_MOST_MEMORY} MiB",
                most / _MOST_MEMORY,
                1.0,
            )
        )
    return Outcome(rows, {"workers": {str(number): each for number, each in found.items()}, "memory": memory})


async def _of(workers: int, idle: float) -> dict[str, Any]:
    """The best of several turns."""
    with crowded_job(workers) as job:
        await job.running()
        await asyncio.sleep(idle)
        await job.pause()
        await ask(job)
        turns = [await push(job, number) for number in range(2, 2 + _TURNS)]
        await job.end()
    return {"resized": min(turns, key=lambda turn: turn["telling, s"])}


def _row(workers: int, found: dict[str, Any]) -> Figure:
    resized, limit = found["resized"], _LIMIT.get(workers)
    published = f", before: {PUBLISHED[workers]:,.0f} s" if workers in PUBLISHED else ""
    return Figure(
        f"restore of another size told to {workers:,} workers",
        f"{resized['telling, s']:.2f} s",
        f"promised: {limit:.0f} s{published}" if limit else "",
        resized["telling, s"] / limit if limit else None,
        1.0 if limit else None,
        note=f"{resized['telling, CPU s']:.2f} s of a core, to decide {resized['deciding, CPU s']:.2f} s",
    )
