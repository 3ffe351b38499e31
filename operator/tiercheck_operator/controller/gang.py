"""The job's gang: made before its first pod, because a scheduler that does not know it would place pods one by one.

A job never begins without the gang that it asks for. One that runs goes on whatever becomes of the object: all its pods carry the
reference, so nothing has to be made good afterwards.
"""

from __future__ import annotations

from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, EnsureGang, RemoveGang
from tiercheck_operator.model.findings import Finding
from tiercheck_operator.model.observed import Observation


def gang_missing(obs: Observation) -> Finding | None:
    """Why no pod may be made yet; None: nothing is in the way."""
    if obs.job.spec.gang is None or obs.have_gang or obs.all_pods:
        return None
    if obs.gang_problem:
        return Finding(conditions.GANG_UNAVAILABLE, obs.gang_problem)
    return Finding(conditions.WAITING_FOR_PODS, "the gang is made before the pods")


def gang_actions(obs: Observation) -> list[Action]:
    return [EnsureGang()] if obs.job.spec.gang is not None and not obs.have_gang else []


def gang_removal(obs: Observation) -> list[Action]:
    """Of a suspended job without pods: workers and scheduler may be others when it goes on."""
    return [RemoveGang()] if obs.have_gang and not obs.all_pods else []
