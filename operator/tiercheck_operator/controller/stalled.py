"""Restores that stand still: what they wait for, from when on that is told, and where a worker cannot be brought back at all.

A sidecar gives up each source from which nothing comes for `failurePolicy.restoreStallSeconds` and goes on to the next one, which counts as progress. So one that
stands still for longer hangs itself, as in a read of a dead mount; and one that has no source left says so by a restore that failed.
Bytes count, not the time that they take.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiercheck.protocol.report import Report, RestoreState
from tiercheck_operator.model import conditions
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord, Recovery

_PATIENCE = 2.0
"""Times `restoreStallSeconds` that a restore may stand still before its worker moves: what may pass in the sidecar passes before."""
_NAMED = 4
_MOST = 2**60
"""Bytes that are believed: the API has 64 bits for the sum."""


def why_stalled(obs: Observation, report: Report) -> str:
    """Why the worker should be restored on another node, as a clause; empty: it need not, or it has moved for that already."""
    recovery = obs.job.status.recovery
    if recovery is None or recovery.released_at is not None or report.worker in recovery.stalled:
        return ""
    restore, bound = report.restore, obs.job.spec.restore_stall
    if _idle(report) > _PATIENCE * bound:
        return f"its restore stood still for {_idle(report):.0f} s ({_waits_for(report)})"
    if restore.state is RestoreState.FAILED and restore.stalled and _tried_before(recovery):
        return f"its restore failed again: nothing came from {_named(restore.stalled)}"
    return ""


def standing_still(obs: Observation, status: JobRecord, reports: Mapping[int, Report]) -> tuple[str, str] | None:
    """Reason and message for the condition Restoring; None: all get on. `reports`: of the attempt, by worker."""
    recovery = status.recovery
    if recovery is None or recovery.released_at is not None:
        return None
    bound = obs.job.spec.restore_stall
    still = [worker for worker in sorted(reports) if _idle(reports[worker]) > bound]
    if not still:
        return None
    first = still[0]
    whose = f"worker {first}" if len(still) == 1 else f"worker {first} and those of {len(still) - 1} other workers"
    next_one = (
        "It has moved for that once already, so its node is not to blame"
        if first in recovery.stalled
        else "If others get on, and hold what it holds, it moves to another node"
    )
    return (
        conditions.RESTORE_STALLED,
        f"the restore of {whose} stands still: nothing came for more than {bound:.0f} s ({_waits_for(reports[first])}). {next_one}. Look at "
        "what it waits for",
    )


def restored_bytes(reports: Mapping[int, Report]) -> tuple[int, int]:
    """Bytes that are back, and that there will be, of all workers as far as is known."""
    done = wanted = 0
    for report in reports.values():
        progress, here = report.restore.progress, sum(rank.bytes for rank in report.restore.ranks)
        done += here if progress is None else progress.bytes
        wanted += here if progress is None else progress.wanted
    return min(max(0, done), _MOST), min(max(0, wanted), _MOST)


def _idle(report: Report) -> float:
    """Seconds that its restore has stood still."""
    running = report.restore.state is RestoreState.RUNNING
    return report.restore.progress.idle_seconds if running and report.restore.progress is not None else 0.0


def _waits_for(report: Report) -> str:
    sources = report.restore.progress.sources if report.restore.progress is not None else ()
    return f"it waits for {_named(sources)}" if sources else "its sidecar does not say for what"


def _named(sources: tuple[str, ...]) -> str:
    more = f" and {len(sources) - _NAMED} more" if len(sources) > _NAMED else ""
    return ", ".join(source[:100] for source in sources[:_NAMED]) + more


def _tried_before(recovery: Recovery) -> bool:
    """Whether a restore failed on this way back before the one of the current attempt."""
    noted = recovery.decided_at is None and recovery.cause == Cause.RESTORE_FAILED.value
    return len(recovery.failed_versions) > noted
