"""Checks a user's pod template before a pod is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.manifests.pod import type_mismatch_message, unbuildable
from tiercheck_operator.manifests.resources import resources_problem
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Finding
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.spec import interfaces_problem

_PORTS = {names.CONTROL_PORT, names.EXCHANGE_PORT, names.METRICS_PORT}


def refuse_pods(job: JobView) -> Finding | None:
    """Returns why no pod can be made of the spec. Attached pods are checked at their admission."""
    spec = job.spec
    if spec.attach is not None:
        return None
    pod = spec.template.get("spec") or {}
    begun = job.status.attempt > 0  # a job that already runs is not refused
    try:
        wrong = template_problem(spec.template)
        if not wrong and not begun:
            wrong = (
                pod_problem(pod, names.TRAINER_CONTAINER)
                or deadline_problem(spec.template)
                or unbuildable(job)
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wrong = "" if begun else type_mismatch_message(error)
    if wrong:
        return Finding(conditions.INVALID_TEMPLATE, wrong)
    wrong = "" if job.status.attempt else resources_problem(spec, pod) or interfaces_problem(spec)
    return Finding(conditions.INVALID_SPEC, wrong) if wrong else None


def template_problem(template: Mapping[str, Any]) -> str:
    """Returns what to change in the template, as a sentence; empty: nothing."""
    containers = (template.get("spec") or {}).get("containers") or []
    trainer = next((entry for entry in containers if entry.get("name") == names.TRAINER_CONTAINER), None)
    if trainer is None:
        return (
            f"spec.template has no container named {names.TRAINER_CONTAINER!r}; "
            "give the container that runs the training command this name"
        )
    if not trainer.get("command"):
        return (
            f"container {names.TRAINER_CONTAINER!r} of spec.template has no command; set `command` "
            "explicitly, because the entrypoint of the image cannot be wrapped"
        )
    reserved = {names.SIDECAR_CONTAINER, names.LIBRARY_CONTAINER, names.NODE_MEMORY_CONTAINER}
    for entry in [*containers, *((template.get("spec") or {}).get("initContainers") or [])]:
        if entry.get("name") in reserved:
            return f"container name {entry['name']!r} in spec.template is reserved; choose another"
    return ""


def pod_problem(pod: Mapping[str, Any], trainer: str) -> str:
    """Returns what in a user's PodSpec would break its worker, as a sentence; empty: nothing.
    This holds for pods of any controller. `trainer`: the container that trains."""
    for entry in pod.get("containers") or []:
        probes = [
            name
            for name in ("livenessProbe", "startupProbe")
            if entry.get("name") == trainer and entry.get(name)
        ]
        if probes:
            return (
                f"container {trainer!r} has a {probes[0]}, by which the kubelet would kill it while it "
                "waits for its state to be restored, in the middle of a recovery; remove it: TierCheck "
                "finds training that hangs by itself (failurePolicy.hang). A readinessProbe may stay"
            )
    lasting = [entry for entry in pod.get("initContainers") or [] if entry.get("restartPolicy") == "Always"]
    for entry in [*lasting, *(pod.get("containers") or [])]:
        taken = {port.get("containerPort") for port in entry.get("ports") or []} & _PORTS
        if taken and not pod.get("hostNetwork"):
            return (
                f"container {entry.get('name')!r} has port {min(taken)}, which TierCheck's sidecar listens "
                "on in the same pod (8470 to 8472); choose another"
            )
    return ""


def deadline_problem(template: Mapping[str, Any]) -> str:
    """Returns why a pod made by TierCheck may not have a deadline, as a sentence; empty: it has none."""
    if (template.get("spec") or {}).get("activeDeadlineSeconds") is None:
        return ""
    return (
        "spec.template.spec.activeDeadlineSeconds would end each pod after that time, and TierCheck would "
        "make another; use spec.activeDeadlineSeconds, which is for the job"
    )
