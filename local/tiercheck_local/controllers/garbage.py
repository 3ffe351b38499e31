"""Deletes what has lost its owner, and pods that no node will ever remove.

Dependents are Pods, Services, Secrets, ConfigMaps, PodDisruptionBudgets and Leases. An owner's kind is
watched from when the first dependent names it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from tiercheck_local.client import Cache, Client, WokenController
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

log = logging.getLogger(__name__)

DEPENDENTS = (PODS, SERVICES, SECRETS, CONFIG_MAPS, DISRUPTION_BUDGETS, LEASES)
_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"


class GarbageCollector(WokenController):
    """`dependents`: what may be collected, by kind. Watches of owners become tasks of `tasks`."""

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
        await self._finish_deletions()

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
        if cache is None:  # a kind that the server does not know, perhaps not yet: not ours to judge
            return True
        if not cache.synced:
            return True  # its first list wakes us
        owner = cache.objects.get(reference["uid"])
        if owner is not None:
            waits = owner["metadata"].get("deletionTimestamp") and _FOREGROUND in owner["metadata"].get(
                "finalizers", []
            )
            return not waits
        # The dependent may be newer than what the owners' watch has shown: only the server knows.
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

    async def _finish_deletions(self) -> None:
        """Owners deleted in the foreground go after the last dependent; orphaning ones let theirs go."""
        for cache in list(self._owners.values()):
            for owner in list(cache.objects.values()) if cache is not None else []:
                finalizers = owner["metadata"].get("finalizers") or []
                if not owner["metadata"].get("deletionTimestamp") or not {_FOREGROUND, _ORPHAN} & set(
                    finalizers
                ):
                    continue
                uid = owner["metadata"]["uid"]
                left = [
                    (r, item)
                    for r, item in self._owned()
                    if uid in {o["uid"] for o in item["metadata"]["ownerReferences"]}
                ]
                if _ORPHAN in finalizers:
                    for resource, item in left:
                        owners = [o for o in item["metadata"]["ownerReferences"] if o["uid"] != uid]
                        await self._client.patch_as_read(
                            resource, item, {"metadata": {"ownerReferences": owners}}
                        )
                elif left:
                    continue
                assert cache is not None
                kept = [name for name in finalizers if name not in {_FOREGROUND, _ORPHAN}]
                await self._client.patch_as_read(cache.resource, owner, {"metadata": {"finalizers": kept}})

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
