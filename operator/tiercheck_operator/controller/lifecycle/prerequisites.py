"""What a job needs before its first pod: a usable spec, its gang, its service and credentials.

A scheduler that does not know the gang would place pods one by one, so a job never begins without the one
that it asks for. One that runs goes on whatever becomes of the object: all its pods carry the reference, so
nothing has to be made good.
"""

from __future__ import annotations

from tiercheck.protocol import names
from tiercheck_operator.manifests.pod import unbuildable, unlike_a_pod
from tiercheck_operator.manifests.resources import resources_problem
from tiercheck_operator.manifests.template import deadline_problem, pod_problem, template_problem
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, EnsureCredentials, EnsureGang, EnsureService, RemoveGang
from tiercheck_operator.model.conditions import Finding
from tiercheck_operator.model.observed import JobView, Observation
from tiercheck_operator.model.spec import interfaces_problem


def find_missing_gang(obs: Observation) -> Finding | None:
    """Why no pod may be made yet; None: nothing is in the way."""
    if obs.job.spec.gang is None or obs.have_gang or obs.all_pods:
        return None
    if obs.gang_problem:
        return Finding(conditions.GANG_UNAVAILABLE, obs.gang_problem)
    return Finding(conditions.WAITING_FOR_PODS, "the gang is made before the pods")


def ensure_gang_actions(obs: Observation) -> list[Action]:
    return [EnsureGang()] if obs.job.spec.gang is not None and not obs.have_gang else []


def remove_gang_actions(obs: Observation) -> list[Action]:
    """Of a suspended job without pods: workers and scheduler may be others when it goes on."""
    return [RemoveGang()] if obs.have_gang and not obs.all_pods else []


def refuse_pods(job: JobView) -> Finding | None:
    """Why no pod can be made of the spec. What attached pods cannot be is said at their admission."""
    spec = job.spec
    if spec.attach is not None:
        return None
    pod = spec.template.get("spec") or {}
    begun = job.status.attempt > 0  # such a one is better looked after than refused
    try:
        wrong = template_problem(spec.template)
        if not wrong and not begun:
            wrong = (
                pod_problem(pod, names.TRAINER_CONTAINER)
                or deadline_problem(spec.template)
                or unbuildable(job)
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wrong = "" if begun else unlike_a_pod(error)
    if wrong:
        return Finding(conditions.INVALID_TEMPLATE, wrong)
    wrong = "" if job.status.attempt else resources_problem(spec, pod) or interfaces_problem(spec)
    return Finding(conditions.INVALID_SPEC, wrong) if wrong else None


def missing_belongings(obs: Observation) -> list[Action]:
    missing: list[Action] = ensure_gang_actions(obs)
    if not obs.have_credentials:
        missing.append(EnsureCredentials())
    if not obs.have_service and obs.job.spec.attach is None:
        missing.append(EnsureService())
    return missing
