"""Inflicts the demo's failures, from a crashed process to the loss of everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiercheck_local.demo.stage import LaptopStage


@dataclass(frozen=True)
class Failure:
    """One act of the story. `inflict` returns what was hit, in words."""

    name: str
    what: str
    inflict: Callable[[LaptopStage], str]
    needs_remote: bool = False
    """Wait for a complete remote version first: nothing else will be left."""
    prepare: Callable[[LaptopStage], str] | None = None
    """A change of the job, made before; it takes effect with the recovery. Returns what was changed, in
    words."""


def _kill_process(stage: LaptopStage) -> str:
    pod = stage.pod_of(1)
    stage.kill_training_process(pod)
    return f"training process of worker 1 ({pod})"


def _evict(stage: LaptopStage) -> str:
    pod = stage.pod_of(2)
    stage.evict(pod)
    return f"pod {pod} (worker 2)"


def _kill_node(stage: LaptopStage, worker: int) -> str:
    node = stage.node_of(worker)
    stage.kill_nodes([node])
    return f"node {node} with worker {worker}"


def _kill_rack(stage: LaptopStage) -> str:
    rack = stage.rack_of(0)
    nodes = stage.nodes_in(rack)
    stage.kill_nodes(nodes)
    return f"rack {rack}: nodes {', '.join(nodes)}"


def _lose_everything(stage: LaptopStage) -> str:
    stage.lose_every_pod()
    return "all pods, with all memory"


FAILURES = (
    Failure("process", "a training process is killed", _kill_process),
    Failure("pod", "a pod is evicted", _evict),
    Failure("node", "a node dies", lambda stage: _kill_node(stage, 3)),
    Failure("rack", "a rack goes dark", _kill_rack),
    Failure(
        "all",
        "every pod is lost at once",
        _lose_everything,
        needs_remote=True,
        prepare=lambda stage: stage.protect_by_parity(),
    ),
    Failure("node, parity", "a node dies", lambda stage: _kill_node(stage, 1)),
)
"""The acts, in order of size; the last one under parity, which took the place of copies when everything was
lost."""
