"""Replaces pods that have to go although Kubernetes keeps them: by a deadline, or off a bad node.

Before a deadline the replacement is made beside the old pod. Until its sidecar and its launcher wait, the old
pod stays the worker's member; if no node has room, it stays so, and the status reports that. Then the old pod
is deleted: its end stops all ranks within a step, and only then the version to resume from is chosen.

Pods leave a bad node one at a time while there is state to lose, and only if others keep what they hold: a
pod that moves loses its memory. If training can begin again in the old place, it is enough that the spec asks
for copies; if not, a pod waits until others have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.names import GPU_FAULT
from tiercheck.protocol.report import Report, RestoreState, TrainerState
from tiercheck_operator.controller.failures.exits import describe_exit, fails_again
from tiercheck_operator.controller.failures.hangs import find_repeat_straggler, why_stalled
from tiercheck_operator.controller.members.suspicion import SuspectedPod, is_answering
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause, Finding
from tiercheck_operator.model.observed import Observation, PodView, Refusal

_TOGETHER = 60.0
"""Seconds. Ready replacements wait for one that is coming up only while it is younger than this."""
_HAND_OVER = 600.0
"""Seconds that a pod in which no attempt can begin gets to send its holders what they lack."""


@dataclass(frozen=True)
class Departure:
    """The move of a worker from one pod to another."""

    worker: int
    old: PodView
    new: PodView | None
    """The replacement; None: not made yet."""
    why: str


@dataclass(frozen=True)
class Assignment:
    """The choice of each worker's member among its living pods."""

    members: Mapping[int, PodView]
    departures: Mapping[int, Departure]
    """The moves under way or to be begun; the old pod is the member."""
    due: tuple[Departure, ...]
    """The departures with an old pod that is to be deleted at once."""


def assign(obs: Observation, living: Mapping[int, Sequence[PodView]]) -> Assignment:
    """Chooses the members. `living`: each worker's pods that are not lost, newest first, at least one."""
    members: dict[int, PodView] = {}
    pairs: dict[int, Departure] = {}
    departures: dict[int, Departure] = {}
    for worker, pods in living.items():
        # A living member of the attempt stays: if it need not leave any more, its replacement is removed.
        old = next((pod for pod in pods if pod.uid in obs.attempt_pods), pods[0])
        why = obs.why_leaving(old)
        members[worker] = old
        if why and old is not pods[0]:
            pairs[worker] = Departure(worker, old, pods[0], why)
        elif why:
            departures[worker] = Departure(worker, old, None, why)
    new = {worker: way.new for worker, way in pairs.items() if way.new is not None}
    ready = {worker for worker, pod in new.items() if is_ready(obs, pod) and not obs.why_leaving(pod)}
    # One restart for all that leave together: ready pods wait a while for those that are coming up.
    patient = any(
        pod.unschedulable_since is None and obs.now - pod.began < _TOGETHER
        for worker, pod in new.items()
        if worker not in ready
    )
    due = () if patient else tuple(pairs[worker] for worker in sorted(ready))
    return Assignment(members, {**departures, **pairs}, due)


def describe_departures(
    departures: Mapping[int, Departure], refused: Mapping[int | str, Refusal]
) -> Finding | None:
    """Returns the finding for the condition Placed; None if no worker is moving."""
    if not departures:
        return None
    first = departures[min(departures)]
    others = f" ({len(departures)} workers in all)" if len(departures) > 1 else ""
    text = f"worker {first.worker}{others} is to leave {first.old.name}: {first.why}. "
    if first.new is not None and first.new.unschedulable:
        return Finding(
            conditions.NO_ROOM_TO_MOVE,
            f"{text}It stays and trains on, because no node has room for its replacement {first.new.name}: "
            f"{first.new.message.rstrip('.')}. Add nodes before it is ended.",
        )
    refusal = refused.get(first.worker)
    if first.new is None and refusal is not None and refusal.is_shown:
        said = f"because its replacement is refused: {refusal.sentence.rstrip('.')}"
        text = f"{text}It stays and trains on, {said}. Make room before it is ended."
        return Finding(conditions.REFUSED, text)
    return Finding(conditions.MOVING, f"{text}It trains on until its replacement is ready.")


def is_ready(obs: Observation, pod: PodView) -> bool:
    """Returns whether the pod could be directed to restore at once."""
    report = obs.report(pod) if pod.node is not None and is_answering(obs, pod) else None
    return report is not None and report.trainer.state is TrainerState.WAITING


def find_moves(obs: Observation) -> Mapping[str, SuspectedPod]:
    """Returns the pods that are to be replaced on other nodes, by UID."""
    pods = _attempt_pods_by_worker(obs)
    barred = _barred(obs, pods)
    if barred:
        return barred
    start = fails_again(obs, pods) if _shared(obs) or _from_scratch(obs) else None
    if start is not None:
        why = (
            f"{describe_exit(start)}; that was before its first step, as the last time on this node, "
            "which is avoided"
        )
        return {pods[start.worker].uid: SuspectedPod(Cause.START_FAILED, why, start.trainer.ended_at)}
    if not _shared(obs):
        return {}
    again = find_repeat_straggler(obs, pods)
    if again is not None:
        return {again.uid: SuspectedPod(Cause.HUNG, "it held all others up again; its node is avoided", None)}
    if differed := _differed(obs, pods):
        return differed
    faulty = [(pod, report) for pod in pods.values() if (report := _gpu_fault(obs, pod)) is not None]
    if len(faulty) != 1:
        return {}  # faults of several GPUs at once are not one GPU's fault
    pod, report = faulty[0]
    said = report.trainer.failure
    why = pod.ill or (f"rank {said.rank}: {said.message}" if said is not None else "")
    why = f"{why}; its node is avoided"
    return {pod.uid: SuspectedPod(Cause.GPU_FAULT, why, report.trainer.ended_at)}


