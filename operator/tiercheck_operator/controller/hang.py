"""Training that stands still although every process is there: which worker holds the others up, and whether it did before.

The sidecars notice it (`tiercheck_sidecar/stall_watch.py`). A step couples all ranks, so the one that is behind is the one to look
at; where all have finished the same step, only the stacks in the trainers' logs can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiercheck.protocol.report import Report, TrainerState
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import HangRecord, JobRecord

_TIMES = 2
"""Hangs in a row behind the same worker on the same node after which it moves."""


@dataclass(frozen=True)
class Hang:
    since: float
    """Last sign of life, unix seconds by a node's clock."""
    message: str
    laggard: PodView | None
    """The pod of the worker that is behind all others; None: no single one is."""


def find_hang(obs: Observation, pods: Mapping[int, PodView]) -> Hang | None:
    """What is known of a hang of the current attempt; None: there is none. `pods`: by worker."""
    running = {worker: report for worker in sorted(pods) if (report := _running(obs, pods[worker])) is not None}
    stalled = [report.trainer.stalled_since for report in running.values() if report.trainer.stalled_since is not None]
    if not stalled:
        return None
    since = min(stalled)
    worker = _behind(running) if len(running) == obs.job.spec.workers else None
    idle = max(0.0, obs.now - since)
    return Hang(since, f"no step for {idle:.0f} s: {_told(running, worker)}", None if worker is None else pods[worker])


def held_up_again(obs: Observation, pods: Mapping[int, PodView]) -> PodView | None:
    """The pod whose worker holds the others up as it did the last time, on the same node. `pods`: by worker."""
    before = obs.job.status.hang
    if before is None or before.times + 1 < _TIMES:
        return None
    found = find_hang(obs, pods)
    laggard = found.laggard if found is not None else None
    return laggard if laggard is not None and (laggard.worker, laggard.node) == (before.worker, before.node) else None


def remembered(status: JobRecord, hang: Hang | None) -> HangRecord | None:
    """For the status, when a hang leads to a new attempt."""
    if hang is None or hang.laggard is None or hang.laggard.node is None:
        return None
    worker, node, before = hang.laggard.worker, hang.laggard.node, status.hang
    again = before is not None and (before.worker, before.node) == (worker, node)
    return HangRecord(worker, node, before.times + 1 if before is not None and again else 1)


def _running(obs: Observation, pod: PodView) -> Report | None:
    report = obs.report(pod)
    current = report is not None and report.attempt == obs.job.status.attempt
    return report if report is not None and current and report.trainer.state is TrainerState.RUNNING else None


def _behind(running: Mapping[int, Report]) -> int | None:
    """The one worker whose slowest rank is behind those of all others."""
    steps = {worker: _step(report) for worker, report in running.items()}
    last = min(steps.values())
    found = [worker for worker, step in steps.items() if step == last]
    return found[0] if len(found) == 1 and len(steps) > 1 else None


def _step(report: Report) -> int:
    return -1 if report.trainer.slowest_step is None else report.trainer.slowest_step


def _told(running: Mapping[int, Report], behind: int | None) -> str:
    steps = [_step(report) for worker, report in running.items() if worker != behind]
    logs = "the stacks of its ranks are in the log of its container trainer"
    if behind is not None:
        rank, step = running[behind].trainer.slowest_rank, running[behind].trainer.slowest_step
        where = "has not made a step in this attempt" if step is None else f"(rank {rank}) is at step {step}"
        return f"worker {behind} {where}, all others at step {min(steps)} or later; {logs}"
    logs = "the stacks of the ranks are in the logs of the containers trainer"
    if max(steps) < 0:
        return f"no worker has made a step in this attempt; {logs}"
    return f"no single worker is behind, the newest step is {max(steps)}; {logs}"
