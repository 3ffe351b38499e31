"""Binds pods to nodes and evicts them."""

from __future__ import annotations

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.errors import Object
from tiercheck_local.apiserver.resources import PDBS, PODS
from tiercheck_local.apiserver.store.objects import ApiObjects, DeleteOptions
from tiercheck_local.apiserver.store.selectors import matches_selector
from tiercheck_local.apiserver.store.storage import Key
from tiercheck_local.clock import timestamp


def bind(objects: ApiObjects, key: Key, binding: Object) -> Object:
    """Give the pod its node, once. Raises ApiError 404, 409."""
    if (binding.get("metadata") or {}).get("name") != key[1]:
        raise errors.bad_request("name in URL does not match name in Binding object")
    pod = objects.get(PODS, *key)
    node = (binding.get("target") or {}).get("name", "")
    if not node:
        cause = errors.FieldCause("target.name", "Required value", "FieldValueRequired")
        raise errors.invalid("Binding", "", key[1], [cause])
    why = None
    if "deletionTimestamp" in pod["metadata"]:
        why = f"pod {key[1]} is being deleted, cannot be assigned to a host"
    elif pod["spec"].get("nodeName"):
        why = f'pod {key[1]} is already assigned to node "{pod["spec"]["nodeName"]}"'
    if why:
        raise errors.conflict("pods/binding", "", key[1], why)
    scheduled = {
        "type": "PodScheduled",
        "status": "True",
        "lastProbeTime": None,
        "lastTransitionTime": timestamp(),
    }
    bound = _with_condition(pod, scheduled)
    objects.storage.put(PODS.collection, key, {**bound, "spec": {**pod["spec"], "nodeName": node}})
    return _created()


def evict(objects: ApiObjects, key: Key, eviction: Object, options: DeleteOptions) -> Object:
    """Delete the pod, saying why, unless a disruption budget forbids it. Raises ApiError 404, 409, 429."""
    pod = objects.get(PODS, *key)
    name = (eviction.get("metadata") or {}).get("name", key[1])
    if name != key[1]:
        raise errors.bad_request("name in URL does not match name in Eviction object")
    if not options.dry_run:
        if _is_protected(pod):
            _spend_budget(objects, pod)
        if "deletionTimestamp" not in pod["metadata"]:
            disrupted = {
                "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting", "lastProbeTime": None, "lastTransitionTime": timestamp(),
            }  # fmt: skip
            objects.storage.put(PODS.collection, key, _with_condition(pod, disrupted))
    objects.delete(PODS, key, options)
    return _created()


def _created() -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def _is_protected(pod: Object) -> bool:
    phase = pod.get("status", {}).get("phase")
    return phase not in ("Succeeded", "Failed", "Pending") and "deletionTimestamp" not in pod["metadata"]


def _spend_budget(objects: ApiObjects, pod: Object) -> None:
    for key, budget in objects.storage.items(PDBS.collection, pod["metadata"]["namespace"]):
        if not _selects(budget, pod):
            continue
        status = budget.get("status", {})
        allowed = status.get("disruptionsAllowed", 0)
        fresh = status.get("observedGeneration", 0) >= budget["metadata"].get("generation", 0)
        if not fresh or allowed <= 0:
            name = budget["metadata"]["name"]
            why = (
                f"The disruption budget {name} needs {status.get('desiredHealthy', 0)} healthy pods and "
                f"has {status.get('currentHealthy', 0)} currently"
            )
            if not fresh:
                why = f"The disruption budget {name} is still being processed by the server."
            raise errors.too_many_requests(
                "Cannot evict pod as it would violate the pod's disruption budget.",
                [{"reason": "DisruptionBudget", "message": why}],
            )
        objects.storage.put(
            PDBS.collection, key, {**budget, "status": {**status, "disruptionsAllowed": allowed - 1}}
        )


def _selects(budget: Object, pod: Object) -> bool:
    selector = budget.get("spec", {}).get("selector")
    if selector is None:
        return False
    return matches_selector(selector, pod["metadata"].get("labels") or {})


def _with_condition(pod: Object, condition: Object) -> Object:
    status = pod.get("status") or {}
    others = [c for c in status.get("conditions") or [] if c["type"] != condition["type"]]
    return {**pod, "status": {**status, "conditions": [*others, condition]}}
