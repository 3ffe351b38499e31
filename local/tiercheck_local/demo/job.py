"""The objects that the demonstration applies: what a user would write, filled in for a laptop."""

from __future__ import annotations

from typing import Any

from tiercheck_local.demo.object_store import ACCESS_KEY, REGION, SECRET_KEY

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
