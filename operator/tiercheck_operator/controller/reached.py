"""How far training got before it failed: what has to be trained again is counted from there."""

from __future__ import annotations

from tiercheck_operator.model.observed import Observation


def newest_step(obs: Observation) -> int:
    """The newest step that the current attempt, or one on the way to it, is known to have made; 0: none.

    Sidecars of pods that are lost count too: what they have said is all that is known of the last steps.
    """
    status = obs.job.status
    reports = [known.report for known in obs.reports.values() if known.report is not None]
    steps = [report.trainer.step or 0 for report in reports if report.attempt == status.attempt]
    recovery = status.recovery
    if recovery is not None:
        steps.append(recovery.reached)
        if recovery.decided_at is not None:
            steps.append(recovery.step + recovery.lost_steps)
    return max([*steps, status.step or 0])
