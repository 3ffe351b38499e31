"""Registers one node, and runs the pods that the API server has for it as processes.

`python -m tiercheck_local.node.agent SETTINGS`
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tiercheck.protocol.encoding import from_json
from tiercheck_local import controlplane, markers
from tiercheck_local.client import Cache, Client, WokenController, attempt
from tiercheck_local.controllers.scheduler import is_finished, ready_status
from tiercheck_local.node.pod import Pod, Settings
from tiercheck_operator.kubernetes.api_server import LEASES, NODES, PODS, ApiFailure
from tiercheck_operator.model.status import parse_time, rfc3339

LEASE_NAMESPACE = "kube-node-lease"
_LEASE_SECONDS = 0.5


def allocatable(settings: Settings) -> dict[str, str]:
    """Returns the node's resources, generous where unmeasured: the pods share the machine anyway."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
    defaults = {
        "cpu": "64",
        "memory": f"{memory}Ki",
        "ephemeral-storage": "100Gi",
        "pods": str(settings.node.pods),
    }
    return {**defaults, **settings.node.resources}


def node_object(settings: Settings) -> dict[str, Any]:
    """Returns the Node as a kubelet would register it."""
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
            "nodeInfo": {
                "kernelVersion": platform.release(),
                "osImage": f"processes on {socket.gethostname()}",
                "containerRuntimeVersion": "process://1",
                "kubeletVersion": "v0.0.0-tiercheck-local",
                "operatingSystem": "linux",
                "architecture": labels["kubernetes.io/arch"],
            },
        },
    }


def ready_condition() -> dict[str, str]:
    now = rfc3339(time.time())
    return {
        "type": "Ready",
        "status": "True",
        "reason": "AgentReady",
        "message": "the node's agent is running",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


class Registration(WokenController):
    """Keeps the Node and Lease objects up to date. `run` never ends by itself."""

    def __init__(self, client: Client, settings: Settings) -> None:
        named = f"metadata.name={settings.name}"
        self._nodes = Cache(client, NODES, lambda *_: self.wake(), on_sync=self.wake, fields=named)
        super().__init__(client, [self._nodes])
        self._settings = settings

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._nodes.run())
            group.create_task(super().run())
            group.create_task(self._keep_lease())

    async def work(self) -> None:
        """Registers the node, again if it was declared Unknown while its agent was stopped."""
        if any(ready_status(node) == "True" for node in self._nodes.objects.values()):
            return
        wanted = node_object(self._settings)
        await self._client.apply(wanted)
        # A create may drop the status, as it does for custom resources.
        await self._client.patch(
            NODES, None, self._settings.name, {"status": wanted["status"]}, subresource="status"
        )

    async def _keep_lease(self) -> None:
        while True:
            await attempt(f"lease of node {self._settings.name}", self._renew())
            await asyncio.sleep(_LEASE_SECONDS)

    async def _renew(self) -> None:
        name, renewed = self._settings.name, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 2, "renewTime": renewed}
        try:
            await self._client.patch(LEASES, LEASE_NAMESPACE, name, {"spec": spec})
        except ApiFailure as failure:
            if not failure.not_found:
                raise
            metadata = {"name": name, "namespace": LEASE_NAMESPACE}
            lease = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata, "spec": spec}
            await self._client.create(LEASES, LEASE_NAMESPACE, lease)


Object = Mapping[str, Any]
log = logging.getLogger(__name__)

LOSE_EVERY_POD = signal.SIGUSR1
"""The signal on which an agent kills all its pods, with their memory, and reports them as failed."""


class Agent:
    """Runs a node until it is stopped or its parent process is gone; then nothing of it is left."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client, self._settings = client, settings
        self._pods: dict[str, Pod] = {}
        self._addresses = self._free_addresses()

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(LOSE_EVERY_POD, self._lose_every_pod)
        self._clear_node()
        try:
            registration = Registration(self._client, self._settings)
            pods = Cache(self._client, PODS, self._see, fields=f"spec.nodeName={self._settings.name}")
            await controlplane.run_until_stopped(registration.run(), pods.run())
        finally:
            self._clear_node()

    def _clear_node(self) -> None:
        """Removes processes and memory: a node that (re)starts or stops has none."""
        markers.kill(markers.POD, markers.place(self._settings.cluster, self._settings.name))
        self._settings.roots.remove_all()

    def _see(self, kind: str, manifest: Object) -> None:
        metadata = manifest["metadata"]
        if kind == "DELETED":
            self._forget(metadata["uid"])
            return
        pod = self._pods.get(metadata["uid"])
        if pod is None:
            if is_finished(manifest) and not metadata.get("deletionTimestamp"):
                return
            on_host = bool(manifest["spec"].get("hostNetwork"))
            ip = self._settings.address if on_host else next(self._addresses)
            pod = Pod(manifest, ip, self._client, self._settings, allocatable(self._settings))
            self._pods[metadata["uid"]] = pod
            if metadata.get("deletionTimestamp"):  # nothing runs here that would have to be stopped
                pod.terminate(0)
                return
            log.info("pod %s/%s starts at %s", pod.namespace, pod.name, pod.ip)
            pod.start()
        pod.seen(manifest)
        if metadata.get("deletionTimestamp"):
            pod.terminate(_grace_left(manifest))

    def _forget(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is not None:
            log.info("pod %s/%s is gone", pod.namespace, pod.name)
            pod.vanish()

    def _lose_every_pod(self) -> None:
        log.warning("every pod of node %s is lost", self._settings.name)
        markers.kill(markers.POD, markers.place(self._settings.cluster, self._settings.name))
        for pod in self._pods.values():
            pod.lose("PodLost", "every process of the pod was killed and its memory is gone")

    def _free_addresses(self) -> Iterator[str]:
        """Yields free addresses in round robin: clients of a dead pod must not reach the next one."""
        for last in itertools.cycle(range(2, 255)):
            address = f"{self._settings.address_prefix}.{last}"
            if all(pod.ip != address for pod in self._pods.values()):
                yield address


def _grace_left(manifest: Object) -> float:
    """Returns the seconds until the deletion's deadline; its time stamp includes the grace period."""
    metadata = manifest["metadata"]
    if not metadata.get("deletionGracePeriodSeconds"):
        return 0.0
    deadline = parse_time(metadata["deletionTimestamp"]) or 0.0
    return max(1.0, deadline - time.time())  # the time stamp is cut to the second


async def serve(settings: Settings) -> None:
    async with Client.of(Path(settings.kubeconfig)) as client:
        await Agent(client, settings).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(from_json(sys.argv[1], Settings)))
