"""What real kubelets (1.36) and the node controller write about a pod of ours and its node.

Decisions are tested on that, through the parser. Above all on what differs from what one might expect:
`state.running` is there a second after a container was made, `started` only once its startup probe has
passed; of a container that fails again within ten minutes the kubelet says for how long it holds it back;
of what happens after a kubelet has died nothing is said at all.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.model.observed import ContainerView, NodeView
from tiercheck_operator.model.parsing import parse_node, parse_pod

Raw = dict[str, Any]
SIDECAR, TRAINER = "tiercheck-sidecar", "trainer"
BACK_OFF_FIRST, BACK_OFF_MOST, BACK_OFF_FORGOTTEN = 10, 300, 600
"""Seconds. After the first end it starts again at once; a long life makes the next end the first again."""


@lru_cache(maxsize=1024)
def at(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(seconds: int) -> str:
    """As Go prints it: 40s, 2m40s, 5m0s."""
    return f"{seconds // 60}m{seconds % 60}s" if seconds >= 60 else f"{seconds}s"


def _status(
    name: str, state: Raw, restarts: int, last: Raw | None, *, started: bool, ready: bool = False
) -> Raw:
    return {
        "name": name, "image": "i", "imageID": "sha256:0", "containerID": f"containerd://{restarts}",
        "restartCount": restarts,
        "ready": ready, "started": started, "state": state, "lastState": last or {},
    }  # fmt: skip


def end(ended: float, code: int = 137, reason: str = "Error") -> Raw:
    return {
        "terminated": {"exitCode": code, "reason": reason, "startedAt": at(ended - 60),
            "finishedAt": at(ended), "containerID": "containerd://0"}
    }  # fmt: skip


def not_made(name: str = SIDECAR, reason: str = "PodInitializing") -> Raw:
    return {
        **_status(name, {"waiting": {"reason": reason}}, 0, None, started=False),
        "containerID": "",
        "imageID": "",
    }


def starting(since: float, name: str = SIDECAR, restarts: int = 0, last: Raw | None = None) -> Raw:
    """Runs, and the startup probe has not passed."""
    return _status(name, {"running": {"startedAt": at(since)}}, restarts, last, started=False)


def up(since: float, name: str = SIDECAR, restarts: int = 0, last: Raw | None = None) -> Raw:
    return _status(name, {"running": {"startedAt": at(since)}}, restarts, last, started=True, ready=True)


def ended(when: float, name: str = SIDECAR, restarts: int = 0, code: int = 137, reason: str = "Error") -> Raw:
    """For a moment; in a kubelet that forgets it, for ever."""
    return _status(name, end(when, code, reason), restarts, None, started=False)


def held_back(when: float, seconds: int, name: str = SIDECAR, restarts: int = 1) -> Raw:
    whose = f"container={name} pod=j-1-0_ns(3f0c6a1e-0000-4000-8000-000000000000)"
    message = f"back-off {duration(seconds)} restarting failed {whose}"
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
    return _status(name, waiting, restarts, end(when), started=False)


def made_by(job_uid: str) -> list[Raw]:
    """The owner references of a pod that the operator made for a job."""
    return [
        {
            "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}", "kind": names.KIND, "name": "j",
            "uid": job_uid,
            "controller": True, "blockOwnerDeletion": True,
        }
    ]  # fmt: skip


def pod(
    sidecar: Raw | None, trainer: Raw | None = None, phase: str = "Running", policy: str = "OnFailure"
) -> Raw:
    """Worker 1's."""
    labels = {"tiercheck.io/worker": "1", "tiercheck.io/job-uid": "job-uid", "tiercheck.io/incarnation": "0"}
    library = _status("tiercheck-library", end(0, 0, "Completed"), 0, None, started=False, ready=True)
    return {
        "metadata": {"name": "j-1-0", "namespace": "ns", "uid": "pod-1", "labels": labels,
            "creationTimestamp": at(0),
                     "ownerReferences": made_by("job-uid")},
        "spec": {
            "nodeName": "n00", "restartPolicy": policy,
            "initContainers": [{"name": "tiercheck-library"},
                {"name": SIDECAR, "image": "i", "restartPolicy": "Always"}],
            "containers": [{"name": TRAINER}],
        },
        "status": {
            "phase": phase, "podIP": "10.0.0.1",
            "initContainerStatuses": [library, *([sidecar] if sidecar is not None else [])],
            "containerStatuses": [trainer or up(0, TRAINER)],
        },
    }  # fmt: skip


def sidecar_view(status: Raw) -> ContainerView:
    view = parse_pod(pod(status))
    assert view is not None
    return view.sidecar


def trainer_view(status: Raw, policy: str = "OnFailure") -> ContainerView:
    view = parse_pod(pod(up(0), status, policy=policy))
    assert view is not None
    return view.trainer


def node(
    name: str,
    labels: Mapping[str, str],
    unready: str = "",
    kubelet: str = "v1.36.1",
    out_of_service: bool = False,
) -> NodeView:
    """`unready`: the status of its condition Ready, Unknown or False. The node controller adds the taint;
    pods tolerate it for 300 s unless their template says otherwise."""
    taints = []
    if unready:
        key = "node.kubernetes.io/unreachable" if unready == "Unknown" else "node.kubernetes.io/not-ready"
        taints += [{"key": key, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
    if out_of_service:
        taints.append(
            {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
        )
    reason = {"": "KubeletReady", "Unknown": "NodeStatusUnknown", "False": "KubeletNotReady"}[unready]
    return parse_node(
        {
            "metadata": {"name": name, "labels": dict(labels)},
            "spec": {"taints": taints} if taints else {},
            "status": {
                "conditions": [{"type": "Ready", "status": unready or "True", "reason": reason}],
                "nodeInfo": {"kubeletVersion": kubelet},
            },
        }
    )


class SidecarContainer:
    """One pod's sidecar in the hands of its kubelet. `tick` every second; `status` is what the API shows."""

    def __init__(self, now: float, start_seconds: float) -> None:
        self.start_seconds = start_seconds
        """From the container's start until it listens; python needs longer on a busy node."""
        self.restarts = 0
        self._began: float | None = now
        self._ended: float | None = None
        self._back_off = 0
        self.published: Raw | None = None
        self.listening = start_seconds <= 0
        self.status = up(now) if self.listening else starting(now)

    def kill(self, now: float) -> None:
        if self._began is None:
            return
        healthy = self._ended is None or now - self._ended > BACK_OFF_FORGOTTEN
        self._back_off = 0 if healthy else min(BACK_OFF_MOST, max(BACK_OFF_FIRST, 2 * self._back_off))
        self._began, self._ended, self.listening = None, now, False

    def tick(self, now: float) -> None:
        if self._began is None:
            assert self._ended is not None
            if "terminated" not in self.status["state"] and not self._told_end():
                self.status = ended(self._ended, restarts=self.restarts)
                return
            if now < self._ended + self._back_off:
                self.status = held_back(self._ended, self._back_off, restarts=self.restarts)
                return
            self._began, self.restarts = now, self.restarts + 1
        last = end(self._ended) if self._ended is not None else None
        self.listening = now - self._began >= self.start_seconds
        self.status = (up if self.listening else starting)(self._began, restarts=self.restarts, last=last)

    def _told_end(self) -> bool:
        return "waiting" in self.status["state"]
