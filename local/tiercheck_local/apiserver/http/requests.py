"""Carries out one HTTP request on a resource: parameters and body in, status code and body out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonpatch

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.errors import ApiError, Object, bad_request, unsupported_media_type
from tiercheck_local.apiserver.http.views import ResponseView
from tiercheck_local.apiserver.resources import PDBS, PODS, Resource, Target
from tiercheck_local.apiserver.store.objects import ApiObjects, DeleteOptions, WriteOptions
from tiercheck_local.apiserver.store.selectors import (
    Predicate,
    field_predicate,
    label_predicate,
    matches_selector,
)
from tiercheck_local.apiserver.store.storage import Key
from tiercheck_operator.model.status import rfc3339


def merge(target: Any, patch: Any) -> Any:
    """Applies a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic_merge(target: Any, patch: Any) -> Any:
    """Applies a strategic merge patch as a merge patch. Raises ApiError 415 for one with lists."""
    if _has_lists(patch):
        raise unsupported_media_type(["application/merge-patch+json", "application/json-patch+json"])
    return merge(target, patch)


def _has_lists(patch: Any) -> bool:
    if isinstance(patch, dict):
        return any(key.startswith("$") or _has_lists(value) for key, value in patch.items())
    return isinstance(patch, list)


def json_patch(target: Any, operations: Any) -> Any:
    """Applies a JSON patch (RFC 6902). Raises ApiError: 422 if it cannot be applied, 400 if malformed."""
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    try:
        return jsonpatch.apply_patch(target, operations)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError) as error:
        # The real server does not name the operation that failed either.
        raise ApiError(
            422, "Invalid", "the server rejected our request due to an error in our request", {}
        ) from error


def bind(objects: ApiObjects, key: Key, binding: Object) -> Object:
    """Gives the pod its node, once. Raises ApiError 404, 409."""
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
        "lastTransitionTime": rfc3339(time.time()),
    }
    bound = _with_condition(pod, scheduled)
    objects.storage.put(PODS.collection, key, {**bound, "spec": {**pod["spec"], "nodeName": node}})
    return _created()


def evict(objects: ApiObjects, key: Key, eviction: Object, options: DeleteOptions) -> Object:
    """Deletes the pod and records why, unless a budget forbids it. Raises ApiError 404, 409, 429."""
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
                "message": "Eviction API: evicting", "lastProbeTime": None,
                "lastTransitionTime": rfc3339(time.time()),
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
            refused = "Cannot evict pod as it would violate the pod's disruption budget."
            causes = [{"reason": "DisruptionBudget", "message": why}]
            raise errors.ApiError(429, "TooManyRequests", refused, {"causes": causes})
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


_PATCHES = {
    "application/json-patch+json": json_patch,
    "application/merge-patch+json": merge,
    "application/strategic-merge-patch+json": strategic_merge,
}
_RETURNS_DELETED = frozenset({"/pods", "/services", "/serviceaccounts", "/namespaces"})


@dataclass
class ApiCall:
    """A client's request. `warnings` is filled while the request is carried out."""

    method: str
    query: Mapping[str, str]
    content_type: str
    body: bytes
    warnings: list[str] = field(default_factory=list)

    def parsed(self) -> Any:
        """Returns the body of a POST, PUT or DELETE. Raises ApiError 400, 415."""
        if not self.body:
            return {}
        try:
            if self.content_type in ("application/json", ""):
                return json.loads(self.body)
        except ValueError as error:
            raise errors.bad_request(f"the object provided is unrecognized: {error}") from error
        raise errors.unsupported_media_type(["application/json"])

    @property
    def options(self) -> WriteOptions:
        validation = self.query.get("fieldValidation") or "Warn"
        return WriteOptions("dryRun" in self.query, validation, self.method == "PATCH", self.warnings.append)


def selection(target: Target, query: Mapping[str, str]) -> Predicate:
    """Returns a predicate for the selectors of a list or watch. Raises ApiError 400."""
    terms: list[Predicate] = []
    if query.get("labelSelector"):
        terms.append(label_predicate(query["labelSelector"]))
    if query.get("fieldSelector"):
        terms.append(field_predicate(query["fieldSelector"], target.resource.collection))
    if target.name:
        terms.append(lambda value: value["metadata"]["name"] == target.name)
    return lambda value: all(term(value) for term in terms)


def carry_out(objects: ApiObjects, target: Target, call: ApiCall, view: ResponseView) -> tuple[int, Object]:
    """Returns the status code and the body of the answer. Raises ApiError."""
    resource = target.resource
    verb = (call.method, bool(target.name), target.subresource)
    if call.method == "POST" and target.subresource in ("binding", "eviction"):
        return 201, _pod_verb(objects, target, call)
    match verb:
        case ("GET", True, "" | "status"):
            return 200, view.one(objects.get(resource, target.namespace, target.name))
        case ("GET", False, ""):
            return 200, _list(objects, target, call, view)
        case ("POST", False, ""):
            return 201, view.one(objects.create(resource, target.namespace, call.parsed(), call.options))
        case ("PUT", True, part):
            key = (target.namespace, target.name)
            return 200, view.one(objects.replace(resource, key, call.parsed(), part, call.options))
        case ("PATCH", True, "" | "status"):
            return 200, view.one(_patch(objects, resource, target, call))
        case ("DELETE", True, ""):
            return _delete(objects, target, call, view)
        case ("DELETE", False, ""):
            return 200, _delete_collection(objects, target, call, view)
    why = "the server does not allow this method on the requested resource"
    raise errors.ApiError(405, "MethodNotAllowed", why, {})


