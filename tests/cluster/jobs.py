"""Jobs on a laptop cluster, and what their sidecars hold."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercheck.protocol import names
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.job import ObjectStore, in_bucket, job_manifest
from tiercheck_local.stage import LaptopStage, condition_is, find_condition, tier_step
from tiercheck_operator.kubernetes.api_server import (
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    PODS,
    SECRETS,
    SERVICES,
    Object,
)

TRAINER = Path(__file__).with_name("trainer.py")
PATIENCE = 90.0
"""Seconds; how long something may take on a slow machine before a test gives up. Nothing is measured against
it."""
OPERATOR_ENV = {
    "TIERCHECK_SETTLE_SECONDS": "0.5",
    "TIERCHECK_SUSPECT_SECONDS": "8",
    "TIERCHECK_RETRY_SECONDS": "2",
    "TIERCHECK_GROW_SECONDS": "1",
}
"""As impatient as the laptop cluster is: it gives a silent node 4 s, where Kubernetes gives 40."""
PREPARE_LATE = {"TIERCHECK_WARM_AFTER_SECONDS": "600"}
"""An interpreter for the next attempt is made when one is needed: to import torch costs as much as all else
that a test does."""


class Job(LaptopStage):
    """One TierCheckJob in the cluster."""

    def __init__(self, cluster: LocalCluster, name: str, workers: int) -> None:
        super().__init__(cluster, name)
        self.workers = workers

    def wait(
        self, what: str, condition: Callable[[Mapping[str, Any]], object], seconds: float = PATIENCE
    ) -> Mapping[str, Any]:
        return super().wait(f"{self.name}: {what}", condition, seconds)

    def hit(self, fault: str, worker: int = 1) -> Mapping[str, Any]:
        """The lastRecovery that follows, of any attempt newer than that of now."""
        before = self.attempt
        self.inject_fault(fault, worker)
        return self.wait_recovered(before)

    def wait_trained(self, step: int, tier: str = "peer") -> Mapping[str, Any]:
        """Running, `step` reached, and `tier` complete at some version of the current attempt's making or
        earlier."""
        return self.wait(
            f"step {step} and a version complete in {tier}",
            lambda status: (
                condition_is(status, "Running")
                and not status.get("recovery")
                and progress(status) >= step
                and tier_step(status, tier)
            ),
        )

    def wait_recovering(self, after: int) -> None:
        """A recovery has begun since attempt `after`."""
        self.wait("the recovery to begin", lambda status: status.get("recovery") or status["attempt"] > after)

    def wait_recovered(self, after: int) -> Mapping[str, Any]:
        """The lastRecovery of an attempt newer than `after`."""
        status = self.wait(
            f"a recovery after attempt {after}",
            lambda status: (
                status.get("attempt", 0) > after
                and not status.get("recovery")
                and (status.get("lastRecovery") or {}).get("attempt") == status["attempt"]
            ),
        )
        recovery: Mapping[str, Any] = status["lastRecovery"]
        return recovery

    def wait_condition(self, kind: str, value: str = "True", reason: str | None = None) -> Mapping[str, Any]:
        """The condition itself."""

        def found(status: Mapping[str, Any]) -> bool:
            here = find_condition(status, kind)
            return here.get("status") == value and reason in (None, here["reason"])

        return find_condition(self.wait(f"{kind}={value} ({reason or 'any reason'})", found), kind)

    def uids(self) -> dict[int, str]:
        """UID of each worker's newest pod."""
        return {worker: self.pod(worker)["metadata"]["uid"] for worker in range(self.workers)}

    def on_node(self, node: str) -> list[str]:
        """Names of the pods there that are not being deleted."""
        return [pod["metadata"]["name"] for pod in self.living_pods() if pod["spec"].get("nodeName") == node]

    def printed(self) -> list[dict[str, Any]]:
        """Every JSON line of every trainer of the job, pod by pod."""
        lines = []
        for path in self.log_files():
            for line in path.read_text().splitlines():
                if line.startswith('{"'):  # frameworks print dicts of their own
                    lines.append(json.loads(line))
        return lines

    def log_files(self) -> Iterator[Path]:
        yield from sorted(self.cluster.logs.glob(f"{self.name}-*/trainer.log"))

    def last_words(self) -> dict[int, tuple[int, str]]:
        """Per rank: how many steps it trained in all, and the digest of its state."""
        return {line["rank"]: (line["steps"], line["digest"]) for line in self.printed() if "digest" in line}

    def told(self) -> list[str]:
        """The reasons of the job's Events."""
        events = self.cluster.api.list(EVENTS, "default")
        return [each["reason"] for each in events if each["involvedObject"].get("name") == self.name]

    def belongings(self) -> list[str]:
        """Everything in the namespace that carries the job's label."""
        found = []
        for resource in (PODS, SERVICES, SECRETS, CONFIG_MAPS):
            for thing in self.cluster.api.list(resource, "default", f"{names.LABEL_JOB}={self.name}"):
                found.append(f"{resource.plural}/{thing['metadata']['name']}")
        return found


def progress(status: Mapping[str, Any]) -> int:
    """The newest step that the status tells of."""
    return int((status.get("progress") or {}).get("step", 0))


