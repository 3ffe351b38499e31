"""Decides when a sidecar may go at the end of a job: once the last version is in the remote tier.

It does not stay long after that either.

Kubernetes ends each pod's sidecar when its own trainer has ended, so in any order and seconds apart. The
coordinator writes the manifest: it stays until no worker can add anything, and then tells all. Nobody waits
for one that has gone already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tiercheck.protocol.directive import Directive, Phase
from tiercheck.protocol.report import TrainerState
from tiercheck.protocol.version import Version
from tiercheck_sidecar.versions.tally import RankShape
from tiercheck_sidecar.versions.watermark import can_upload

GONE = 10.0
"""Seconds without a word after which the other side counts as gone. A container that is started anew is back
before."""


@dataclass(frozen=True)
class WorkerEnd:
    """What a sidecar knows when its job is over."""

    final: bool
    """Nothing will be added to what it holds."""
    done: bool
    """Everything that it holds is in the remote tier, or older than what is."""
    told: bool
    """The coordinator knows that it is done."""
    over: bool
    """The coordinator says that nothing more is to come."""
    unanswered: float | None
    """Seconds since the coordinator first gave no answer; None: it answered last time."""


def may_go(end: WorkerEnd) -> bool:
    """Whether a worker that is not the coordinator may end."""
    if not end.final:
        return False
    if end.over or (end.unanswered is not None and end.unanswered >= GONE):
        return True
    return end.done and (end.told or end.unanswered is not None)


def is_final(
    directive: Directive, trainer: TrainerState, asked_to_end: bool, unfinished: Collection[object]
) -> bool:
    """Whether nothing will be added to what this worker holds. `asked_to_end`: a sidecar is, only after its
    trainer."""
    return (
        directive.phase is Phase.FINISH
        and (asked_to_end or trainer is not TrainerState.RUNNING)
        and not unfinished
    )


def owes_nothing(own: Collection[Version | None], stored: Version | None) -> bool:
    """Whether no version newer than `stored` can be uploaded with what is here. `own`: each rank's newest
    snapshot."""
    return any(newest is None or (stored is not None and newest <= stored) for newest in own) or not own


def workers_present(quiet: Mapping[int, float], interval: float) -> set[int]:
    """Workers that are there. `quiet`: seconds since each was heard; `interval`: between two words of one."""
    return {worker for worker, seconds in quiet.items() if seconds < max(GONE, 3 * interval)}


def is_hopeless(
    upload: Version, world: int, ranks: Mapping[int, RankShape], uploaded: Collection[int]
) -> bool:
    """Whether some rank will never bring `upload`, when nobody adds anything any more. `ranks`: of workers
    that are there."""
    return any(
        rank not in uploaded and (rank not in ranks or not can_upload(ranks[rank], upload))
        for rank in range(world)
    )
