"""Which image the sidecars of a job are: the one that it began with, so that a new operator changes nothing in running jobs.

All sidecars of an attempt speak the same language that way, and an upgrade of the operator touches no pod. A job gets the operator's
current image when it is suspended and resumed.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.status import JobRecord


def pinned(status: JobRecord, pods: Iterable[PodView], configured: str) -> str:
    """The image in the status; else that of the job's newest pod, which an operator made that could not write it down; else
    the one that the operator was given."""
    if status.sidecar_image:
        return status.sidecar_image
    living = [pod for pod in pods if pod.sidecar_image and not pod.terminal]
    newest = max(living, key=lambda pod: (pod.created, pod.name), default=None)
    return configured if newest is None else newest.sidecar_image
