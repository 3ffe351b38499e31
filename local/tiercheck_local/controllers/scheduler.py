"""Binds pods that have no node, whenever a pod or a node changes."""

from __future__ import annotations

import logging

from tiercheck_cli.api_server import PODS, Object
from tiercheck_local import clock
from tiercheck_local.client import Cache, Client, WokenController, attempt
from tiercheck_local.controllers.scheduling import Nowhere, choose, is_finished

log = logging.getLogger(__name__)

NAME = "default-scheduler"


class Scheduler(WokenController):
    """To be woken after every change."""

    def __init__(self, client: Client, pods: Cache, nodes: Cache) -> None:
        super().__init__(client, [pods, nodes])
        self._pods, self._nodes = pods, nodes
        self._assumed: dict[str, str] = {}
        """Bound by us, not yet seen so: counted, or two pods would take the last place."""

    async def work(self) -> None:
        known = self._pods.objects
        self._assumed = {
            uid: node
            for uid, node in self._assumed.items()
            if uid in known and not known[uid]["spec"].get("nodeName")
        }
        waiting = [pod for uid, pod in known.items() if uid not in self._assumed and _waits(pod)]
        for pod in sorted(waiting, key=lambda p: (p["metadata"]["creationTimestamp"], p["metadata"]["name"])):
            await attempt(f"pod {pod['metadata']['name']}", self._schedule(pod))

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
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
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
        change: Object = {"status": {"conditions": [*others, condition]}}
        await self._client.patch_as_read(PODS, pod, change, subresource="status")


def _waits(pod: Object) -> bool:
    spec = pod["spec"]
    return (
        not spec.get("nodeName")
        and not pod["metadata"].get("deletionTimestamp")
        and not spec.get("schedulingGates")
        and spec.get("schedulerName", NAME) == NAME
        and not is_finished(pod)
    )