def _list(objects: ApiObjects, target: Target, call: ApiCall, view: ResponseView) -> Object:
    found = _selected(objects, target, call)
    version = str(objects.storage.version)
    if call.query.get("continue"):
        try:
            version, namespace, name = call.query["continue"].split("/")
        except ValueError as error:
            raise errors.bad_request("continue key is not valid") from error
        found = [(key, value) for key, value in found if key > (namespace, name)]
    metadata: Object = {"resourceVersion": version}
    limit = int(call.query.get("limit") or 0)
    if limit and len(found) > limit:
        metadata["continue"] = "/".join((version, *found[limit - 1][0]))
        if not (call.query.get("labelSelector") or call.query.get("fieldSelector")):
            metadata["remainingItemCount"] = len(found) - limit
        found = found[:limit]
    return view.many([value for _, value in found], metadata)


def _selected(objects: ApiObjects, target: Target, call: ApiCall) -> list[tuple[Key, Object]]:
    selects = selection(target, call.query)
    items = objects.storage.items(target.resource.collection, target.namespace)
    return [(key, value) for key, value in items if selects(value)]


def _patch(objects: ApiObjects, resource: Resource, target: Target, call: ApiCall) -> Object:
    key = (target.namespace, target.name)
    apply = _PATCHES.get(call.content_type)
    if apply is None or (resource.custom and apply is strategic_merge):
        accepted = [kind for kind in _PATCHES if not (resource.custom and "strategic" in kind)]
        raise errors.unsupported_media_type(accepted)
    try:
        patch = json.loads(call.body)
    except ValueError as error:
        raise errors.bad_request(f"error decoding patch: {error}") from error
    if apply is not json_patch and not isinstance(patch, dict):
        raise errors.bad_request("error decoding patch: it is not an object")
    old = objects.get(resource, *key)
    patched = apply(old, patch)
    if isinstance(patched, dict) and not (patched.get("metadata") or {}).get("resourceVersion"):
        # A patch is its own read-modify-write: if it has no version, it cannot conflict.
        version = {"resourceVersion": old["metadata"]["resourceVersion"]}
        patched = {**patched, "metadata": {**(patched.get("metadata") or {}), **version}}
    return objects.replace(resource, key, patched, target.subresource, call.options)


def _delete_options(query: Mapping[str, str], body: Any) -> DeleteOptions:
    body = body if isinstance(body, dict) else {}
    grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    preconditions = body.get("preconditions") or {}
    if (body.get("propagationPolicy") or query.get("propagationPolicy") or "Background") != "Background":
        raise bad_request(
            "the laptop cluster deletes dependents in the background only: use --cascade=background"
        )
    return DeleteOptions(
        grace_seconds=int(grace) if grace is not None else None,
        uid=preconditions.get("uid"),
        resource_version=preconditions.get("resourceVersion"),
        dry_run=bool(body.get("dryRun")) or "dryRun" in query,
    )


def _delete(objects: ApiObjects, target: Target, call: ApiCall, view: ResponseView) -> tuple[int, Object]:
    resource = target.resource
    options = _delete_options(call.query, call.parsed())
    value, gone = objects.delete(resource, (target.namespace, target.name), options)
    if gone and resource.collection not in _RETURNS_DELETED:
        details = errors.details_of(target.name, resource.group, resource.plural)
        return 200, errors.success({**details, "uid": value["metadata"]["uid"]})
    return 200, view.one(value)


def _delete_collection(objects: ApiObjects, target: Target, call: ApiCall, view: ResponseView) -> Object:
    options = _delete_options(call.query, call.parsed())
    deleted = [
        objects.delete(target.resource, key, options)[0] for key, _ in _selected(objects, target, call)
    ]
    return view.many(deleted, {"resourceVersion": str(objects.storage.version)})


def _pod_verb(objects: ApiObjects, target: Target, call: ApiCall) -> Object:
    body = call.parsed()
    if not isinstance(body, dict):
        raise errors.bad_request("the object provided is unrecognized (must be of type Object)")
    key = (target.namespace, target.name or (body.get("metadata") or {}).get("name", ""))
    if target.subresource == "binding":
        return bind(objects, key, body)
    dry = "dryRun" in call.query
    given = _delete_options({"dryRun": "All"} if dry else {}, body.get("deleteOptions"))
    return evict(objects, key, body, given)
