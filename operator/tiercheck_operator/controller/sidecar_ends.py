"""A sidecar that ended takes no worker with it: training goes on, its memory is still there, and the kubelet starts it again.

But what was on its way was lost, and it may happen again, so it is told until a new version is complete.
"""

from __future__ import annotations

from collections.abc import Collection

from tiercheck_operator.controller.observation import Observation, PodView
from tiercheck_operator.controller.record import JobRecord, parse_time

_NEXT = (
    "Training goes on. What it held is verified again, and the next version is copied as usual; nothing is lost unless other pods are lost "
    "before that"
)


def sidecar_ended(obs: Observation, record: JobRecord, workers: Collection[int]) -> str:
    """A sentence about a sidecar of `workers` that was restarted since the newest version was complete; empty: there is none."""
    tier = record.tiers.get("peer" if obs.job.spec.copies or obs.job.spec.parity else "local")
    complete = parse_time(tier.time) if tier is not None else None
    for pod in sorted(obs.pods, key=lambda pod: (pod.worker, -pod.incarnation)):
        ended = pod.sidecar.ended_at
        if pod.worker not in workers or pod.terminal or pod.deleting or not pod.sidecar.restarts or ended is None:
            continue
        if complete is None or complete <= ended:
            return f"the sidecar of worker {pod.worker} {_how(pod)} and was restarted. {_NEXT}.{_advice(pod)}"
    return ""


def _how(pod: PodView) -> str:
    code = "" if pod.sidecar.exit_code is None else f", exit code {pod.sidecar.exit_code}"
    return f"ended ({pod.sidecar.ended_reason or 'no reason given'}{code})"


def _advice(pod: PodView) -> str:
    if not pod.sidecar.oom_killed:
        return f" Its last words: kubectl logs {pod.name} -c tiercheck-sidecar --previous."
    limit = f" of {pod.sidecar.memory_limit}" if pod.sidecar.memory_limit else ""
    return (
        f" It needed more than its memory limit{limit}, which is tiers.local.sizeLimit and what its own process needs: raise "
        "tiers.local.sizeLimit."
    )
