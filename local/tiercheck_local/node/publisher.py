"""Writes a pod's status to the API server: the newest one, as often as needed, never two writes at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from tiercheck_cli.api_server import PODS, RequestFailed
from tiercheck_local.client import Client
from tiercheck_local.node.status import OWNED

Object = Mapping[str, Any]
log = logging.getLogger(__name__)


class Publisher:
    """`compute(previous status)` gives the status to write; it is called when `changed` was."""

    def __init__(self, client: Client, pod: Object, compute: Callable[[Object], dict[str, Any]]) -> None:
        self._client, self._compute = client, compute
        self._namespace, self._name, self._uid = (pod["metadata"][key] for key in ("namespace", "name", "uid"))
        self._current = pod
        self._written: Object | None = None
        self._dirty = asyncio.Event()
        self._clean = asyncio.Event()
        self._clean.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self.changed()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def seen(self, pod: Object) -> None:
        """A newer version of the object, as the watch brought it. What others made of our conditions is put right."""
        if _version(pod) < _version(self._current):
            return  # our own write was answered before the watch showed what came earlier
        self._current = pod
        if self._written is not None and _own(pod.get("status") or {}) != _own(self._written):
            self.changed()

    def changed(self) -> None:
        self._clean.clear()
        self._dirty.set()

    async def drained(self) -> None:
        """Wait until everything known has been written."""
        if self._task is not None and not self._task.done():
            await self._clean.wait()

    async def _run(self) -> None:
        pause = 0.05
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                if not await self._write():
                    return
                pause = 0.05
            except RequestFailed as failure:
                if pause > 1:
                    log.warning("status of pod %s/%s: %s", self._namespace, self._name, failure)
                self._dirty.set()
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
            if not self._dirty.is_set():
                self._clean.set()

    async def _write(self) -> bool:
        """False: the pod is gone, there is nothing to write to."""
        while True:
            previous = self._current.get("status") or {}
            status = self._written = self._compute(previous)
            if all(previous.get(key) == value for key, value in status.items()):
                return True
            # The version guards the conditions that others write: a merge patch replaces the whole list.
            metadata = {"uid": self._uid, "resourceVersion": self._current["metadata"]["resourceVersion"]}
            try:
                self._current = await self._client.patch(
                    PODS, self._namespace, self._name, {"metadata": metadata, "status": status}, subresource="status"
                )
                return True
            except RequestFailed as failure:
                if failure.code not in {404, 409}:
                    raise
            found = await self._client.find(PODS, self._namespace, self._name)
            if found is None or found["metadata"]["uid"] != self._uid:
                self._clean.set()
                return False
            self._current = found


def _own(status: Object) -> dict[str, str]:
    return {entry["type"]: entry["status"] for entry in status.get("conditions") or [] if entry["type"] in OWNED}


def _version(pod: Object) -> int:
    return int(pod["metadata"]["resourceVersion"])
