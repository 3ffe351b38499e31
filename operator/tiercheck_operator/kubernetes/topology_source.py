"""Puts the levels of the Kueue Topology that a job names into the job's spec."""

from __future__ import annotations

from dataclasses import replace

from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.planning.topology import HOST, levels_of

_VERSIONS = ("v1beta2", "v1beta1")
"""Newest first. A server that serves neither answers 404 to both."""
_PATH = "/apis/kueue.x-k8s.io/{version}/topologies/{name}"


class TopologySource:
    """Of one job. Levels of a Topology never change (Kueue makes them immutable), so once found they are
    kept."""

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
                raw = await self._kube.get(_PATH, version=version, name=name)
                if raw is not None:
                    return levels_of(raw), ""
        except ApiFailure as error:
            if not error.refused:
                raise
            return (), (
                f"the Kueue Topology {name} cannot be read: {error}. Let the operator read it (chart: "
                "rbac.kueueTopologies=true), or "
                "name levels in spec.topology.levels"
            )
        except ValueError as error:
            return (
                (),
                f"the Kueue Topology {name} cannot be used: {error}. Mend it, or name levels in "
                "spec.topology.levels",
            )
        return (), (
            f"there is no Kueue Topology {name} (topologies.kueue.x-k8s.io). Create it, or name levels in "
            "spec.topology.levels or a "
            "spec.topology.preset"
        )
