"""Pods in their node's network: ports of their own, because all pods of a node have one address there.

They are declared, so the scheduler keeps pods apart that happen to have the same. Workers of one job never do, as far as they fit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

_FIRST, _EACH, _PLACES = 12000, 3, 2666
"""Below the ports of rendezvous (20000), of NodePorts (30000) and of outgoing connections (32768)."""
_LIVES = 101
"""Places between a pod and the next one of the same worker, which may meet the old one on the same node."""
_SPARES = 1333


def worker_ports(job_uid: str, worker: int, incarnation: int = 0) -> int:
    """The first of a worker's ports."""
    return _place(job_uid, worker + _LIVES * incarnation)


def spare_ports(job_uid: str, number: int) -> int:
    """The first of a spare's ports."""
    return _place(job_uid, _SPARES + number)


def resolve_cluster_names(spec: dict[str, Any]) -> None:
    """A pod in the host's network has the node's DNS unless it asks for the cluster's, where services of S3 may be."""
    if is_on_host(spec):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")


def is_on_host(spec: Mapping[str, Any]) -> bool:
    return bool(spec.get("hostNetwork"))


def _place(job_uid: str, number: int) -> int:
    return _FIRST + _EACH * ((zlib.crc32(job_uid.encode()) + number) % _PLACES)
