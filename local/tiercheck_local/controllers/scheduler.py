"""Binds pods that have no node, whenever a pod or a node changes."""

from __future__ import annotations

import asyncio
import logging

from tiercheck_cli.api_server import PODS, Object, RequestFailed
from tiercheck_local import clock
from tiercheck_local.client import Cache, Client
from tiercheck_local.controllers.scheduling import Nowhere, choose, is_finished

log = logging.getLogger(__name__)

NAME = "default-scheduler"


class Scheduler:
    """`wake` after every change; `run` never ends."""

    def __init__(self, client: Client, pods: Cache, nodes: Cache) -> None:
        self._client, self._pods, self._nodes = client, pods, nodes
        self._wake = asyncio.Event()
        self._assumed: dict[str, str] = {}
        """Bound by us, not yet seen so: counted, or two pods would take the last place."""

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._pods.synced and self._nodes.synced:
                await self._schedule_all()

    async def _schedule_all(self) -> None:
        known = self._pods.objects
        self._assumed = {
            uid: node
            for uid, node in self._assumed.items()
            if uid in known and not known[uid]["spec"].get("nodeName")
        }
        waiting = [pod for uid, pod in known.items() if uid not in self._assumed and _waits(pod)]
        for pod in sorted(waiting, key=lambda p: (p["metadata"]["creationTimestamp"], p["metadata"]["name"])):
            try:
                await self._schedule(pod)
            except RequestFailed as failure:
                if failure.code not in {404, 409}:  # deleted or changed meanwhile: the watch will tell
                    log.warning("pod %s: %s", pod["metadata"]["name"], failure)

    async def _schedule(self, pod: Object) -> None:
        metadata = pod["metadata"]
        placed = [
            {**other, "spec": {**other["spec"], "nodeName": self._assumed[uid]}}
            if uid in self._assumed
            else other
            for uid, other in self._pods.objects.items()
        ]
        nodes = sorted(self._nodes.objects.values(), key=lambda node: str(node["metadata"]["name"]))
        choice = choose(pod, nodes, placed)
        if isinstance(choice, Nowhere):
            await self._explain(pod, choice.message)
            return
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": choice.node},
        }
        self._assumed[metadata["uid"]] = choice.node
        try:
            path = PODS.path(metadata["namespace"], metadata["name"], "binding")
            await self._client.request("POST", path, binding)
        except BaseException:
            del self._assumed[metadata["uid"]]
            raise
        log.info("pod %s/%s goes to %s", metadata["namespace"], metadata["name"], choice.node)

    async def _explain(self, pod: Object, message: str) -> None:
        conditions = (pod.get("status") or {}).get("conditions") or []
        before: Object = next((c for c in conditions if c["type"] == "PodScheduled"), {})
        if before.get("message") == message:
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": before.get("lastTransitionTime") or clock.timestamp(),
        }
        others = [c for c in conditions if c["type"] != "PodScheduled"]
        metadata = pod["metadata"]
        await self._client.patch(
            PODS,
            metadata["namespace"],
            metadata["name"],
            {
                "metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
                "status": {"conditions": [*others, condition]},
            },
            subresource="status",
        )


def _waits(pod: Object) -> bool:
    spec = pod["spec"]
    return (
        not spec.get("nodeName")
        and not pod["metadata"].get("deletionTimestamp")
        and not spec.get("schedulingGates")
        and spec.get("schedulerName", NAME) == NAME
        and not is_finished(pod)
    )
