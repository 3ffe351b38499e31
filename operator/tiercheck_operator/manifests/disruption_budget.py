"""The PodDisruptionBudget of a job. It counts workers only: a spare holds nothing that training needs now.

Unhealthy pods may always be evicted: they are no use to the job, and a node must not be kept by a pod that never comes up.
"""

from __future__ import annotations

from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.manifests import owned
from tiercheck_operator.model.observed import JobView


def build_budget(job: JobView, min_available: int) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owned.metadata(job, owned.budget_name(job)),
        "spec": {
            "minAvailable": min_available,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {names.LABEL_JOB_UID: job.uid},
                "matchExpressions": [{"key": names.LABEL_WORKER, "operator": "Exists"}],
            },
        },
    }
