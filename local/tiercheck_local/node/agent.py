"""Registers one node, and turns what the API server says about its pods into processes.

`python -m tiercheck_local.node.agent SETTINGS`
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiercheck.protocol.encoding import from_json
from tiercheck_cli.api_server import PODS
from tiercheck_local import markers
from tiercheck_local.client import Cache, Client
from tiercheck_local.controlplane import lifetime
from tiercheck_local.node.pod import Pod
from tiercheck_local.node.registration import Registration, allocatable
from tiercheck_local.node.settings import Settings
from tiercheck_operator.model.status import parse_time

Object = Mapping[str, Any]
log = logging.getLogger(__name__)

LOSE_EVERY_POD = signal.SIGUSR1
"""Sent to an agent: all its pods die at once, with their memory, and are reported as failed."""


class Agent:
    """Runs until it is told to stop or whoever started it is gone; then nothing of it is left."""

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
            await lifetime.run_until_told(registration.run(), pods.run())
        finally:
            self._clear_node()

    def _clear_node(self) -> None:
        """A node that (re)starts or stops has no processes and no memory."""
        markers.kill(markers.POD, markers.place(self._settings.cluster, self._settings.name))
        self._settings.roots.remove_all()

    def _see(self, kind: str, manifest: Object) -> None:
        metadata = manifest["metadata"]
        if kind == "DELETED":
            self._forget(metadata["uid"])
            return
        pod = self._pods.get(metadata["uid"])
        if pod is None:
            if (manifest.get("status") or {}).get("phase") in {"Succeeded", "Failed"}:
                if metadata.get("deletionTimestamp"):
                    self._spawn_delete(manifest)
                return
            on_host = bool(manifest["spec"].get("hostNetwork"))
            ip = self._settings.address if on_host else next(self._addresses)
            pod = Pod(manifest, ip, self._client, self._settings, allocatable(self._settings))
            self._pods[metadata["uid"]] = pod
            if metadata.get("deletionTimestamp"):  # never started here: nothing to stop
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

    def _spawn_delete(self, manifest: Object) -> None:
        metadata = manifest["metadata"]
        pod = Pod(manifest, "", self._client, self._settings, {})
        self._pods[metadata["uid"]] = pod
        pod.terminate(0)

    def _lose_every_pod(self) -> None:
        log.warning("every pod of node %s is lost", self._settings.name)
        markers.kill(markers.POD, markers.place(self._settings.cluster, self._settings.name))
        for pod in self._pods.values():
            pod.lose("PodLost", "every process of the pod was killed and its memory is gone")

    def _free_addresses(self) -> Iterator[str]:
        """Round robin: what still talks to a dead pod's address shall not reach the next pod."""
        for last in itertools.cycle(range(2, 255)):
            address = f"{self._settings.address_prefix}.{last}"
            if all(pod.ip != address for pod in self._pods.values()):
                yield address


def _grace_left(manifest: Object) -> float:
    """Seconds until the deletion's deadline; the API server has added the grace period to the time stamp."""
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
