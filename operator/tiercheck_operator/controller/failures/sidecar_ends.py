"""A sidecar that ended takes no worker with it: training goes on, and the kubelet starts it again.

Its memory is still there. But until it is back nothing that its worker does is kept, what was on its way was
lost, and it may happen again. So it is told from its end until a new version is complete.
"""

from __future__ import annotations

from collections.abc import Collection

from tiercheck_operator.controller.members.suspicion import is_heard, seconds_silent
from tiercheck_operator.model import conditions
from tiercheck_operator.model.observed import ContainerState, HostSign, Observation, PodView
from tiercheck_operator.model.status import JobRecord, parse_time, rfc3339

_NEXT = (
    "Training goes on. What it held is verified again, and the next version is copied as usual; nothing "
    "is lost unless other pods are lost "
    "before that"
)


def describe_sidecar_end(obs: Observation, record: JobRecord, workers: Collection[int]) -> str:
    """A sentence about a sidecar of `workers` that was restarted since the newest version was complete;
    empty: there is none."""
    tier = record.tiers.get("peer" if obs.copies or obs.job.spec.parity else "local")
    complete = parse_time(tier.time) if tier is not None else None
    for pod in sorted(obs.living, key=lambda pod: (pod.worker, -pod.incarnation)):
        ended = pod.sidecar.ended_at
        if pod.worker not in workers or not pod.sidecar.restarts or ended is None:
            continue
        if complete is None or complete <= ended:
            return f"the sidecar of worker {pod.worker} {_how(pod)} and was restarted. {_NEXT}.{_advice(pod)}"
    return ""


def find_silent_members(obs: Observation) -> list[PodView]:
    """Members of the attempt whose sidecars do not answer, for longer than a call may get lost. None if
    nobody
    answers: that is our own trouble."""
    living = sorted((pod for pod in obs.living if pod.uid in obs.attempt_pods), key=lambda pod: pod.worker)
    if not any(is_heard(obs, pod) for pod in living):
        return []
    return [pod for pod in living if _away(obs, pod)]


def _away(obs: Observation, pod: PodView) -> bool:
    seconds = seconds_silent(obs, pod)
    if seconds is None:
        return False
    refused = obs.reports[pod.uid].host is HostSign.REFUSED
    return pod.sidecar.restarting or refused or seconds > obs.patience.accused


def silent_sidecars_message(obs: Observation) -> tuple[str, str] | None:
    """Reason and message about sidecars that do not answer now; None: all do."""
    pods = find_silent_members(obs)
    if not pods:
        return None
    pod = next((pod for pod in pods if pod.sidecar.restarting), pods[0])
    others = f" ({len(pods)} workers are without theirs)" if len(pods) > 1 else ""
    recovery = obs.job.status.recovery
    trains = (
        "Training goes on"
        if recovery is None or recovery.released_at is not None
        else "The way back waits for it"
    )
    until = (
        f"{trains}; until it is back, no new step of worker {pod.worker} is kept, and its copies of "
        "others get no newer"
    )
    whose = f"the sidecar of worker {pod.worker}{others}"
    if pod.sidecar.restarting:
        kept = "What it holds stays in the pod's memory"
        return (
            conditions.SIDECAR_RESTARTING,
            f"{whose} {_how(pod)} and {_expected(pod)}. {until}. {kept}.{_advice(pod)}",
        )
    if obs.reports[pod.uid].host is HostSign.REFUSED:
        # The kubelet tells of it within a second or two; if it does not, the message says more.
        lately = (seconds_silent(obs, pod) or 0.0) <= obs.patience.suspect
        known = "is gone" if lately else f"is gone, and its kubelet on node {pod.node} has said nothing of it"
        reason = conditions.SIDECAR_RESTARTING if lately else conditions.SIDECAR_NOT_ANSWERING
        return reason, f"the sidecar of worker {pod.worker}{others} in pod {pod.name} {known}. {until}."
    told = (
        f"the sidecar of worker {pod.worker}{others} in pod {pod.name} does not answer, while its "
        "kubelet calls it well"
    )
    return conditions.SIDECAR_NOT_ANSWERING, f"{told}. {until}."


def _expected(pod: PodView) -> str:
    sidecar = pod.sidecar
    if sidecar.state is ContainerState.STARTING:
        return "is starting again"
    if not sidecar.back_off:
        return "is to be started again"
    at = f", until {rfc3339(sidecar.ended_at + sidecar.back_off)}" if sidecar.ended_at is not None else ""
    return f"is started again by its kubelet {sidecar.back_off:.0f} s after its end (CrashLoopBackOff){at}"


def _how(pod: PodView) -> str:
    code = "" if pod.sidecar.exit_code is None else f", exit code {pod.sidecar.exit_code}"
    return f"ended ({pod.sidecar.ended_reason or 'no reason given'}{code})"


def _advice(pod: PodView) -> str:
    if not pod.sidecar.oom_killed:
        return f" Its last words: kubectl logs {pod.name} -c tiercheck-sidecar --previous."
    limit = f" of {pod.sidecar.memory_limit}" if pod.sidecar.memory_limit else ""
    return (
        f" It needed more than its memory limit{limit}, which is tiers.local.sizeLimit and what its own "
        "process needs: raise "
        "tiers.local.sizeLimit."
    )
