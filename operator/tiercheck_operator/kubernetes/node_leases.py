"""Tells when a kubelet was last heard of, by its node's lease.

A kubelet that was away, as when the API server was, renews its lease at once and takes pods only after its
own back-off. Leases are read of nodes that do not take a pod, and of no others.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.model.status import parse_time

_LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"


class NodeLeases:
    """Of one cluster. Times are unix seconds by the operator's clock."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._seen: dict[str, tuple[str, float]] = {}

    async def heard(self, nodes: Iterable[str], now: float) -> dict[str, float]:
        """When each was heard of last; without those whose lease cannot be read."""
        found: dict[str, float] = {}
        for node in nodes:
            try:
                raw = await self._kube.get(_LEASE, name=node)
            except ApiFailure:
                continue
            renewed = str(((raw or {}).get("spec") or {}).get("renewTime") or "")
            before = self._seen.get(node)
            if before is None:  # by the node's clock, until it is seen to change
                self._seen[node] = (renewed, min(parse_time(renewed) or 0.0, now))
            elif before[0] != renewed:
                self._seen[node] = (renewed, now)
            if renewed:
                found[node] = self._seen[node][1]
        return found
