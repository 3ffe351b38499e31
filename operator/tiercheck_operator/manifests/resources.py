"""Sets the resources of TierCheck's containers in a pod, without a change of the pod's QoS class.

A Guaranteed pod stays Guaranteed, so that the kubelet's static CPU manager leaves the trainer its own cores.
Then the added containers request no whole cores and share the node's common ones: a whole core would have to
fit into the node's NUMA and SMT alignment too. If the template has resources for the pod as a whole, ours are
added to them, in whole cores if they are in whole cores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tiercheck_operator.model.serialization import parse_amount, parse_quantity
from tiercheck_operator.model.spec import JobSpec

OVERHEAD = 512 * 2**20
"""Bytes of the sidecar's own process, beside the memory volume that is charged to it."""
_CPU_BASE, _CPU_PER_RANK, _CPU_PER_GIB = 100, 50, 4
"""Thousandths of a core (docs/use/sizing.md). The last is per GiB of tiers.local.sizeLimit."""
_CPU_WITH_LIMIT = 500
"""Thousandths of a core. The least with which a sidecar starts in time if its request is its limit."""
_INIT = {"requests": {"cpu": "150m", "memory": "256Mi"}, "limits": {"cpu": "500m", "memory": "256Mi"}}
"""Resources of the containers that run for a second before the sidecar, so that limits cost nothing.
Their requests are what any sidecar asks for, so they cost nothing either; a LimitRange may have a minimum."""
_STORAGE = "ephemeral-storage"

Resources = dict[str, dict[str, str]]


@dataclass(frozen=True)
class ResourceShares:
    """The resources of TierCheck's containers in one pod."""

    sidecar: Resources
    init: Resources
    pod: Resources | None
    """The resources of the pod as a whole, ours included; None: the template has none."""


def compute_resources(job: JobSpec, pod: Mapping[str, Any]) -> ResourceShares:
    """Computes the resources for a pod. `pod`: the user's PodSpec, without TierCheck's containers."""
    whole = pod.get("resources") or {}
    if whole.get("requests") or whole.get("limits"):
        sidecar = _sidecar(job, limited=False)
        init = {"requests": _INIT["requests"], "limits": {"memory": _INIT["limits"]["memory"]}}
        return ResourceShares(sidecar, _with_storage(init, job), _with_ours(_completed(whole, pod), sidecar))
    bound = is_guaranteed(pod)
    # A namespace that requires limits may require a ratio to the requests as well.
    init_bound = bound or "cpu" in job.sidecar_resources.get("limits", {})
    init = {"requests": _INIT["limits"], "limits": _INIT["limits"]} if init_bound else _INIT
    return ResourceShares(_sidecar(job, limited=bound), _with_storage(init, job), None)


def _with_storage(init: Resources, job: JobSpec) -> Resources:
    """Adds the sidecar's ephemeral storage, which rules of a namespace demand of every container."""
    found = {kind: dict(given) for kind, given in init.items()}
    for kind, given in found.items():
        if asked := job.sidecar_resources.get(kind, {}).get(_STORAGE):
            given[_STORAGE] = asked
    return found


def is_guaranteed(pod: Mapping[str, Any]) -> bool:
    """Returns whether every container's requests are its limits; ignores resources of the whole pod."""
    containers = [*(pod.get("containers") or []), *(pod.get("initContainers") or [])]
    return bool(containers) and all(_is_bound(entry.get("resources") or {}) for entry in containers)


def resources_problem(job: JobSpec, pod: Mapping[str, Any]) -> str:
    """Returns what to change in spec.sidecar.resources for such pods, as a sentence; empty: nothing."""
    needed = parse_quantity(job.size_limit) + OVERHEAD
    for kind, given in job.sidecar_resources.items():
        memory = given.get("memory")
        if memory is not None and not job.node_memory and parse_quantity(memory) < needed:
            return (
                f"spec.sidecar.resources.{kind}.memory is {memory}, and the sidecar needs "
                f"{-(-needed // 2**20)}Mi: tiers.local.sizeLimit ({job.size_limit}), because its memory "
                "volume is charged to it, and 512Mi; raise the one or lower the other"
            )
    requests, limits = (job.sidecar_resources.get(kind, {}) for kind in ("requests", "limits"))
    for name in requests.keys() & limits.keys():
        request, limit = parse_amount(requests[name]), parse_amount(limits[name])
        if request > limit:
            return (
                f"spec.sidecar.resources: the request of {name} ({requests[name]}) is more than its "
                f"limit ({limits[name]})"
            )
        if request < limit and name in ("cpu", "memory") and not pod.get("resources") and is_guaranteed(pod):
            return (
                f"spec.sidecar.resources gives a request of {name} ({requests[name]}) that is not its limit "
                f"({limits[name]}), which would end the QoS class Guaranteed that all other containers of "
                "the pod have, and with it their exclusive cores; give one of the two, or both the same"
            )
    return ""