def _differed(obs: Observation, pods: Mapping[int, PodView]) -> Mapping[str, SuspectedPod]:
    """Returns the one pod where a suspected step gave other bits when it was repeated, else nothing.
    All ranks must have made a step, and all workers have compared: several that differ are not one's fault.
    """
    known = [
        (pod, report.trainer.resume) for pod in pods.values() if (report := obs.current_reports.get(pod.uid))
    ]
    proofs = [(pod, proof) for pod, proof in known if proof is not None]
    found = [(pod, proof) for pod, proof in proofs if proof.suspected]
    if len(found) != 1 or len(proofs) < obs.size or obs.job.status.recovery is not None:
        return {}
    pod, proof = found[0]
    why = f"rank {proof.rank}: {proof.message}; its node is avoided"
    return {pod.uid: SuspectedPod(Cause.STEP_DIFFERED, why, None)}


def _barred(obs: Observation, pods: Mapping[int, PodView]) -> Mapping[str, SuspectedPod]:
    """Returns pods in which no attempt can begin and that may be moved.
    All others wait for them, so there is time to copy what such a pod holds."""
    # Not all need to have received the attempt's directive: an operator that died while it sent them left
    # some out, and none is sent once a restore has failed. Their restore of an earlier attempt counts too.
    answering = {uid for uid, known in obs.reports.items() if known.silent_since is None} & obs.attempt_pods
    reports = {
        worker: report
        for worker, pod in pods.items()
        if pod.uid in answering and (report := obs.newest_reports.get(pod.uid)) is not None
        if pod.uid in obs.current_reports or report.restore.state is RestoreState.READY
    }
    found = {
        worker: _bar(obs, reports[worker])
        for worker in sorted(reports)
        if pods[worker].uid in obs.current_reports
    }
    moves = {worker: move for worker, move in found.items() if move is not None}
    if not moves or len(moves) == obs.size > 1:
        return {}  # what keeps all of them is not the fault of one node: storage perhaps, or the check itself
    comes_back = _shared(obs) or _from_scratch(obs) or bool(obs.job.status.tiers.get("remote"))
    if len(reports) < obs.size or not comes_back:
        return {}
    others = [report for worker, report in reports.items() if worker not in moves]
    stalled = {worker for worker, move in moves.items() if move.cause is Cause.RESTORE_STALLED}
    running = {worker for worker, report in reports.items() if report.restore.state is RestoreState.RUNNING}
    if running - stalled or any(report.trainer.busy for report in others):
        return {}
    going = list(moves)
    if not _from_scratch(obs):
        going = [n for n in moves if not _needed(obs, reports[n], restored=n not in stalled)][:1]
    return {pods[worker].uid: moves[worker] for worker in going}


def _needed(obs: Observation, report: Report, *, restored: bool) -> bool:
    """Returns whether the sidecar has data that its holders lack, or does not know yet what they lack.
    Only a `restored` one ever learns that. After `_HAND_OVER` the answer is False: a holder may have no room.
    """
    recovery = obs.job.status.recovery
    begun = recovery.decided_at if recovery is not None else None
    if begun is not None and obs.now - begun > _HAND_OVER:
        return False
    unheard = restored and report.watermarks.local is None and not obs.job.status.resized_from
    return report.holders_lack or unheard


def _bar(obs: Observation, report: Report) -> SuspectedPod | None:
    trainer = report.trainer
    if trainer.stuck:
        return SuspectedPod(Cause.STUCK, f"{trainer.stuck}; its node is avoided", None)
    if trainer.unhealthy:
        return SuspectedPod(Cause.HEALTH_CHECK_FAILED, f"{trainer.unhealthy}; its node is avoided", None)
    stalled = why_stalled(obs, report)
    return SuspectedPod(Cause.RESTORE_STALLED, f"{stalled}; its node is avoided", None) if stalled else None


def _shared(obs: Observation) -> bool:
    """Returns whether other workers keep what one holds."""
    return bool(obs.copies) or obs.job.spec.parity is not None


def _from_scratch(obs: Observation) -> bool:
    """Returns whether there is no state to lose yet."""
    status = obs.job.status
    return status.recovery is not None and status.restored_version is None


def _attempt_pods_by_worker(obs: Observation) -> Mapping[int, PodView]:
    """Returns each worker's pod that the attempt began with, else the newest one.
    A newer one is beside it if an operator made that and died before it recorded why."""
    pods: dict[int, PodView] = {}
    for pod in sorted(obs.living, key=lambda pod: (pod.uid in obs.attempt_pods, pod.incarnation)):
        if 0 <= pod.worker < obs.size:
            pods[pod.worker] = pod
    return pods


def _gpu_fault(obs: Observation, pod: PodView) -> Report | None:
    report = obs.current_reports.get(pod.uid)
    if report is None or report.trainer.state is not TrainerState.FAILED:
        return None
    said = report.trainer.failure
    return report if pod.ill or (said is not None and said.reason == GPU_FAULT) else None
