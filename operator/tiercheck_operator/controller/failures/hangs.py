"""Detects hung training and stalled restores, and names the worker responsible.

The sidecars notice both. A step couples all ranks, so the cause is at the one that is behind; if all have
finished the same step, only the stacks in the trainers' logs can show it.

A sidecar gives up each source from which nothing comes for `failurePolicy.restoreStallSeconds` and goes on to
the next one, which counts as progress. So a sidecar without progress for longer hangs itself, as in a read of
a dead mount; one that has no source left reports a failed restore. Progress is measured in bytes, not in
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiercheck.protocol.report import Report, RestoreState, TrainerState
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause, Finding, listed, numbered
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import FailedStartRecord, HangRecord, JobRecord, Recovery

_TIMES = 2
"""The number of hangs in a row behind the same worker on the same node after which it moves."""
_PATIENCE = 2.0
"""The multiple of `restoreStallSeconds` that a restore may stall before its worker moves.
Stalls that the sidecar resolves itself have ended by then."""
_NAMED = 4
_MOST = 2**60
"""The maximum number of bytes that is accepted: the API has 64 bits for the sum."""


@dataclass(frozen=True)
class Hang:
    since: float
    """The last sign of life, unix seconds by a node's clock."""
    message: str
    straggler: PodView | None
    """The pod of the worker that is behind all others; None: no single one is."""


def find_hang(obs: Observation, pods: Mapping[int, PodView]) -> Hang | None:
    """Returns the hang of the current attempt; None if there is none. `pods`: by worker."""
    reports = {worker: obs.current_reports.get(pods[worker].uid) for worker in sorted(pods)}
    running = {
        worker: report
        for worker, report in reports.items()
        if report is not None and report.trainer.state is TrainerState.RUNNING
    }
    stalled = [
        report.trainer.stalled_since
        for report in running.values()
        if report.trainer.stalled_since is not None
    ]
    if not stalled:
        return None
    since = min(stalled)
    worker = _behind(running) if len(running) == obs.size else None
    idle = max(0.0, obs.now - since)
    return Hang(
        since,
        f"no step for {idle:.0f} s: {describe_ended(obs, pods) or _hang_message(running, worker)}",
        None if worker is None else pods[worker],
    )


def describe_ended(obs: Observation, pods: Mapping[int, PodView]) -> str:
    """Returns a sentence about commands that have ended with 0, which others may wait for; empty: none."""
    reports = {worker: obs.current_reports.get(pods[worker].uid) for worker in sorted(pods)}
    ended = [
        worker
        for worker, report in reports.items()
        if report is not None and report.trainer.state is TrainerState.SUCCEEDED
    ]
    if not ended:
        return ""
    return (
        f"the training command of {numbered(ended, _NAMED)} had ended with exit code 0 before: all ranks "
        "must make the same steps"
    )


def find_repeat_straggler(obs: Observation, pods: Mapping[int, PodView]) -> PodView | None:
    """Returns the pod that holds the others up as last time, on the same node. `pods`: by worker."""
    found = find_hang(obs, pods) if obs.job.status.hang is not None else None
    record = note_hang(obs.job.status, found)
    return found.straggler if found is not None and record is not None and record.times >= _TIMES else None


def note_hang(status: JobRecord, hang: Hang | None) -> HangRecord | None:
    """Returns the record for the status when a hang leads to a new attempt."""
    if hang is None or hang.straggler is None or hang.straggler.node is None:
        return None
    worker, node = hang.straggler.worker, hang.straggler.node
    return HangRecord(worker, node, count_in_a_row(status.hang, worker, node))


def count_in_a_row(before: HangRecord | FailedStartRecord | None, worker: int, node: str | None) -> int:
    """Returns how often in a row the worker was at fault on this node, this time included."""
    same = before is not None and (before.worker, before.node) == (worker, node)
    return before.times + 1 if before is not None and same else 1


def _behind(running: Mapping[int, Report]) -> int | None:
    """Returns the one worker with a slowest rank behind those of all others; None if there is none."""
    steps = {worker: _step(report) for worker, report in running.items()}
    last = min(steps.values())
    found = [worker for worker, step in steps.items() if step == last]
    return found[0] if len(found) == 1 and len(steps) > 1 else None


def _step(report: Report) -> int:
    return -1 if report.trainer.slowest_step is None else report.trainer.slowest_step


def _hang_message(running: Mapping[int, Report], behind: int | None) -> str:
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


def why_stalled(obs: Observation, report: Report) -> str:
    """Returns why the worker should be restored on another node; empty: no need, or it has moved for that."""
    recovery = obs.job.status.recovery
    if recovery is None or recovery.released_at is not None or report.worker in recovery.stalled:
        return ""
    restore, bound = report.restore, obs.job.spec.restore_stall
    if _idle(report) > _PATIENCE * bound:
        return f"its restore stood still for {_idle(report):.0f} s ({_waits_for(report)})"
    if restore.state is RestoreState.FAILED and restore.stalled and _tried_before(recovery):
        return f"its restore failed again: nothing came from {_named(restore.stalled)}"
    return ""


def describe_stalled_restore(
    obs: Observation, status: JobRecord, reports: Mapping[int, Report]
) -> Finding | None:
    """Returns the finding for Restoring; None if no restore stalls. `reports`: of the attempt, by worker."""
    recovery = status.recovery
    if recovery is None or recovery.released_at is not None:
        return None
    bound = obs.job.spec.restore_stall
    still = [worker for worker in sorted(reports) if _idle(reports[worker]) > bound]
    if not still:
        return None
    first = still[0]
    others = f" and those of {len(still) - 1} other workers" if len(still) > 1 else ""
    next_one = "If others get on, and hold what it holds, it moves to another node"
    if first in recovery.stalled:
        next_one = "It has moved for that once already, so its node is not to blame"
    return Finding(
        conditions.RESTORE_STALLED,
        f"the restore of worker {first}{others} stands still: nothing came for more than {bound:.0f} s "
        f"({_waits_for(reports[first])}). {next_one}. Look at what it waits for",
    )


def restored_bytes(reports: Mapping[int, Report]) -> tuple[int, int]:
    """Returns the bytes restored and the bytes to restore, of all workers as far as is known."""
    done = wanted = 0
    for report in reports.values():
        progress, here = report.restore.progress, sum(rank.bytes for rank in report.restore.ranks)
        done += here if progress is None else progress.bytes
        wanted += here if progress is None else progress.wanted
    return min(max(0, done), _MOST), min(max(0, wanted), _MOST)


def _idle(report: Report) -> float:
    """Returns the seconds for which its restore has made no progress."""
    running = report.restore.state is RestoreState.RUNNING
    return report.restore.progress.idle_seconds if running and report.restore.progress is not None else 0.0


def _waits_for(report: Report) -> str:
    sources = report.restore.progress.sources if report.restore.progress is not None else ()
    return f"it waits for {_named(sources)}" if sources else "its sidecar does not say for what"


def _named(sources: tuple[str, ...]) -> str:
    return listed([source[:100] for source in sources], _NAMED)


def _tried_before(recovery: Recovery) -> bool:
    """Returns whether an earlier restore of this recovery failed, before that of the current attempt."""
    noted = recovery.decided_at is None and recovery.cause == Cause.RESTORE_FAILED.value
    return len(recovery.failed_versions) > noted