@contextmanager
def cordoned(cluster: LocalCluster, *others: str) -> Iterator[None]:
    """Meanwhile no pod goes to any node but to these."""
    nodes = [name for name in cluster.nodes if name not in others]
    try:
        for name in nodes:
            cluster.faults.cordon_node(name)
        yield
    finally:
        for name in nodes:
            cluster.faults.cordon_node(name, cordoned=False)


@dataclass
class Jobs:
    """Makes jobs with names of their own."""

    cluster: LocalCluster
    folder: Path
    made: list[Job] = field(default_factory=list)

    def start(self, workers: int = 2, **how: Any) -> Job:
        """Applies a job; `how` is as `manifest` takes it."""
        return self.apply(self.manifest(workers, **how))

    def start_trained(self, workers: int = 2, **how: Any) -> tuple[Job, Mapping[str, Any]]:
        """The job and its status once it has copies beyond its second snapshot."""
        job = self.start(workers, **how)
        return job, job.wait_trained(13)

    def manifest(
        self,
        workers: int = 2,
        *,
        steps: int = 0,
        pace: float = 0.1,
        env: Mapping[str, str] | None = None,
        command: list[str] | None = None,
        remote_every: int | None = 20,
        bucket: ObjectStore | None = None,
        pod: Mapping[str, Any] | None = None,
        container: Mapping[str, Any] | None = None,
        peer: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> Object:
        """A job that trains `steps` steps (0: until it is hit, and a few more), snapshots every 5, and has
        copies in the other rack and `bucket` or a folder as its remote tier. `spec` overrides the spec, and
        `pod`, `container` and `peer` fields of these."""
        settings = {"STEPS": str(steps), "PACE": str(pace), **PREPARE_LATE, **(env or {})}
        trainer = {
            "name": "trainer",
            "image": "trainer",
            "command": command or [sys.executable, str(TRAINER)],
            "env": [{"name": key, "value": value} for key, value in settings.items()],
            **(container or {}),
        }
        tiers: dict[str, Any] = {"local": {"sizeLimit": "64Mi"}}
        if workers > 1:
            tiers["peer"] = {"copies": 1, "spread": {"level": "rack"}, **(peer or {})}
        if bucket is not None:
            tiers["remote"] = {
                "s3": in_bucket(bucket.bucket, bucket.endpoint, "prod"),
                "everySteps": remote_every,
            }
        elif remote_every is not None:
            remote = self.folder / "remote"
            remote.mkdir(exist_ok=True)
            tiers["remote"] = {
                "directory": {"volume": {"hostPath": {"path": str(remote)}}},
                "everySteps": remote_every,
            }
        pod = {"terminationGracePeriodSeconds": 3, "containers": [trainer], **(pod or {})}
        spec = {"checkpoint": {"snapshot": {"everySteps": 5}}, "tiers": tiers, **spec}
        return job_manifest(f"job-{uuid.uuid4().hex[:6]}", workers, pod, **spec)

    def apply(self, manifest: Object) -> Job:
        self.cluster.apply(manifest)
        job = Job(self.cluster, manifest["metadata"]["name"], manifest["spec"]["workers"])
        self.made.append(job)
        return job

    def restart_operator(self) -> None:
        self.cluster.start_operator(OPERATOR_ENV)

    def clean_up(self) -> None:
        for job in self.made:
            self.cluster.api.delete(JOBS, "default", job.name)
        for job in self.made:
            self.cluster.wait_for(lambda job=job: not job.belongings(), PATIENCE, f"{job.name} to be gone")


def page(address: str, path: str) -> str:
    """Empty if nobody answers there, or not with 200."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return ""


@dataclass(frozen=True)
class Replica:
    name: str
    process: subprocess.Popen[bytes]
    address: str

    def page(self, path: str) -> str:
        return page(self.address, path)

    @property
    def leads(self) -> bool:
        """By its own word; a stopped process says nothing."""
        return "\ntiercheck_leader 1.0" in self.page("/metrics")


@dataclass
class Replicas:
    """Use `leader` and `other` while all of them run."""

    cluster: LocalCluster
    env: Mapping[str, str]
    running: list[Replica] = field(default_factory=list)
    _made: int = 0

    def start(self) -> Replica:
        """Returns when it is ready to take over."""
        self._made += 1
        name = f"replica-{self._made}"
        process = self.cluster.start_operator({**self.env, "TIERCHECK_IDENTITY": name}, name)
        replica = Replica(name, process, self.cluster.metrics_address)
        self.running.append(replica)
        self.cluster.wait_for(lambda: replica.page("/readyz"), PATIENCE, f"{name} to be ready")
        return replica

    def leader(self) -> Replica:
        def one() -> Replica | None:
            leading = [replica for replica in self.running if replica.leads]
            assert len(leading) <= 1, "two lead"
            return leading[0] if leading else None

        return self.cluster.wait_for(one, PATIENCE, "one to lead")

    def other(self, than: Replica) -> Replica:
        (found,) = [replica for replica in self.running if replica is not than]
        return found

    def kill(self, replica: Replica) -> None:
        replica.process.kill()
        replica.process.wait()
        self.running.remove(replica)

    def stop(self) -> None:
        for replica in self.running:
            replica.process.send_signal(signal.SIGCONT)
            replica.process.terminate()
        for replica in self.running:
            replica.process.wait(30)
        self.running.clear()
