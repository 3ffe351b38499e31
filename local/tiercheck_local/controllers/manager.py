"""Does what kube-controller-manager does (node life cycle, disruption budgets, garbage collection).

An owner's kind is watched from when the first dependent names it.
`python -m tiercheck_local.controllers.manager` runs all of it in one process, and the scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiercheck_local import controlplane, markers
from tiercheck_local.apiserver.store.selectors import matches_selector
from tiercheck_local.client import Cache, Client, WokenController, attempt
from tiercheck_local.controllers.scheduler import (
    Scheduler,
    is_finished,
    ready_status,
    toleration,
    with_condition,
)
from tiercheck_local.node.agent import LEASE_NAMESPACE
from tiercheck_operator.kubernetes.api_server import (
    CONFIG_MAPS,
    DISRUPTION_BUDGETS,
    LEASES,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    ApiFailure,
    ApiResource,
    Object,
)
from tiercheck_operator.model.status import parse_time, rfc3339

log = logging.getLogger(__name__)

UNREACHABLE = "node.kubernetes.io/unreachable"
NOT_READY = "node.kubernetes.io/not-ready"
"""The taint that the API server puts on every new node."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


# A lease's age is measured from when its last change was seen here, never from its time stamp: clocks may
# differ. If this process itself was held up, every lease gets a new start.
class NodeLifecycle:
    """Declares nodes unreachable after `grace` seconds without a lease renewal. `run` never ends."""

    def __init__(self, client: Client, nodes: Cache, pods: Cache, grace: float) -> None:
        self._client, self._nodes, self._pods, self._grace = client, nodes, pods, grace
        self._renewed: dict[str, tuple[str, float]] = {}

    def lease_changed(self, kind: str, lease: Object) -> None:
        name, renewal = lease["metadata"]["name"], lease["spec"].get("renewTime", "")
        if kind == "DELETED":
            self._renewed.pop(name, None)
        elif self._renewed.get(name, ("", 0.0))[0] != renewal:
            self._renewed[name] = (renewal, time.monotonic())

    async def run(self) -> None:
        tick = self._grace / 8
        looked = time.monotonic()
        while True:
            await asyncio.sleep(tick)
            held_up = time.monotonic() - looked - tick
            looked = time.monotonic()
            if held_up > self._grace / 4:
                self._renewed = {name: (renewal, looked) for name, (renewal, _) in self._renewed.items()}
            for node in list(self._nodes.objects.values()):
                await attempt(f"node {node['metadata']['name']}", self._update_node(node))

    async def _update_node(self, node: Object) -> None:
        name = node["metadata"]["name"]
        _, seen = self._renewed.setdefault(name, ("", time.monotonic()))
        late = time.monotonic() - seen > self._grace
        ready = ready_status(node)
        taints = {taint["key"] for taint in node["spec"].get("taints") or []}
        if late and ready != "Unknown":
            log.warning("node %s has not renewed its lease for %.1f s", name, self._grace)
            await self._declare_unknown(node)
        if late and UNREACHABLE not in taints:
            effects = ("NoSchedule", "NoExecute")
            added = [{"key": UNREACHABLE, "effect": e, "timeAdded": rfc3339(time.time())} for e in effects]
            await self._replace_taints(node, {UNREACHABLE}, added)
        if not late and ready == "True" and taints & {UNREACHABLE, NOT_READY}:
            log.info("node %s is ready", name)
            await self._replace_taints(node, {UNREACHABLE, NOT_READY}, [])
        if late:
            await self._mark_pods_not_ready(name)
        await self._evict(node)

    async def _declare_unknown(self, node: Object) -> None:
        now = rfc3339(time.time())
        unknown = {
            "type": "Ready",
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "the node's agent stopped renewing its lease",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        await self._patch_node(node, {"status": {"conditions": with_condition(node, unknown)}}, "status")

    async def _replace_taints(self, node: Object, gone: set[str], added: list[Object]) -> None:
        kept = [taint for taint in node["spec"].get("taints") or [] if taint["key"] not in gone]
        await self._patch_node(node, {"spec": {"taints": [*kept, *added] or None}})

    async def _patch_node(self, node: Object, patch: dict[str, Any], subresource: str = "") -> None:
        changed = await self._client.patch_as_read(NODES, node, patch, subresource=subresource)
        if changed is not None and changed["metadata"]["uid"] in self._nodes.objects:
            self._nodes.objects[changed["metadata"]["uid"]] = changed
            node.clear()
            node.update(changed)

    async def _mark_pods_not_ready(self, node: str) -> None:
        """Marks the pods of an unreachable node as not ready, as nothing confirms that they still are."""
        for pod in list(self._pods.objects.values()):
            if pod["spec"].get("nodeName") != node or is_finished(pod) or ready_status(pod) != "True":
                continue
            (ready,) = (each for each in pod["status"]["conditions"] if each["type"] == "Ready")
            now = rfc3339(time.time())
            lost = {**ready, "status": "False", "reason": "NodeLost", "lastTransitionTime": now}
            change = {"status": {"conditions": with_condition(pod, lost)}}
            await self._client.patch_as_read(PODS, pod, change, subresource="status")

    async def _evict(self, node: Object) -> None:
        """Deletes pods that a NoExecute taint evicts; if out of service, also forces pending deletions."""
        taints = [taint for taint in node["spec"].get("taints") or [] if taint["effect"] == "NoExecute"]
        if not taints:
            return
        by_force = any(taint["key"] == OUT_OF_SERVICE for taint in taints)
        for pod in list(self._pods.objects.values()):
            if pod["spec"].get("nodeName") != node["metadata"]["name"]:
                continue
            metadata = pod["metadata"]
            if by_force and metadata.get("deletionTimestamp"):
                await self._client.delete_as_read(PODS, pod, grace=0)
            elif (
                not metadata.get("deletionTimestamp")
                and not is_finished(pod)
                and _toleration_expired(pod, taints)
            ):
                log.info("pod %s/%s: its toleration is over", metadata["namespace"], metadata["name"])
                await self._client.delete_as_read(PODS, pod)


def _toleration_expired(pod: Object, taints: list[Mapping[str, Any]]) -> bool:
    for taint in taints:
        found = toleration(pod, taint)
        if found is None:
            return True
        seconds, since = found.get("tolerationSeconds"), parse_time(taint.get("timeAdded"))
        if seconds is not None and since is not None and time.time() - since > seconds:
            return True
    return False


class Disruption(WokenController):
    """Updates budgets with a number as minAvailable; to be woken after every change of a pod or budget."""

    def __init__(self, client: Client, pods: Cache, budgets: Cache) -> None:
        super().__init__(client, [pods, budgets])
        self._pods, self._budgets = pods, budgets

    async def work(self) -> None:
        for budget in list(self._budgets.objects.values()):
            await attempt(f"budget {budget['metadata']['name']}", self._update(budget))

    async def _update(self, budget: Object) -> None:
        wanted = budget_status(budget, list(self._pods.objects.values()))
        known = budget.get("status") or {}
        counts = isinstance((budget.get("spec") or {}).get("minAvailable"), int)
        if counts and any(known.get(key) != value for key, value in wanted.items()):
            await self._client.patch_as_read(
                DISRUPTION_BUDGETS, budget, {"status": wanted}, subresource="status"
            )


def budget_status(budget: Object, pods: list[Object]) -> Object:
    """Returns a budget's status: evictions are allowed while enough Ready pods are left."""
    metadata, spec = budget["metadata"], budget.get("spec") or {}
    covered = [
        pod
        for pod in pods
        if pod["metadata"].get("namespace") == metadata["namespace"]
        and matches_selector(spec.get("selector") or {}, pod["metadata"].get("labels") or {})
        and not is_finished(pod)
    ]
    healthy = sum(
        ready_status(pod) == "True" and not pod["metadata"].get("deletionTimestamp") for pod in covered
    )
    desired = spec.get("minAvailable") or 0
    return {
        "observedGeneration": metadata.get("generation", 0),
        "expectedPods": len(covered),
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "disruptionsAllowed": max(0, healthy - desired),
    }


DEPENDENTS = (PODS, SERVICES, SECRETS, CONFIG_MAPS, DISRUPTION_BUDGETS, LEASES)


class GarbageCollector(WokenController):
    """Deletes objects of `dependents`, by kind, without owner. Watches of owners become tasks of `tasks`."""

    def __init__(
        self, client: Client, tasks: asyncio.TaskGroup, dependents: dict[ApiResource, Cache], nodes: Cache
    ) -> None:
        super().__init__(client, [*dependents.values(), nodes])
        self._tasks, self._caches, self._nodes = tasks, dependents, nodes
        self._owners: dict[tuple[str, str], Cache | None] = {}

    async def work(self) -> None:
        await self._collect_pods()
        for resource, item in list(self._owned()):
            await self._collect(resource, item)

    def _owned(self) -> Iterator[tuple[ApiResource, Object]]:
        for resource, cache in self._caches.items():
            for item in cache.objects.values():
                if item["metadata"].get("ownerReferences"):
                    yield resource, item

    async def _collect(self, resource: ApiResource, item: Object) -> None:
        metadata = item["metadata"]
        if metadata.get("deletionTimestamp"):
            return
        for reference in metadata["ownerReferences"]:
            if await self._lives(reference, metadata.get("namespace")):
                return
        log.info("%s %s/%s has lost its owner", resource.plural, metadata.get("namespace"), metadata["name"])
        await self._client.delete_as_read(resource, item)

    async def _lives(self, reference: Object, namespace: str | None) -> bool:
        cache = await self._owner_cache(reference)
        if cache is None:  # a kind that the server does not serve, perhaps not yet
            return True
        if not cache.synced:
            return True  # its first list wakes this controller
        if reference["uid"] in cache.objects:
            return True
        # The dependent may be newer than what the owners' watch has shown, so the server is asked.
        found = await self._client.find(cache.resource, namespace, reference["name"])
        return found is not None and found["metadata"]["uid"] == reference["uid"]

    async def _owner_cache(self, reference: Object) -> Cache | None:
        key = (reference["apiVersion"], reference["kind"])
        if key not in self._owners or self._owners[key] is None:
            resource = await self._client.find_resource(*key)
            if resource is None:
                self._owners[key] = None
            elif resource in self._caches:
                self._owners[key] = self._caches[resource]
            else:
                cache = Cache(self._client, resource, lambda *_: self.wake(), on_sync=self.wake)
                self._owners[key] = cache
                self._tasks.create_task(self._run_owner_cache(key, cache))
        return self._owners[key]

    async def _run_owner_cache(self, key: tuple[str, str], cache: Cache) -> None:
        try:
            await cache.run()
        except ApiFailure as failure:
            log.warning("owners of kind %s: %s", key, failure)
            self._owners[key] = None

    async def _collect_pods(self) -> None:
        names = {node["metadata"]["name"] for node in self._nodes.objects.values()}
        for pod in list(self._caches[PODS].objects.values()):
            metadata, node = pod["metadata"], pod["spec"].get("nodeName")
            lost = node is not None and node not in names
            never_bound = not node and metadata.get("deletionTimestamp")
            # The watch of nodes may be behind.
            if lost and await self._client.find(NODES, None, node) is not None:
                continue
            if lost or never_bound:
                log.info("pod %s/%s has no node", metadata["namespace"], metadata["name"])
                await self._client.delete_as_read(PODS, pod, grace=0)


async def serve(kubeconfig: Path, grace: float) -> bool:
    """Runs until it is stopped; returns whether that was because its parent process is gone."""
    async with Client.of(kubeconfig) as client:
        return await controlplane.run_until_stopped(_control(client, grace))


async def _control(client: Client, grace: float) -> None:
    async with asyncio.TaskGroup() as tasks:

        def changed(kind: str, item: Object) -> None:
            scheduler.wake()
            disruption.wake()
            if kind != "MODIFIED" or item["metadata"].get("deletionTimestamp"):
                garbage.wake()

        def synced() -> None:
            for controller in (scheduler, garbage, disruption):
                controller.wake()

        def dependent_changed(*_: object) -> None:
            garbage.wake()
            disruption.wake()

        def renewed(kind: str, _: Object) -> None:
            if kind != "MODIFIED":  # as nodes renew theirs all the time
                garbage.wake()

        pods = Cache(client, PODS, changed, on_sync=synced)
        nodes = Cache(client, NODES, changed, on_sync=synced)
        scheduler = Scheduler(client, pods, nodes)
        lifecycle = NodeLifecycle(client, nodes, pods, grace)
        leases = Cache(client, LEASES, lifecycle.lease_changed, namespace=LEASE_NAMESPACE)
        others = {
            kind: Cache(client, kind, renewed if kind == LEASES else dependent_changed, on_sync=synced)
            for kind in DEPENDENTS
            if kind != PODS
        }
        disruption = Disruption(client, pods, others[DISRUPTION_BUDGETS])
        garbage = GarbageCollector(client, tasks, {PODS: pods, **others}, nodes)
        for cache in (pods, nodes, leases, *others.values()):
            tasks.create_task(cache.run())
        for controller in (scheduler, lifecycle, disruption, garbage):
            tasks.create_task(controller.run())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tiercheck_local.controllers.manager", description=__doc__
    )
    parser.add_argument("--kubeconfig", required=True, type=Path)
    parser.add_argument(
        "--grace", type=float, default=2.0, help="seconds without lease until a node is unreachable"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    orphaned = asyncio.run(serve(given.kubeconfig, given.grace))
    if orphaned and markers.CLUSTER in os.environ:
        markers.remove(os.environ[markers.CLUSTER])


if __name__ == "__main__":
    main()
