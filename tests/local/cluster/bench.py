"""The laptop cluster with the questions that its tests ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.local.cluster.pod_builder import PodBuilder
from tiercheck_cli.api_server import PODS
from tiercheck_local.cluster import LocalCluster

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
