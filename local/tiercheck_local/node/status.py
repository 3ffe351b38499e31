"""A pod's status as a kubelet reports it, from the states of its containers: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Object = dict[str, Any]

OWNED = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
"""Conditions that a node writes; all others are somebody else's and stay."""


class View(Protocol):
    """What of a container is shown."""

    spec: Mapping[str, Any]
    name: str
    state: Object
    last_state: Object
    restarts: int

    @property
    def is_sidecar(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def running(self) -> bool: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def is_started(self) -> bool: ...


@dataclass(frozen=True)
class Situation:
    """Everything the status depends on. `failure` (reason, message) overrides what the containers say."""

    inits: Sequence[View]
    """Sidecars among them, in the manifest's order."""
    mains: Sequence[View]
    pod_ip: str
    host_ip: str
    started_at: str
    initialized: bool
    over: bool
    """No container will run again, sidecars included."""
    failure: tuple[str, str] | None = None


def pod_status(situation: Situation, previous: Mapping[str, Any], now: str) -> Object:
    """The whole status; `previous` gives transition times and the conditions of others, `now` is metav1.Time."""
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


def container_status(view: View) -> Object:
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


def _phase(situation: Situation) -> str:
    if situation.failure:
        return "Failed"
    if situation.over:
        codes = [view.exit_code for view in (*situation.inits, *situation.mains) if not view.is_sidecar]
        return "Succeeded" if all(code == 0 for code in codes) else "Failed"
    return "Running" if any(_has_run(view) for view in situation.mains) else "Pending"


def _has_run(view: View) -> bool:
    return view.running or "terminated" in view.state or bool(view.last_state)


def _conditions(
    situation: Situation, phase: str, previous: Sequence[Mapping[str, Any]], now: str
) -> list[Mapping[str, Any]]:
    sidecars = [view for view in situation.inits if view.is_sidecar]
    unready = [view.name for view in (*situation.mains, *sidecars) if not view.ready]
    incomplete = [view.name for view in situation.inits if not (view.is_started if view.is_sidecar else view.ready)]
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
