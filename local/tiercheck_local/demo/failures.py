"""Inflicts the demo's failures, from a crashed process to the loss of everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Stage(Protocol):
    """What a failure may do to the cluster. Names are those of `kubectl`."""

    def pod_of(self, worker: int) -> str: ...
    def node_of(self, worker: int) -> str: ...
    def rack_of(self, worker: int) -> str: ...
    def nodes_in(self, rack: str) -> list[str]: ...
    def worker_racks(self, workers: int) -> dict[int, str]: ...
    def kill_training_process(self, pod: str) -> None: ...
    def evict(self, pod: str) -> None: ...
    def kill_nodes(self, nodes: list[str]) -> None: ...
    def revive_node(self, node: str) -> None: ...
    def lose_every_pod(self) -> None: ...
    def protect_by_parity(self) -> str: ...


@dataclass(frozen=True)
class Failure:
    """One act of the story. `inflict` returns what was hit, in words; `repair` brings lost nodes back
    afterwards."""

    name: str
    what: str
    inflict: Callable[[Stage], str]
    repair: Callable[[Stage], None] = lambda stage: None
    needs_remote: bool = False
    """Wait for a complete remote version first: nothing else will be left."""
    prepare: Callable[[Stage], str] | None = None
    """A change of the job, made before; it takes effect with the recovery. Returns what was changed, in
    words."""


def _kill_process(stage: Stage) -> str:
    pod = stage.pod_of(1)
    stage.kill_training_process(pod)
    return f"training process of worker 1 ({pod})"


def _evict(stage: Stage) -> str:
    pod = stage.pod_of(2)
    stage.evict(pod)
    return f"pod {pod} (worker 2)"


class _NodeLoss:
    """Kills the node of one worker; the repair brings the same node back."""

    def __init__(self, worker: int = 3) -> None:
        self._worker = worker
        self._nodes: list[str] = []

    def inflict(self, stage: Stage) -> str:
        self._nodes = [stage.node_of(self._worker)]
        stage.kill_nodes(self._nodes)
        return f"node {self._nodes[0]} with worker {self._worker}"

    def repair(self, stage: Stage) -> None:
        for node in self._nodes:
            stage.revive_node(node)


class _RackLoss(_NodeLoss):
    """Kills every node of worker 0's rack at the same moment."""

    def inflict(self, stage: Stage) -> str:
        rack = stage.rack_of(0)
        self._nodes = stage.nodes_in(rack)
        stage.kill_nodes(self._nodes)
        return f"rack {rack}: nodes {', '.join(self._nodes)}"


def _lose_everything(stage: Stage) -> str:
    stage.lose_every_pod()
    return "all pods, with all memory"


def failures() -> list[Failure]:
    """The acts, in order of size; the last one under parity, which took the place of copies when everything
    was lost."""
    node, rack, rebuilt = _NodeLoss(), _RackLoss(), _NodeLoss(1)
    return [
        Failure("process", "a training process is killed", _kill_process),
        Failure("pod", "a pod is evicted", _evict),
        Failure("node", "a node dies", node.inflict, node.repair),
        Failure("rack", "a rack goes dark", rack.inflict, rack.repair),
        Failure(
            "all",
            "every pod is lost at once",
            _lose_everything,
            needs_remote=True,
            prepare=lambda stage: stage.protect_by_parity(),
        ),
        Failure("node, parity", "a node dies", rebuilt.inflict, rebuilt.repair),
    ]
