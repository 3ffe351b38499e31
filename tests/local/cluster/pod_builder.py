"""Pods for tests, said in a few words."""

from __future__ import annotations

import itertools
from typing import Any

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