def limits_advice(sentence: str, pod: Mapping[str, Any] | None = None) -> str:
    """Returns advice if a LimitRange or ResourceQuota caused the refusal of a pod; empty: neither did.
    `pod`: the user's PodSpec, whose own containers may ask for more than their limit."""
    if (
        "limits.cpu for:" in sentence
        or ("less than or equal to cpu limit" in sentence and not _exceeds_itself(pod or {}))
        or "cpu max limit to request" in sentence
    ):
        return (
            "The namespace has rules for CPU limits, and TierCheck gives its sidecar none by itself: set "
            "spec.sidecar.resources.limits.cpu (for a ratio also requests.cpu), and limits.cpu of your own "
            "containers that have none"
        )
    if "minimum cpu usage per Container" in sentence or "minimum memory usage per Container" in sentence:
        asked, more = _INIT["requests"], _INIT["limits"]
        return (
            f"TierCheck's containers that prepare a pod ask for {asked['cpu']} and {asked['memory']}, or for "
            f"{more['cpu']} and {more['memory']} if spec.sidecar.resources.limits.cpu is set: set that, let "
            "your own containers ask for the minimum, or have the LimitRange lowered"
        )
    if f"{_STORAGE} for:" in sentence or f"{_STORAGE} max limit to request" in sentence:
        return (
            f"The namespace has rules for {_STORAGE}: set {_STORAGE} in spec.sidecar.resources, which all "
            "containers of TierCheck get, and in your own containers that have none"
        )
    if "exceeded quota" in sentence or re.search("maximum (memory|cpu) usage", sentence):
        prepares = f"the containers that prepare the pod have a CPU limit of {_INIT['limits']['cpu']}"
        for resource, demand in (
            ("memory", "tiers.local.sizeLimit and 512Mi: lower sizeLimit"),
            ("cpu", f"the CPU of spec.sidecar.resources, and {prepares}: lower the former"),
        ):
            if resource in sentence:
                return (
                    f"Beside what your containers ask for, each pod's sidecar asks for {demand}, or have the "
                    "namespace's ResourceQuota or LimitRange raised"
                )
    return ""


def _sidecar(job: JobSpec, limited: bool) -> Resources:
    """Returns the sidecar's resources. `limited`: the requests must equal the limits."""
    size = parse_quantity(job.size_limit)
    cpu = _CPU_BASE + _CPU_PER_RANK * job.procs_per_worker + math.ceil(_CPU_PER_GIB * size / 2**30)
    cpu = -(-cpu // 10) * 10
    memory = str(size + OVERHEAD)
    if limited:
        cpu = max(cpu, _CPU_WITH_LIMIT)
        cpu += 50 if cpu % 1000 == 0 else 0
    requests = {"cpu": f"{cpu}m", "memory": memory}
    limits = dict(requests) if limited else {"memory": memory}
    asked, allowed = (job.sidecar_resources.get(kind, {}) for kind in ("requests", "limits"))
    requests, limits = {**requests, **asked}, {**limits, **allowed}
    for name in requests.keys() & limits.keys():
        if name in asked and name not in allowed and (limited or _exceeds(requests[name], limits[name])):
            limits[name] = requests[name]
        if name in allowed and name not in asked and (limited or _exceeds(requests[name], limits[name])):
            requests[name] = limits[name]
    return {"requests": requests, "limits": limits}


def _exceeds(request: str, limit: str) -> bool:
    return parse_amount(request) > parse_amount(limit)


def _exceeds_itself(pod: Mapping[str, Any]) -> bool:
    """Returns whether a container requests more CPU than its own limit."""
    containers = [*(pod.get("containers") or []), *(pod.get("initContainers") or [])]
    given = [entry.get("resources") or {} for entry in containers]
    pairs = [
        ((each.get("requests") or {}).get("cpu"), (each.get("limits") or {}).get("cpu")) for each in given
    ]
    return any(request and limit and _exceeds(request, limit) for request, limit in pairs)


def _is_bound(resources: Mapping[str, Any]) -> bool:
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for name in ("cpu", "memory"):
        limit = parse_amount(limits.get(name) or 0)
        if limit <= 0 or parse_amount(requests.get(name, limits[name])) != limit:
            return False
    return True


def _completed(whole: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Adds the requests that the API server would default to without ours: limits that no container sets."""
    containers = [*(pod.get("containers") or []), *(pod.get("initContainers") or [])]
    asked = {
        name
        for entry in containers
        for given in (entry.get("resources") or {}).values()
        if given
        for name in given
    }
    limits = dict(whole.get("limits") or {})
    unasked = {name: limit for name, limit in limits.items() if name not in asked}
    return {"requests": {**unasked, **(whole.get("requests") or {})}, "limits": limits}


def _with_ours(whole: Mapping[str, Any], sidecar: Resources) -> Resources:
    """Returns the pod's own resources, increased by those of the sidecar."""
    ours = {name: parse_amount(quantity) for name, quantity in sidecar["requests"].items()}
    request, limit = (
        parse_amount((whole.get(kind) or {}).get("cpu") or 0) for kind in ("requests", "limits")
    )
    if request == limit > 0 and limit % 1 == 0:
        # Two threads share a core, so an even number may be what the kubelet's full-pcpus-only needs.
        step = 2 if limit % 2 == 0 else 1
        ours["cpu"] = Decimal(step * math.ceil(ours["cpu"] / step))
    grown: Resources = {}
    for kind in ("requests", "limits"):
        given = {name: str(quantity) for name, quantity in (whole.get(kind) or {}).items()}
        for name in given.keys() & ours.keys():
            amount = parse_amount(given[name]) + ours[name]
            given[name] = str(int(amount)) if amount % 1 == 0 else f"{math.ceil(amount * 1000)}m"
        if given:
            grown[kind] = given
    return grown
