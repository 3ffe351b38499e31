"""How training commands ended, and which of their ends was the first: the others' collectives broke because of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from tiercheck.protocol.reasons import COLLECTIVE_FAILED, CONTAINER_RESTARTED, GPU_FAULT, OOM_KILLED, VANISHED
from tiercheck.protocol.report import Report, TrainerReport
from tiercheck_operator.controller.suspicion import trainer_failed
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import Facts

_SIGKILL, _SIGTERM = 137, 143
_ECHOES = {1, 134, _SIGTERM}
"""Exit codes that a rank has whose partner is gone: an exception, the abort of a collective's watchdog, SIGTERM."""
_HINTS = {
    135: "A bus error is most often a full /dev/shm: mount an emptyDir with medium Memory there in spec.template.",
}
"""What is worth knowing about an exit code."""
_SAME_TIME = 5.0
"""Seconds between ends of which nobody knows which was the first: the nodes' clocks differ."""
_CLOCK = 2.0
"""Seconds; a kubelet's times are whole seconds."""


def failed_trainers(obs: Observation, members: Mapping[int, PodView]) -> list[Report]:
    """Reports of members whose trainer failed in the current attempt, the likely origin of the trouble in front: by what speaks
    against it, and among those with equal evidence by time.
    """
    reports = _failed(obs, members)
    ends = {report.worker: report.trainer.ended_at or obs.now for report in reports}
    evidence = {report.worker: _evidence(report.trainer, members[report.worker]) for report in reports}
    strongest = min(evidence.values(), default=_Evidence.STOPPED)
    first = min((ends[worker] for worker, found in evidence.items() if found is strongest), default=0.0)

    def order(report: Report) -> tuple[int, bool, float, int]:
        ended, pod = ends[report.worker], members[report.worker]
        from_outside = ended <= first + _SAME_TIME and _from_outside(report.trainer, pod)
        return evidence[report.worker], not from_outside, ended, report.worker

    return sorted(reports, key=order)


def sole_origin(obs: Observation, members: Mapping[int, PodView]) -> Report | None:
    """Of the one member against which more speaks than against any other; None: there is no such one."""
    found = sorted(
        (_evidence(report.trainer, members[report.worker]), report.worker) for report in _failed(obs, members)
    )
    if not found or (len(found) > 1 and found[0][0] == found[1][0]):
        return None
    return obs.report(members[found[0][1]])


def _failed(obs: Observation, members: Mapping[int, PodView]) -> list[Report]:
    reports = [obs.report(pod) for pod in members.values() if trainer_failed(obs, pod)]
    return [report for report in reports if report is not None]


class _Evidence(IntEnum):
    """What an end says about its being the origin. Less is stronger."""

    OWN = 0
    """Nothing that happened to another rank ends a process like this."""
    MUTE = 1
    """No rank said why: as when one is killed behind torchrun, which ends with 1 then."""
    ECHO = 2
    """The rank itself speaks of a peer's connection."""
    STOPPED = 3
    """Somebody told it to end."""


def _evidence(trainer: TrainerReport, pod: PodView) -> _Evidence:
    if _from_outside(trainer, pod):
        return _Evidence.OWN
    if trainer.failure is not None and trainer.failure.reason != VANISHED:
        return _Evidence.ECHO if trainer.failure.reason == COLLECTIVE_FAILED else _Evidence.OWN
    if trainer.exit_code == _SIGTERM:
        return _Evidence.STOPPED
    return _Evidence.MUTE if trainer.exit_code in _ECHOES else _Evidence.OWN


def _from_outside(trainer: TrainerReport, pod: PodView) -> bool:
    """Whether kernel, driver or kubelet ended it, whatever its ranks have said meanwhile."""
    said = trainer.failure.reason if trainer.failure is not None else ""
    return oom_killed(trainer, pod) or trainer.exit_code == _SIGKILL or said == GPU_FAULT


def cause_of_exit(report: Report, pod: PodView) -> Cause:
    """Of a training command that failed."""
    return Cause.OOM_KILLED if oom_killed(report.trainer, pod) else Cause.TRAINER_CRASH


def facts_of_exit(report: Report, pod: PodView) -> Facts:
    """What rules may ask about it."""
    trainer = report.trainer
    reasons = [trainer.reason] if trainer.reason else []
    if trainer.reason == CONTAINER_RESTARTED and _ended_now(trainer, pod) and pod.trainer.ended_reason:
        reasons.append(pod.trainer.ended_reason)
    code = trainer.exit_code
    if trainer.failure is not None:
        reasons.append(trainer.failure.reason)
        code = trainer.failure.exit_code or code  # that of torchrun says nothing
    return Facts(code, tuple(reasons), (pod.node,) if pod.node else ())


def describe_exit(report: Report, pod: PodView | None = None) -> str:
    """One sentence about how a training command ended, and what to do if that is known."""
    trainer = report.trainer
    code = "" if trainer.exit_code is None else f" with exit code {trainer.exit_code}"
    if pod is not None and oom_killed(trainer, pod):
        return _out_of_memory(report, pod, code)[:1000]
    reason = f" ({trainer.reason})" if trainer.reason else ""
    detail = f": {trainer.message}" if trainer.message else ""
    if trainer.exit_code in _HINTS:
        detail = f"{detail or '.'} {_HINTS[trainer.exit_code]}"
    if trainer.failure is not None:
        said = trainer.failure
        own = f" (exit code {said.exit_code})" if said.exit_code not in (0, 1, trainer.exit_code) else ""
        detail = f": rank {said.rank}: {said.message}{own}"
    return f"the training command of worker {report.worker} ended{code}{reason}{detail}"[:1000]


def oom_killed(trainer: TrainerReport, pod: PodView) -> bool:
    """Whether want of memory ended the command: one of its processes by the launcher's word, or the whole container by the kubelet's."""
    if trainer.reason == OOM_KILLED:
        return True
    return trainer.reason == CONTAINER_RESTARTED and pod.trainer.oom_killed and _ended_now(trainer, pod)


def _ended_now(trainer: TrainerReport, pod: PodView) -> bool:
    """Whether the last end of the container that the kubelet has told of is that of this attempt."""
    ended = pod.trainer.ended_at
    return ended is not None and ended >= (trainer.started_at or 0.0) - _CLOCK


def _out_of_memory(report: Report, pod: PodView, code: str) -> str:
    limit = pod.trainer.memory_limit
    bound = f"its memory limit of {limit}" if limit else "the memory of its node, for it has no limit of its own"
    said = f" {report.trainer.message}" if report.trainer.reason == OOM_KILLED and report.trainer.message else ""
    return (
        f"the trainer container of worker {report.worker} needed more than {bound}, and was killed for it{code} (OOMKilled).{said} "
        "Raise resources.limits.memory of the container trainer in spec.template, or load less into memory: fewer data-loader workers, "
        "smaller prefetch. The slots of tiers.local are not part of it; they are charged to the sidecar"
    )
