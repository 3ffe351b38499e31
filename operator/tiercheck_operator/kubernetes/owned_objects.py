"""Reads and creates the objects that a job owns, and caches facts about the cluster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tiercheck.protocol import names
from tiercheck_operator.kubernetes.api_server import (
    CONFIG_MAPS,
    DISRUPTION_BUDGETS,
    LEASES,
    NAMESPACES,
    SECRETS,
    SERVICES,
    ApiFailure,
    ApiResource,
    ApiServer,
)
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.manifests import owned
from tiercheck_operator.manifests.pod import Unbuildable, build_pod
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.saved_placement import SavedPlacement, placement_name
from tiercheck_operator.model.status import parse_time
from tiercheck_operator.planning.topology import HOST, levels_of

log = logging.getLogger(__name__)

T = TypeVar("T")


class OwnedObjects:
    """The objects of one job, read by `refresh`. Methods raise ApiFailure, except those for the budget."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.credentials: owned.Credentials | None = None
        self.placement: SavedPlacement | None = None
        self.have_service = False
        self.have_secret = False
        self.budget: int | None = None
        self.budget_problem = ""
        self.rival_budget = ""
        """The sentence about a budget of others that selects the job's pods as well; empty: none is seen."""
        self.have_gang = False
        self.gang_problem = ""

    async def refresh(self, job: JobView) -> None:
        """Reads the existing objects. Known credentials stay: sidecars use them even without the Secret."""
        secret = await self._own(SECRETS, owned.credentials_name(job), job)
        self.have_secret = secret is not None
        self.credentials = _parsed(job, secret, owned.parse_secret) or self.credentials
        self.have_service = await self._own(SERVICES, owned.service_name(job), job) is not None
        saved = await self._own(CONFIG_MAPS, placement_name(job.name), job)
        self.placement = _parsed(job, saved, owned.parse_placement)
        self.gang_problem = ""  # it is tried again
        if job.spec.attach is None:
            await self._refresh_budget(job)

    async def _own(self, resource: ApiResource, name: str, job: JobView) -> dict[str, Any] | None:
        """Returns the object if it is this job's, and not a former job's of the same name."""
        found = await self._kube.find(resource, job.namespace, name)
        return found if found is not None and is_owned_by(found, job) else None

    async def _refresh_budget(self, job: JobView) -> None:
        """Reads the budget. A refusal is no failure, because the job can run without."""
        self.budget, self.budget_problem = None, ""
        try:
            found = await self._kube.find(DISRUPTION_BUDGETS, job.namespace, job.name)
        except ApiFailure as error:
            if not error.refused:
                raise
            self._no_budget(job, f"cannot be read: {error}")
            return
        if found is not None and is_owned_by(found, job):
            wanted = (found.get("spec") or {}).get("minAvailable")
            self.budget = wanted if isinstance(wanted, int) else -1  # a value that is never required
        elif found is not None:
            self._no_budget(job, "is not this job's; remove or rename it")
        self.rival_budget = await self._find_rival(job)

    async def _find_rival(self, job: JobView) -> str:
        """Returns the sentence for `rival_budget`."""
        try:
            labels = build_pod(job, 0, 0, (), "")["metadata"]["labels"]
            others = await self._kube.list(DISRUPTION_BUDGETS, job.namespace, f"!{names.LABEL_JOB_UID}")
        except Unbuildable:  # that is reported, and there are no pods
            return ""
        except ApiFailure as error:
            if not (error.refused or error.not_found):
                raise
            return ""
        selectors = {raw["metadata"]["name"]: (raw.get("spec") or {}).get("selector") for raw in others}
        rivals = [name for name, selector in selectors.items() if _selects(selector, labels)]
        if not rivals:
            return ""
        return (
            f"the PodDisruptionBudget {rivals[0]} selects the job's pods as well, and Kubernetes evicts no "
            "pod that two select, so no node with a worker can be drained. Narrow its selector, remove it, "
            "or set spec.disruptionBudget.mode to Off"
        )

    async def ensure_gang(self, job: JobView) -> None:
        """Creates the PodGroup; a refusal is in `gang_problem` until `refresh`. Raises ApiFailure."""
        if self.gang_problem or job.spec.gang is None:
            return
        kind, name, body = owned.GANGS[job.spec.gang], job.name, owned.build_gang(job)
        try:
            found = await self._kube.create_or_find(pod_groups(job.spec.gang), job.namespace, body)
        except ApiFailure as error:
            if not (error.not_found or error.refused):
                raise
            self.gang_problem = (
                f"the PodGroup {name} is refused: {error}. The operator needs rights to it "
                "(chart: rbac.gangSchedulers)"
            )
            if error.not_found:
                self.gang_problem = (
                    f"spec.gang.scheduler is {job.spec.gang}, and this cluster does not serve "
                    f"{kind.served}. Install that scheduler, or leave spec.gang out"
                )
            return
        if found is not None and not is_owned_by(found, job):
            self.gang_problem = f"the PodGroup {name} is not this job's; if it stays, remove or rename it"
        elif found is None or body["spec"].items() <= (found.get("spec") or {}).items():
            self.have_gang = True
        else:  # of another size, from before a suspension that was not seen to end
            await self.remove_gang(job)

    async def remove_gang(self, job: JobView) -> None:
        if job.spec.gang is not None:
            await self._kube.delete(pod_groups(job.spec.gang), job.namespace, job.name)
        self.have_gang = False

    async def ensure_budget(self, job: JobView, min_available: int) -> None:
        """Writes the budget. Never raises: `budget_problem` has the error; the next `refresh` rereads it."""
        if self.budget_problem:
            return
        body = owned.build_budget(job, min_available)
        try:
            if self.budget is None:
                await self._kube.create(DISRUPTION_BUDGETS, job.namespace, body)
            else:
                spec = {"spec": body["spec"]}
                await self._kube.patch(DISRUPTION_BUDGETS, job.namespace, job.name, spec)
            self.budget = min_available
        except ApiFailure as error:
            if error.refused:
                self._no_budget(job, f"cannot be written: {error}")
            else:
                log.info("%s/%s: PodDisruptionBudget: %s", job.namespace, job.name, error)
                if error.conflict or error.not_found:
                    with contextlib.suppress(ApiFailure):
                        await self._refresh_budget(job)

    async def remove_budget(self, job: JobView) -> None:
        """Deletes the budget. Never raises."""
        try:
            await self._kube.delete(DISRUPTION_BUDGETS, job.namespace, job.name)
            self.budget = None
        except ApiFailure as error:
            log.warning("%s/%s: PodDisruptionBudget was not removed: %s", job.namespace, job.name, error)
            if error.refused:
                self.budget = None

    def _no_budget(self, job: JobView, problem: str) -> None:
        problem = f"the PodDisruptionBudget {job.name} {problem}"
        self.budget_problem = problem[:500]
        log.warning("%s/%s: %s", job.namespace, job.name, problem)

    async def ensure_credentials(self, job: JobView) -> None:
        credentials = self.credentials or issue(job.uid)
        if await self._create(SECRETS, owned.build_secret(job, credentials), job):
            self.credentials, self.have_secret = credentials, True
        else:
            await self.refresh(job)

    async def ensure_service(self, job: JobView) -> None:
        await self._create(SERVICES, owned.build_service(job), job)
        self.have_service = True

    async def save_placement(self, job: JobView, placement: SavedPlacement) -> None:
        body = owned.build_placement(job, placement)
        if not await self._create(CONFIG_MAPS, body, job):
            await self._kube.replace(CONFIG_MAPS, job.namespace, placement_name(job.name), body)
        self.placement = placement

    async def _create(self, resource: ApiResource, body: dict[str, Any], job: JobView) -> bool:
        """Creates an object; False if the job has it already. Raises ApiFailure if it is not this job's.
        Then it disappears with a deleted job of the same name, or a user created it."""
        found = await self._kube.create_or_find(resource, job.namespace, body)
        if found is not None and not is_owned_by(found, job):
            named = f"{body['kind']} {body['metadata']['name']}"
            raise ApiFailure(422, f"{named} is not this job's; if it stays, remove or rename it")
        return found is None


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Returns whether a budget's selector selects a pod. None selects no pod, and an empty one every pod."""
    if selector is None:
        return False
    required = dict(selector.get("matchLabels") or {})
    return required.items() <= labels.items() and all(
        _holds(each.get("operator"), labels.get(each.get("key")), each.get("values") or [])
        for each in selector.get("matchExpressions") or []
    )


