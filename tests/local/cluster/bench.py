"""A laptop cluster for tests, and pods that run small scripts on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercheck_local.cluster import LocalCluster
from tiercheck_operator.kubernetes.api_server import PODS

DEADLINE = 30.0


class Bench:
    """Every question is asked until the answer is the wanted one, or the deadline is over."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster, self.faults, self.api = cluster, cluster.faults, cluster.api

    def run(self, builder: PodBuilder) -> str:
        """Apply the pod; its name."""
        self.cluster.apply(builder.manifest)
        return builder.name

    def pod(self, name: str) -> dict[str, Any]:
        return self.api.get(PODS, "default", name)

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        return self.cluster.wait_for(condition, DEADLINE, what)

    def phase(self, name: str, *phases: str) -> dict[str, Any]:
        """Wait until the pod is in one of `phases`; the pod."""
        self.wait(
            f"pod {name} to be {phases}", lambda: self.pod(name).get("status", {}).get("phase") in phases
        )
        return self.pod(name)

    def ready(self, name: str) -> dict[str, Any]:
        self.wait(f"pod {name} to be ready", lambda: condition(self.pod(name), "Ready") == "True")
        return self.pod(name)

    def container(self, name: str, container: str = "main") -> dict[str, Any]:
        """What the pod's status says of it."""
        status = self.pod(name).get("status", {})
        entries = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
        return next(
            (each for each in entries if each["name"] == container), {"state": {}, "restartCount": -1}
        )

    def memory(self, pod: dict[str, Any]) -> Path:
        """Where its volumes in memory lie."""
        return self.cluster.memory_folder(pod["spec"]["nodeName"], pod["metadata"]["uid"])

    def gone(self, name: str) -> None:
        self.wait(f"pod {name} to be gone", lambda: self.api.find(PODS, "default", name) is None)

    def log(self, name: str, container: str = "main") -> str:
        file = self.cluster.logs / name / f"{container}.log"
        return file.read_text() if file.exists() else ""

    def logged(self, name: str, text: str, container: str = "main") -> None:
        self.wait(f"{text!r} in the log of {name}", lambda: text in self.log(name, container))


def condition(item: dict[str, Any], kind: str) -> str:
    conditions = item.get("status", {}).get("conditions") or []
    return next((str(entry["status"]) for entry in conditions if entry["type"] == kind), "")


_numbers = itertools.count(1)

Object = dict[str, Any]


class PodBuilder:
    """`PodBuilder().runs("sleep 9").named(...)`; `manifest` is what to apply."""

    def __init__(self, name: str = "") -> None:
        self.name = name or f"pod-{next(_numbers)}"
        self.manifest: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": "default", "labels": {"test": self.name}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 5,
                "containers": [],
                "volumes": [],
            },
        }

    @property
    def spec(self) -> Object:
        return self.manifest["spec"]  # type: ignore[no-any-return]

    def runs(self, script: str, name: str = "main", **more: Any) -> PodBuilder:
        self.spec["containers"].append(_container(name, script, more))
        return self

    def first(self, script: str, name: str = "init", **more: Any) -> PodBuilder:
        """An init container."""
        self.spec.setdefault("initContainers", []).append(_container(name, script, more))
        return self

    def beside(self, script: str, name: str = "sidecar", **more: Any) -> PodBuilder:
        """A native sidecar."""
        return self.first(script, name, restartPolicy="Always", **more)

    def volume(self, name: str, path: str, **source: Any) -> PodBuilder:
        """Mounted at `path` in every container so far."""
        self.spec["volumes"].append({"name": name, **source})
        for container in [*self.spec["containers"], *self.spec.get("initContainers", [])]:
            container["volumeMounts"].append({"name": name, "mountPath": path})
        return self

    def memory(self, path: str = "/memory") -> PodBuilder:
        return self.volume("memory", path, emptyDir={"medium": "Memory"})

    def on(self, node: str) -> PodBuilder:
        self.spec["nodeSelector"] = {"kubernetes.io/hostname": node}
        return self

    def policy(self, restart: str) -> PodBuilder:
        self.spec["restartPolicy"] = restart
        return self

    def owned_by(self, owner: Object) -> PodBuilder:
        self.manifest["metadata"]["ownerReferences"] = [reference(owner)]
        return self


def reference(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }


def _container(name: str, script: str, more: Object) -> Object:
    return {"name": name, "image": "unused", "command": ["sh", "-c", script], "volumeMounts": [], **more}
