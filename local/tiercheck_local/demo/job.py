"""The demo's job, the store behind it, and the failures of its story, in order of size."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiercheck.protocol import names
from tiercheck_local import controlplane
from tiercheck_local.controlplane import wait_until
from tiercheck_local.markers import free_ports
from tiercheck_local.stage import NAMESPACE
from tiercheck_operator.kubernetes.api_server import Object

ACCESS_KEY = "tiercheck-demo"
SECRET_KEY = "tiercheck-demo-secret"
REGION = "us-east-1"


class ObjectStore:
    """`with ObjectStore(log, bucket) as store:` runs the server; `store.endpoint` is its URL."""

    def __init__(self, log: Path, bucket: str) -> None:
        self.bucket = bucket
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        (self._port,) = free_ports(1)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        process = self._process = controlplane.start_child(command, self._log)
        wait_until(self._answers, process, self._log, "the local S3 server", seconds=90.0)
        self.client().create_bucket(Bucket=self.bucket)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            controlplane.stop_child(self._process)

    def client(self) -> Any:
        """A boto3 client of this server."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        return False


WORKERS = 4
CREDENTIALS = "demo-s3-credentials"

REMOTE_EVERY = 20


def credentials() -> dict[str, Any]:
    """The Secret that lets the sidecars write to the bucket."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": CREDENTIALS, "namespace": NAMESPACE},
        "type": "Opaque",
        "stringData": {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
    }


def in_bucket(bucket: str, endpoint: str, prefix: str) -> dict[str, Any]:
    """`spec.tiers.remote.s3` of a job, for a store with those credentials."""
    place = {"bucket": bucket, "prefix": prefix, "region": REGION, "endpoint": endpoint}
    return {**place, "credentialsSecretName": CREDENTIALS}


def job_manifest(name: str, workers: int, pod: Object, tiers: Object, **spec: Any) -> Object:
    """A TierCheckJob whose workers have the pod spec `pod`."""
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"workers": workers, "template": {"spec": pod}, "tiers": tiers, **spec},
    }


@dataclass(frozen=True)
class Play:
    """The story, told once: the job's name, and `spec.recovery.inProcess`."""

    name: str
    title: str
    in_process: str


PLAYS = (
    Play("gpt", "every process starts anew", "Never"),
    Play("gpt-stays", "the other processes stay", "Auto"),
)


def job(play: Play, command: list[str], endpoint: str, bucket: str) -> Object:
    """The TierCheckJob: four workers, a delta of every step, one copy in another rack, S3 behind them."""
    container = {"name": "trainer", "image": "example-trainer", "command": command}
    s3 = in_bucket(bucket, endpoint, play.name)
    tiers = {
        "local": {"sizeLimit": "512Mi"},
        "peer": {"copies": 1, "spread": {"level": "rack", "mode": "Preferred"}},
        "remote": {"s3": s3, "everySteps": REMOTE_EVERY, "keep": 3},
    }
    return job_manifest(
        play.name,
        WORKERS,
        {"terminationGracePeriodSeconds": 5, "containers": [container]},
        tiers,
        topology={
            "levels": [
                {"name": "rack", "label": "topology.kubernetes.io/rack"},
                {"name": "host", "label": "kubernetes.io/hostname"},
            ]
        },
        restore={"proveSteps": 1},
        recovery={"inProcess": play.in_process},
        failurePolicy={"maxRestarts": 5},
    )


@dataclass(frozen=True)
class Failure:
    """One act of the story."""

    name: str
    fault: str
    """As `tiercheck_local.stage.FAULTS` has it."""
    worker: int
    needs_remote: bool = False
    """Wait for a complete remote version first: nothing else will be left."""
    asks_for_parity: bool = False
    """The job is changed before; that takes effect with the recovery."""


FAILURES = (
    Failure("process", "crash", 1),
    Failure("pod", "evict", 2),
    Failure("node", "node", 3),
    Failure("rack", "rack", 0),
    Failure("all", "delete every pod", 0, needs_remote=True, asks_for_parity=True),
    Failure("node, parity", "node", 1),
)
"""The acts, in order of size; the last one under parity, which replaced copies when everything was lost."""
