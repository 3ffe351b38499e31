"""Workers are numbered anew when a job changes its size: who is who for us, for the sidecars themselves, and in what they said before.

A pod is the worker that its label says. Its sidecar hears of that with the next attempt's directive; until then it reports, and is spoken
of by others, under its old number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tiercheck.protocol.report import Quarantined, Report
from tiercheck_operator.model.observed import Observation, PodView


def reports_of(obs: Observation, members: Mapping[int, PodView]) -> list[Report]:
    """The newest report of each member that has one, by worker, in today's numbers."""
    now: dict[int, int] = {}
    found = []
    for worker in sorted(members):
        report, known = obs.report(members[worker]), obs.reports.get(members[worker].uid)
        if report is None or known is None or known.report is None:
            continue
        now[known.report.worker] = worker
        found.append(report)
    if all(before == worker for before, worker in now.items()):
        return found
    return [replace(report, quarantined=tuple(_renumbered(report.quarantined, now))) for report in found]


def known_as(obs: Observation, pods: Iterable[PodView]) -> dict[int, PodView]:
    """Pods of the current attempt by the worker that each knows itself to be in it."""
    found = {}
    for pod in pods:
        known = obs.reports.get(pod.uid)
        report = known.report if known is not None else None
        follows = report is not None and report.attempt == obs.job.status.attempt and report.worker >= 0
        found[report.worker if report is not None and follows else pod.worker] = pod
    return found


def _renumbered(entries: Iterable[Quarantined], now: Mapping[int, int]) -> Iterable[Quarantined]:
    """What was found bad at workers that are no more counts against nobody; at no worker (the remote tier), and everywhere, as before."""
    for entry in entries:
        if entry.worker < 0 or entry.everywhere:
            yield entry
        elif entry.worker in now:
            yield replace(entry, worker=now[entry.worker])
