"""Computes a pod's status from its containers, and writes it to the API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck_local.client import Client, WokenController
from tiercheck_local.node.container import Container
from tiercheck_operator.kubernetes.api_server import PODS

Object = dict[str, Any]

OWNED = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
"""Conditions that a node writes; those of other writers stay."""


@dataclass
class PodSituation:
    """All inputs of the status. `failure` (reason, message) overrides the state of the containers."""

    inits: Sequence[Container]
    """Init containers and sidecars, in the manifest's order."""
    mains: Sequence[Container]
    pod_ip: str
    host_ip: str
    started_at: str
    initialized: bool = False
    over: bool = False
    """True once no container will run again, sidecars included."""
    failure: tuple[str, str] | None = None


def pod_status(situation: PodSituation, previous: Mapping[str, Any], now: str) -> Object:
    """Returns the status; `previous` has transition times and other conditions, `now` is metav1.Time."""
    phase = _phase(situation)
    status: Object = {
        "phase": phase,
        "conditions": _conditions(situation, phase, previous.get("conditions") or [], now),
        "hostIP": situation.host_ip,
        "hostIPs": [{"ip": situation.host_ip}],
        "podIP": situation.pod_ip,
        "podIPs": [{"ip": situation.pod_ip}],
        "startTime": situation.started_at,
        "containerStatuses": [container_status(view) for view in situation.mains],
        "qosClass": previous.get("qosClass") or "BestEffort",
    }
    if situation.inits:
        status["initContainerStatuses"] = [container_status(view) for view in situation.inits]
    if situation.failure:
        status["reason"], status["message"] = situation.failure
    return status


def container_status(view: Container) -> Object:
    image = view.spec.get("image", "")
    return {
        "name": view.name,
        "image": image,
        "imageID": f"not-pulled://{image}" if "waiting" not in view.state else "",
        "containerID": f"process://{view.name}-{view.restarts}" if "waiting" not in view.state else "",
        "ready": view.ready,
        "started": view.is_started,
        "restartCount": view.restarts,
        "state": view.state,
        "lastState": view.last_state,
    }


def _phase(situation: PodSituation) -> str:
    if situation.failure:
        return "Failed"
    if situation.over:
        codes = [view.exit_code for view in (*situation.inits, *situation.mains) if not view.is_sidecar]
        return "Succeeded" if all(code == 0 for code in codes) else "Failed"
    ran = (view.running or "terminated" in view.state or view.last_state for view in situation.mains)
    return "Running" if any(ran) else "Pending"


def _conditions(
    situation: PodSituation, phase: str, previous: Sequence[Mapping[str, Any]], now: str
) -> list[Mapping[str, Any]]:
    sidecars = [view for view in situation.inits if view.is_sidecar]
    unready = [view.name for view in (*situation.mains, *sidecars) if not view.ready]
    incomplete = [
        view.name for view in situation.inits if not (view.is_started if view.is_sidecar else view.ready)
    ]
    ended = phase in {"Succeeded", "Failed"}
    not_ready: Object = {
        "reason": {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase, "ContainersNotReady"),
        "message": "" if ended else f"containers with unready status: [{' '.join(unready)}]",
    }
    not_initialized: Object = {
        "reason": "ContainersNotInitialized",
        "message": f"containers with incomplete status: [{' '.join(incomplete)}]",
    }
    ready = not ended and not unready and situation.initialized
    wanted: list[tuple[str, bool, Object]] = [
        ("PodReadyToStartContainers", not ended, {}),
        ("Initialized", situation.initialized, {} if situation.initialized else not_initialized),
        ("Ready", ready, {} if ready else not_ready),
        ("ContainersReady", ready, {} if ready else not_ready),
        ("PodScheduled", True, {}),
    ]
    before = {condition["type"]: condition for condition in previous}
    result: list[Mapping[str, Any]] = [condition for condition in previous if condition["type"] not in OWNED]
    for kind, holds, why in wanted:
        value = "True" if holds else "False"
        old = before.get(kind, {})
        since = old.get("lastTransitionTime") if old.get("status") == value else None
        explained = {key: text for key, text in why.items() if text}
        result.append({"type": kind, "status": value, "lastTransitionTime": since or now, **explained})
    return result


class Publisher(WokenController):
    """Writes a pod's status, which `compute(previous status)` returns, after each call of `changed`."""

    def __init__(
        self, client: Client, pod: Mapping[str, Any], compute: Callable[[Mapping[str, Any]], Object]
    ) -> None:
        super().__init__(client, ())
        self._compute = compute
        self._namespace, self._name, self._uid = (
            pod["metadata"][key] for key in ("namespace", "name", "uid")
        )
        self._current: Mapping[str, Any] = pod
        self._written: Mapping[str, Any] | None = None
        self._clean = asyncio.Event()
        self._clean.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.run())
        self.changed()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def seen(self, pod: Mapping[str, Any]) -> None:
        """Takes a newer version of the object; rewrites the node's own conditions if others changed them."""
        if _version(pod) < _version(self._current):
            return  # our own write was answered before the watch showed what came earlier
        self._current = pod
        if self._written is not None and _own(pod.get("status") or {}) != _own(self._written):
            self.changed()

    def changed(self) -> None:
        self._clean.clear()
        self.wake()

    async def drained(self) -> None:
        """Waits until everything known has been written."""
        if self._task is not None and not self._task.done():
            await self._clean.wait()

    async def work(self) -> None:
        """Writes the status, unless the pod is gone."""
        await self._write()
        if not self._woken.is_set():
            self._clean.set()

    async def _write(self) -> None:
        while True:
            previous = self._current.get("status") or {}
            status = self._written = self._compute(previous)
            if all(previous.get(key) == value for key, value in status.items()):
                return
            # As read: a merge patch replaces the whole list of conditions, in which others have written too.
            written = await self._client.patch_as_read(
                PODS, self._current, {"status": status}, subresource="status"
            )
            if written is not None:
                self._current = written
                return
            found = await self._client.find(PODS, self._namespace, self._name)
            if found is None or found["metadata"]["uid"] != self._uid:
                return
            self._current = found


def _own(status: Mapping[str, Any]) -> dict[str, str]:
    return {
        entry["type"]: entry["status"] for entry in status.get("conditions") or [] if entry["type"] in OWNED
    }


def _version(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["resourceVersion"])
