"""The objects that the demonstration applies: what a user would write, filled in for a laptop."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiercheck_local.addresses import free_ports
from tiercheck_local.controlplane import lifetime
from tiercheck_local.controlplane.planes import wait_until

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
        process = self._process = lifetime.start(command, self._log)
        wait_until(self._answers, process, self._log, "the local S3 server", seconds=90.0)
        self.client().create_bucket(Bucket=self.bucket)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            lifetime.stop(self._process)

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


NAMESPACE = "default"
NAME = "gpt"
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


def job(command: list[str], endpoint: str, bucket: str) -> dict[str, Any]:
    """The TierCheckJob: four workers, a delta of every step, one copy in another rack, S3 behind them."""
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "workers": WORKERS,
            "template": {
                "spec": {
                    "terminationGracePeriodSeconds": 5,
                    "containers": [{"name": "trainer", "image": "example-trainer", "command": command}],
                }
            },
            "topology": {
                "levels": [
                    {"name": "rack", "label": "topology.kubernetes.io/rack"},
                    {"name": "host", "label": "kubernetes.io/hostname"},
                ]
            },
            "tiers": {
                "local": {"sizeLimit": "512Mi"},
                "peer": {"copies": 1, "spread": {"level": "rack", "mode": "Preferred"}},
                "remote": {
                    "s3": {
                        "bucket": bucket,
                        "prefix": "checkpoints",
                        "region": REGION,
                        "endpoint": endpoint,
                        "credentialsSecretName": CREDENTIALS,
                    },
                    "everySteps": REMOTE_EVERY,
                    "keep": 3,
                },
            },
            "restore": {"proveSteps": 1},
            "failurePolicy": {"maxRestarts": 5},
        },
    }
