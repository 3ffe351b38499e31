"""Pods that are well in the eyes of Kubernetes and have to go elsewhere all the same: their node lets training down.

One at a time as long as there is something to lose, and only where others keep what they hold: to move is to give up a memory. Where training can begin again in the old
place, it is enough that others should keep it; where it cannot, a pod waits until they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiercheck.protocol.reasons import GPU_FAULT
from tiercheck.protocol.report import Report, RestoreState
from tiercheck_operator.controller.exits import describe_exit
from tiercheck_operator.controller.failed_starts import fails_again
from tiercheck_operator.controller.hang import held_up_again
from tiercheck_operator.controller.stalled import why_stalled
from tiercheck_operator.controller.suspicion import trainer_failed
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import Observation, PodView

_HAND_OVER = 600.0
"""Seconds that a pod in which no attempt can begin may take at most to bring its holders what they lack."""


@dataclass(frozen=True)
class Move:
    pod: PodView
    cause: Cause
    why: str
    at: float | None


def find_moves(obs: Observation) -> list[Move]:
    """The pods that are to be replaced on other nodes."""
    pods = _newest(obs)
    barred = _barred(obs, pods)
    if barred:
        return barred
    start = fails_again(obs, pods) if _shared(obs) or _from_scratch(obs) else None
    if start is not None:
        why = f"{describe_exit(start)}; that was before its first step, as the last time on this node, which is avoided"
        return [Move(pods[start.worker], Cause.START_FAILED, why, start.trainer.ended_at)]
    if not _shared(obs):
        return []
    again = held_up_again(obs, pods)
    if again is not None:
        return [Move(again, Cause.HUNG, "it held all others up again; its node is avoided", None)]
    faulty = [(pod, report) for pod in pods.values() if (report := _gpu_fault(obs, pod)) is not None]
    if len(faulty) != 1:
        return []  # what several GPUs say at once is not the fault of one
    pod, report = faulty[0]
    said = report.trainer.failure
    why = f"rank {said.rank}: {said.message}; its node is avoided" if said is not None else ""
    return [Move(pod, Cause.GPU_FAULT, why, report.trainer.ended_at)]


def _barred(obs: Observation, pods: Mapping[int, PodView]) -> list[Move]:
    """Of pods in which no attempt can begin. All others wait for them, so there is time to let them have what such a pod holds."""
    reports = {worker: report for worker, pod in pods.items() if (report := _current(obs, pod)) is not None}
    found = {worker: _bar(obs, pods[worker], reports[worker]) for worker in sorted(reports)}
    moves = {worker: move for worker, move in found.items() if move is not None}
    if not moves or len(moves) == obs.job.spec.workers > 1:
        return []  # what keeps all of them is not the fault of one node: storage perhaps, or the check itself
    if len(reports) < obs.job.spec.workers or not (_shared(obs) or _kept_elsewhere(obs)):
        return []
    others = [report for worker, report in reports.items() if worker not in moves]
    stalled = {worker for worker, move in moves.items() if move.cause is Cause.RESTORE_STALLED}
    running = {worker for worker, report in reports.items() if report.restore.state is RestoreState.RUNNING}
    if running - stalled or any(report.trainer.busy for report in others):
        return []
    if _from_scratch(obs):
        return list(moves.values())
    return [
        move for worker, move in moves.items() if not _needed(obs, reports[worker], restored=worker not in stalled)
    ][:1]


def _needed(obs: Observation, report: Report, *, restored: bool) -> bool:
    """Whether its sidecar still has to bring its holders what they lack, or has not heard yet what that is: it never does where it is not
    `restored`. Not for ever: a holder may have no room."""
    recovery = obs.job.status.recovery
    if recovery is not None and recovery.decided_at is not None and obs.now - recovery.decided_at > _HAND_OVER:
        return False
    unheard = restored and report.watermarks.local is None and not obs.job.status.resized_from
    return report.owes or unheard


def _bar(obs: Observation, pod: PodView, report: Report) -> Move | None:
    trainer = report.trainer
    if trainer.stuck:
        return Move(pod, Cause.STUCK, f"{trainer.stuck}; its node is avoided", None)
    if trainer.unhealthy:
        return Move(pod, Cause.HEALTH_CHECK_FAILED, f"{trainer.unhealthy}; its node is avoided", None)
    stalled = why_stalled(obs, report)
    if stalled:
        return Move(pod, Cause.RESTORE_STALLED, f"{stalled}; its node is avoided", None)
    return None


def _shared(obs: Observation) -> bool:
    """Whether other workers keep what one holds."""
    return bool(obs.job.spec.copies) or obs.job.spec.parity is not None


def _kept_elsewhere(obs: Observation) -> bool:
    """Whether the job comes back without the memory of a worker, if not to its newest step."""
    return _from_scratch(obs) or bool(obs.job.status.tiers.get("remote"))


def _from_scratch(obs: Observation) -> bool:
    """Whether there is nothing to lose yet."""
    status = obs.job.status
    return status.recovery is not None and status.restored_version is None


def _current(obs: Observation, pod: PodView) -> Report | None:
    """What its sidecar says of the current attempt, if it answers."""
    known, report = obs.reports.get(pod.uid), obs.report(pod)
    if known is None or known.silent_since is not None or report is None:
        return None
    return report if report.attempt == obs.job.status.attempt else None


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
