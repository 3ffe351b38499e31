"""What jobs and their pods have to know of the cluster beside its watches, asked for and remembered.

What the operator makes for itself belongs to its Deployment, so that Kubernetes removes it when the operator
is uninstalled. The reference is set when such a thing is made, and never changed: to change one, an account
must be allowed to delete the thing.

Clusters that share a bucket know each other by the UID of the namespace kube-system, which lives as long as
its cluster does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.status import parse_time
from tiercheck_operator.planning.topology import HOST, levels_of

DEPLOYMENT = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}"


def owner_metadata(deployment: Mapping[str, Any] | None) -> dict[str, Any]:
    """To be merged into an object's metadata; nothing without a Deployment, as for one started by hand."""
    if deployment is None:
        return {}
    metadata = deployment["metadata"]
    reference = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {"ownerReferences": [reference]}


log = logging.getLogger(__name__)

_SYSTEM = "/api/v1/namespaces/kube-system"


class ClusterIdentity:
    """Asked for when a pod is made, and remembered."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._uid = ""
        self._warned = False

    async def uid(self) -> str:
        """Empty if this operator may not know it. Raises ApiFailure if the server does not answer."""
        if not self._uid:
            try:
                found = await self._kube.get(_SYSTEM) or {}
            except ApiFailure as error:
                if not error.refused:
                    raise
                if not self._warned:
                    log.warning(
                        "the namespace kube-system cannot be read (%s): a job that is created again under "
                        "its old name has to take over its remote tier explicitly. Give the operator the "
                        "right to get it (deploy/operator.yaml)",
                        error,
                    )
                self._warned, found = True, {}
            self._uid = str((found.get("metadata") or {}).get("uid") or "")
        return self._uid


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


_VERSIONS = ("v1beta2", "v1beta1")
"""Newest first. A server that serves neither answers 404 to both."""
_TOPOLOGY = "/apis/kueue.x-k8s.io/{version}/topologies/{name}"


class TopologySource:
    """Of one job. Levels of a Topology never change (to Kueue immutable), so once found they are kept."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._name = ""
        self._levels: tuple[dict[str, str], ...] = ()

    async def resolve(self, job: JobView) -> JobView:
        """The job with levels, or with `topology_problem` and the host as the only one."""
        name = job.spec.kueue_topology
        if name is None:
            return job
        problem = ""
        if name != self._name or not self._levels:
            self._name = name
            self._levels, problem = await self._find(name)
        if problem:
            host = ({"name": HOST.name, "label": HOST.label},)
            return replace(
                job, spec=replace(job.spec, topology_levels=host, spread_level=None, topology_problem=problem)
            )
        return replace(job, spec=replace(job.spec, topology_levels=self._levels))

    async def _find(self, name: str) -> tuple[tuple[dict[str, str], ...], str]:
        try:
            for version in _VERSIONS:
                raw = await self._kube.get(_TOPOLOGY, version=version, name=name)
                if raw is not None:
                    return levels_of(raw), ""
        except ApiFailure as error:
            if not error.refused:
                raise
            return (), (
                f"the Kueue Topology {name} cannot be read: {error}. Let the operator read it (chart: "
                "rbac.kueueTopologies=true), or name levels in spec.topology.levels"
            )
        except ValueError as error:
            return (
                (),
                f"the Kueue Topology {name} cannot be used: {error}. Mend it, or name levels in "
                "spec.topology.levels",
            )
        return (), (
            f"there is no Kueue Topology {name} (topologies.kueue.x-k8s.io). Create it, or name levels in "
            "spec.topology.levels or a spec.topology.preset"
        )
