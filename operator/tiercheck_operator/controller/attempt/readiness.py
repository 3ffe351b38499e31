"""Says what a new attempt still waits for.

An attempt begins only when every worker has a pod whose sidecar answered after the failure was noticed: older
answers cannot tell a crash from a node that has just gone. And it must have answered just now: what a sidecar
holds changes at every step without news of it, and what was on its way when the failure struck has arrived
since.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.artifacts.sizing import LONGEST_CADENCE
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Version
from tiercheck_operator.controller.failures.exits import crash_pause
from tiercheck_operator.controller.members.capacity import (
    describe_owner,
    describe_shortage,
    refused_workers,
)
from tiercheck_operator.controller.members.places import describe_newest_place
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import ProbeSidecar
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import Recovery

_FRESH, _FRESH_PER_WORKER = 1.0, 0.005
"""Seconds that an answer is good for; more for many workers, because to ask them all takes its time."""
_EXPLAINED = 8
"""Restores that may fail in a row without a pause, each because another copy turned out to be bad."""


@dataclass(frozen=True)
class Waiting:
    """Reason and message for a condition; `probes` to send, and when to look again at the latest."""

    reason: str
    message: str
    probes: tuple[ProbeSidecar, ...] = ()
    wake_after: float | None = None


def waiting_for_pods(situation: Situation) -> Waiting | None:
    """Until every worker has a pod with an address."""
    missing = situation.membership.missing(situation.size)
    if missing and not refused_workers(situation):
        told = f"workers without a pod: {_some(missing)}{describe_newest_place(situation)}"
        resized = describe_owner(situation)
        reason = conditions.OWNER_RESIZED if resized else conditions.WAITING_FOR_PODS
        return Waiting(reason, f"{told}. {resized}" if resized else told, wake_after=1.0)
    if situation.membership.beyond:
        told = f"{len(situation.membership.beyond)} survivors take the places of lost workers"
        return Waiting(conditions.WAITING_FOR_PODS, told, wake_after=1.0)
    gated = [pod for pod in situation.members.values() if pod.gates]
    if gated:
        gates = ", ".join(sorted({gate for pod in gated for gate in pod.gates})[:4])
        text = (
            f"{len(gated)} of {situation.size} pods wait to be admitted (scheduling gates {gates}): workers "
        )
        return Waiting(conditions.WAITING_FOR_QUEUE, text + _some([pod.worker for pod in gated]))
    lack = describe_shortage(situation)
    if lack is not None:
        return Waiting(lack.reason, lack.message, wake_after=lack.wake_after)
    pending = [pod for pod in situation.members.values() if not pod.ip]
    if pending:
        said = next((f"; {pod.name}: {pod.message}" for pod in pending if pod.message), "")
        said += describe_newest_place(situation)
        return Waiting(
            conditions.WAITING_FOR_PODS, f"pods not up yet: {_some([pod.worker for pod in pending])}{said}"
        )
    return None


def waiting_for_sidecars(situation: Situation, recovery: Recovery) -> Waiting | None:
    """Until every sidecar has answered since the failure was noticed, and lately."""
    lately = _FRESH + _FRESH_PER_WORKER * situation.size
    since = max(recovery.detected_at, situation.now - lately)
    owing = [pod for pod in situation.members.values() if not _answered(situation, pod, since)]
    if not owing:
        return None
    # Those that have answered are only asked once more; to name one now and then would change at every look.
    silent = [pod for pod in owing if not _answered(situation, pod, recovery.detected_at)]
    said = next((f"; {pod.name}: {pod.message}" for pod in silent if pod.message), "")
    said = said or _failing_calls(situation, silent)
    told = f"no answer yet from the sidecars of workers {_some([pod.worker for pod in silent])}{said}"
    return Waiting(
        conditions.WAITING_FOR_SIDECARS,
        told if silent else "the sidecars are asked once more what they hold",
        tuple(ProbeSidecar(pod.uid) for pod in owing),
        wake_after=1.0,
    )


def _failing_calls(obs: Observation, pods: list[PodView]) -> str:
    """What becomes of calls to sidecars that have not answered for a while, as a clause; empty: nothing."""
    for pod in pods:
        known = obs.reports.get(pod.uid)
        if known is None or known.silent_since is None or not known.failure:
            continue
        if obs.now - known.silent_since > obs.patience.suspect:
            return (
                f"; calls to {pod.name} ({pod.ip}) are {known.failure}. Network policies and service "
                "meshes must leave its ports 8470 to 8472 alone"
            )
    return ""


def waiting_for_hand_over(obs: Observation) -> Waiting | None:
    """While a pod that is being ended says that its holders lack something: the next attempt would refuse
    it.
    """
    for pod in (pod for pod in obs.pods if pod.deleting and pod.uid in obs.attempt_pods):
        known, since = obs.reports.get(pod.uid), pod.deleted_at
        if since is None or known is None or known.report is None:
            continue
        left = since + obs.patience.hand_over - obs.now
        mine = known.silent_since is None and known.report.attempt == obs.job.status.attempt
        if mine and known.report.owes and left > 0:
            said = f"{pod.name} is being ended, and brings its holders what they lack"
            return Waiting(conditions.HANDING_OVER, said, (ProbeSidecar(pod.uid),), wake_after=min(left, 1.0))
    return None


def waiting_for_explanation(obs: Observation, recovery: Recovery) -> Waiting | None:
    """After a crash: until a pod or node loss that explains it would have shown."""
    if Cause.parse(recovery.cause) not in (Cause.TRAINER_CRASH, Cause.OOM_KILLED):
        return None
    left = recovery.detected_at + crash_pause(obs, recovery) - obs.now
    if left <= 0:
        return None
    return Waiting(conditions.SETTLING, recovery.message, wake_after=left)


def waiting_to_retry(obs: Observation, recovery: Recovery) -> Waiting | None:
    """After a restore that failed: a moment, unless it is the first time or a bad copy explains it."""
    if Cause.parse(recovery.cause) is not Cause.RESTORE_FAILED or obs.job.status.recovery is None:
        return None
    reports = [known.report for known in obs.reports.values() if known.report is not None]
    times, tried = len(recovery.failed_versions), obs.job.status.restored_version
    if times < 2 or tried is None:
        return None
    current = [report for report in reports if report.attempt == obs.job.status.attempt]
    if times < _EXPLAINED and any(_explains(report, tried) for report in current):
        return None
    left = recovery.detected_at + obs.patience.retry - obs.now
    return Waiting(conditions.RETRYING, recovery.message, wake_after=left) if left > 0 else None


def _explains(report: Report, tried: Version) -> bool:
    """Whether a copy that the restore of `tried` may have needed was found bad."""
    return any(
        tried.step - LONGEST_CADENCE <= entry.version.step <= tried.step for entry in report.quarantined
    )


def _answered(obs: Observation, pod: PodView, since: float) -> bool:
    known = obs.reports.get(pod.uid)
    return (
        known is not None
        and known.report is not None
        and known.silent_since is None
        and known.holdings_at is not None
        and known.holdings_at >= since
    )


def _some(workers: list[int]) -> str:
    listed = ", ".join(str(worker) for worker in sorted(workers)[:8])
    return listed if len(workers) <= 8 else f"{listed} and {len(workers) - 8} more"