def _holds(operator: str, value: str | None, values: Collection[str]) -> bool:
    if operator in ("In", "NotIn"):
        return (value in values) is (operator == "In")
    return (value is not None) is (operator == "Exists")


def pod_groups(scheduler: str) -> ApiResource:
    """Returns the PodGroup resource of a gang scheduler, by its name in the job."""
    kind = owned.GANGS[scheduler]
    return ApiResource(f"{kind.group}/{kind.version}", "podgroups")


def _parsed(job: JobView, raw: dict[str, Any] | None, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Parses an object; None, with a line in the log, if it is invalid."""
    if raw is None:
        return None
    try:
        return parse(raw)
    except ValueError as error:
        named = f"{raw.get('kind')} {raw['metadata'].get('name')}"
        log.error("%s/%s: %s: %s", job.namespace, job.name, named, error)
        return None


def is_owned_by(raw: Mapping[str, Any], job: JobView) -> bool:
    """Returns whether an object is the job's, and not a former job's of the same name or a user's."""
    metadata = raw.get("metadata")
    owners = metadata.get("ownerReferences") if isinstance(metadata, dict) else None
    return any(owner.get("uid") == job.uid for owner in owners or [])


# Objects that the operator creates for itself belong to its Deployment, so that Kubernetes removes them when
# the operator is uninstalled. The reference is set at creation and never changed: to change it, an account
# must be allowed to delete the object.
#
# Clusters that share a bucket are distinguished by the UID of the namespace kube-system, which lives as long
# as its cluster.

DEPLOYMENTS = ApiResource("apps/v1", "deployments")


def belonging(server: ApiServer, namespace: str, name: str) -> dict[str, Any]:
    """Returns metadata that refers to the operator's Deployment; empty: none is seen. Raises ApiFailure."""
    try:
        deployment = server.find(DEPLOYMENTS, namespace, name)
    except ApiFailure as error:
        if not error.refused:
            raise
        deployment = None
    if deployment is None:
        return {}
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    return {"ownerReferences": [{**reference, "uid": deployment["metadata"]["uid"]}]}


class ClusterIdentity:
    """The cluster's UID, read when a pod is first built and then cached."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._uid = ""
        self._warned = False

    async def uid(self) -> str:
        """Returns the UID; empty without the right to read it. Raises ApiFailure if there is no answer."""
        if not self._uid:
            try:
                found = await self._kube.find(NAMESPACES, None, "kube-system") or {}
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


class NodeLeases:
    """The kubelets' leases. Times are unix seconds by the operator's clock."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._seen: dict[str, tuple[str, float]] = {}

    async def renewals(self, nodes: Iterable[str], now: float) -> dict[str, float]:
        """Returns when each node's lease last changed; without nodes that have no readable lease."""
        found: dict[str, float] = {}
        for node in nodes:
            try:
                raw = await self._kube.find(LEASES, "kube-node-lease", node)
            except ApiFailure:
                continue
            renewed = str(((raw or {}).get("spec") or {}).get("renewTime") or "")
            before = self._seen.get(node)
            if before is None:  # by the node's clock until it is seen to change
                self._seen[node] = (renewed, min(parse_time(renewed) or 0.0, now))
            elif before[0] != renewed:
                self._seen[node] = (renewed, now)
            if renewed:
                found[node] = self._seen[node][1]
        return found


_TOPOLOGIES = [
    ApiResource(f"kueue.x-k8s.io/{version}", "topologies", False) for version in ("v1beta2", "v1beta1")
]
"""The versions of the resource, newest first. A server that serves neither answers 404 to both."""


class TopologySource:
    """Finds a job's Kueue Topology. Its levels are immutable in Kueue, so they are cached."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._name = ""
        self._levels: tuple[dict[str, str], ...] = ()

    async def resolve(self, job: JobView) -> JobView:
        """Returns the job with levels, or with `topology_problem` and the host as the only level."""
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
            for topologies in _TOPOLOGIES:
                raw = await self._kube.find(topologies, None, name)
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
