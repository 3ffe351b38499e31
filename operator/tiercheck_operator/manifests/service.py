"""The headless Service that gives pods DNS names while they are still restoring, hence not-ready addresses too."""

from __future__ import annotations

from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.manifests import owned
from tiercheck_operator.model.observed import JobView


def build_service(job: JobView) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owned.metadata(job, owned.service_name(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_JOB_UID: job.uid},
            "ports": [
                {"name": "control", "port": names.CONTROL_PORT, "targetPort": names.CONTROL_PORT},
                {"name": "exchange", "port": names.EXCHANGE_PORT, "targetPort": names.EXCHANGE_PORT},
                {"name": "metrics", "port": names.METRICS_PORT, "targetPort": names.METRICS_PORT},
            ],
        },
    }
