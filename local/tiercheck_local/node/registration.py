"""Keeps the Node object of an agent, and the Lease that says it is alive."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import uuid
from typing import Any

from tiercheck_cli.api_server import LEASES, NAMESPACES, NODES, Listing, RequestFailed
from tiercheck_local import clock
from tiercheck_local.client import Client
from tiercheck_local.controllers.scheduling import ready_status
from tiercheck_local.node.settings import Settings

LEASE_NAMESPACE = "kube-node-lease"
_LEASE_SECONDS = 0.5
log = logging.getLogger(__name__)


def allocatable(settings: Settings) -> dict[str, str]:
    """Generous where the laptop cannot measure: the pods share the machine anyway."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
    defaults = {
        "cpu": "64",
        "memory": f"{memory}Ki",
        "ephemeral-storage": "100Gi",
        "pods": str(settings.node.pods),
    }
    return {**defaults, **settings.node.resources}


def node_object(settings: Settings, boot_id: str) -> dict[str, Any]:
    """The Node as a kubelet would register it."""
    labels = {
        "kubernetes.io/hostname": settings.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(
            platform.machine(), platform.machine()
        ),
        **settings.node.labels,
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": settings.name, "labels": labels},
        "spec": {},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": settings.address},
                {"type": "Hostname", "address": settings.name},
            ],
            "capacity": allocatable(settings),
            "allocatable": allocatable(settings),
            "conditions": [ready_condition()],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
            "nodeInfo": {
                "machineID": uuid.uuid5(uuid.NAMESPACE_DNS, settings.name).hex,
                "systemUUID": uuid.uuid5(uuid.NAMESPACE_DNS, settings.name).hex,
                "bootID": boot_id,
                "kernelVersion": platform.release(),
                "osImage": f"processes on {socket.gethostname()}",
                "containerRuntimeVersion": "process://1",
                "kubeletVersion": "v0.0.0-tiercheck-local",
                "kubeProxyVersion": "",
                "operatingSystem": "linux",
                "architecture": labels["kubernetes.io/arch"],
            },
        },
    }


def ready_condition() -> dict[str, str]:
    now = clock.timestamp()
    return {
        "type": "Ready",
        "status": "True",
        "reason": "AgentReady",
        "message": "the node's agent is running",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


class Registration:
    """Keeps Node and Lease. `run` never ends by itself."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client, self._settings = client, settings
        self._boot_id = str(uuid.uuid4())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_node())
            group.create_task(self._keep_lease())

    async def register(self) -> None:
        """Create or correct the Node. Raises RequestFailed."""
        wanted = node_object(self._settings, self._boot_id)
        try:
            await self._client.create(NODES, None, wanted)
        except RequestFailed as failure:
            if failure.code != 409:
                raise
            metadata = {"labels": wanted["metadata"]["labels"]}
            await self._client.patch(NODES, None, self._settings.name, {"metadata": metadata})
        # A create may drop the status, as it does for custom resources.
        await self._client.patch(
            NODES, None, self._settings.name, {"status": wanted["status"]}, subresource="status"
        )

    async def _keep_node(self) -> None:
        """The life-cycle controller may have declared this node unknown while its agent was stopped: it
        lives."""
        async for news in self._client.follow(NODES, fields=f"metadata.name={self._settings.name}"):
            if isinstance(news, Listing):
                ready = any(ready_status(node) == "True" for node in news.items)
            else:
                ready = news.kind != "DELETED" and ready_status(news.object) == "True"
            if not ready:
                await self._persist(self.register)

    async def _keep_lease(self) -> None:
        while True:
            await self._persist(self._renew)
            await asyncio.sleep(_LEASE_SECONDS)

    async def _persist(self, work: Any) -> None:
        pause = 0.1
        while True:
            try:
                await work()
                return
            except RequestFailed as failure:
                log.warning("node %s: %s", self._settings.name, failure)
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 2)

    async def _renew(self) -> None:
        renewal = {"spec": {"renewTime": clock.micro_timestamp()}}
        try:
            await self._client.patch(LEASES, LEASE_NAMESPACE, self._settings.name, renewal)
        except RequestFailed as failure:
            if failure.code != 404:
                raise
            await self._create_lease()

    async def _create_lease(self) -> None:
        if await self._client.find(NAMESPACES, None, LEASE_NAMESPACE) is None:
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEASE_NAMESPACE}}
            try:
                await self._client.create(NAMESPACES, None, namespace)
            except RequestFailed as failure:
                if failure.code != 409:  # another node was faster
                    raise
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._settings.name, "namespace": LEASE_NAMESPACE},
            "spec": {
                "holderIdentity": self._settings.name,
                "leaseDurationSeconds": 2,
                "renewTime": clock.micro_timestamp(),
            },
        }
        await self._client.create(LEASES, LEASE_NAMESPACE, lease)
