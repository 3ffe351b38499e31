"""Pods that are well in the eyes of Kubernetes and have to go elsewhere all the same: their node lets training down.

One at a time, and only where others keep what they hold: to move is to give up a memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiercheck.protocol.reasons import GPU_FAULT
from tiercheck.protocol.report import Report
from tiercheck_operator.controller.causes import Cause
from tiercheck_operator.controller.hang import held_up_again
from tiercheck_operator.controller.observation import Observation, PodView
from tiercheck_operator.controller.suspicion import trainer_failed


@dataclass(frozen=True)
class Move:
    pod: PodView
    cause: Cause
    why: str
    at: float | None


def find_move(obs: Observation) -> Move | None:
    """The pod that is to be replaced on another node; None: there is none."""
    if not obs.job.spec.copies and obs.job.spec.parity is None:
        return None
    pods = _newest(obs)
    again = held_up_again(obs, pods)
    if again is not None:
        return Move(again, Cause.HUNG, "it held all others up again; its node is avoided", None)
    faulty = [(pod, report) for pod in pods.values() if (report := _gpu_fault(obs, pod)) is not None]
    if len(faulty) != 1:
        return None  # what several GPUs say at once is not the fault of one
    pod, report = faulty[0]
    said = report.trainer.failure
    why = f"rank {said.rank}: {said.message}; its node is avoided" if said is not None else ""
    return Move(pod, Cause.GPU_FAULT, why, report.trainer.ended_at)


def _newest(obs: Observation) -> Mapping[int, PodView]:
    pods: dict[int, PodView] = {}
    for pod in sorted(obs.pods, key=lambda pod: pod.incarnation):
        if 0 <= pod.worker < obs.job.spec.workers and not pod.terminal and not pod.deleting:
            pods[pod.worker] = pod
    return pods


def _gpu_fault(obs: Observation, pod: PodView) -> Report | None:
    report = obs.report(pod)
    if report is None or not trainer_failed(obs, pod) or report.trainer.failure is None:
        return None
    return report if report.trainer.failure.reason == GPU_FAULT else None
