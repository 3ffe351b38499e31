"""Registers one node, and turns what the API server says about its pods into processes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tiercheck_cli.api_server import PODS, Listing
from tiercheck_local import clock, markers
from tiercheck_local.client import Client
from tiercheck_local.node.pod import Pod
from tiercheck_local.node.registration import Registration, allocatable
from tiercheck_local.node.settings import Settings

Object = Mapping[str, Any]
log = logging.getLogger(__name__)

LOSE_EVERY_POD = signal.SIGUSR1
"""Sent to an agent: all its pods die at once, with their memory, and are reported as failed."""


class Agent:
    """Runs until SIGTERM or SIGINT, or (with `lifeline`) until its standard input ends; then nothing of it is
    left."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client, self._settings = client, settings
        self._pods: dict[str, Pod] = {}
        self._addresses = self._free_addresses()
        self._stop = asyncio.Event()

    async def run(self, lifeline: bool = False) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(LOSE_EVERY_POD, self._lose_every_pod)
        if lifeline:
            loop.add_reader(sys.stdin.fileno(), self._read_lifeline)
        self._clear_node()
        registration = Registration(self._client, self._settings)
        work = [asyncio.create_task(registration.run()), asyncio.create_task(self._follow_pods())]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([*work, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [*work, stopping]:
                task.cancel()
            self._clear_node()

    def _read_lifeline(self) -> None:
        if not os.read(sys.stdin.fileno(), 1):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._stop.set()

    def _clear_node(self) -> None:
        """A node that (re)starts or stops has no processes and no memory."""
        markers.kill(markers.POD, markers.place(self._settings.cluster, self._settings.name))
        self._settings.roots.remove_all()

    async def _follow_pods(self) -> None:
        name = self._settings.name
        async for news in self._client.follow(PODS, fields=f"spec.nodeName={name}"):
            if isinstance(news, Listing):
                present = {pod["metadata"]["uid"] for pod in news.items}
                for uid in set(self._pods) - present:
                    self._forget(uid)
                for pod in news.items:
                    self._see(pod)
            elif news.kind == "DELETED":
                self._forget(news.object["metadata"]["uid"])
            else:
                self._see(news.object)

    def _see(self, manifest: Object) -> None:
        if manifest["spec"].get("nodeName") != self._settings.name:
            return
        metadata = manifest["metadata"]
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
    left = (clock.parse(metadata["deletionTimestamp"]) - clock.parse(clock.micro_timestamp())).total_seconds()
    return max(1.0, left)  # the time stamp is cut to the second
