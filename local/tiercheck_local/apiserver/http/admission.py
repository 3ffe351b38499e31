"""Calls mutating admission webhooks about new objects, and applies what they change.

It implements the part of admissionregistration.k8s.io/v1 that attach mode needs: creations, selectors, JSON
patches, warnings, timeouts, failure and reinvocation policies. Webhooks are found by `url` only, because
there is no network of Services here; one with a `service` counts as one that cannot be reached.
"""

from __future__ import annotations

import base64
import copy
import json
import ssl
import uuid
from dataclasses import replace
from typing import Any

import aiohttp

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.errors import ApiError, Object
from tiercheck_local.apiserver.http.requests import ApiCall, json_patch
from tiercheck_local.apiserver.resources import NAMESPACES, WEBHOOKS, Resource, Target
from tiercheck_local.apiserver.schema import built_in
from tiercheck_local.apiserver.store.objects import ApiObjects
from tiercheck_local.apiserver.store.selectors import matches_selector

_DEFAULT_TIMEOUT = 10


class _Unreachable(Exception):
    """The webhook gave no answer that can be used."""


async def admit_object(objects: ApiObjects, target: Target, call: ApiCall) -> ApiCall:
    """Returns the call with its object as webhooks changed it.

    Raises ApiError if a webhook denies it, or fails and must not be ignored."""
    resource = target.resource
    configurations = sorted(objects.storage.items(WEBHOOKS.collection, ""))
    hooks = [hook for _, each in configurations for hook in each.get("webhooks") or []]
    if not hooks or call.method != "POST" or target.name or target.subresource or resource is WEBHOOKS:
        return call
    given = call.parsed()
    if not isinstance(given, dict):
        return call
    value = _as_sent(resource, target.namespace, given)
    changed_after: set[int] = set()
    asked: set[int] = set()
    for number, hook in enumerate(hooks):
        if _concerns(objects, hook, target, value):
            asked.add(number)
            before, value = value, await _ask(hook, target, call, value)
            if before != value:
                changed_after |= asked - {number}
    for number in sorted(changed_after):
        hook = hooks[number]
        if hook.get("reinvocationPolicy") == "IfNeeded" and _concerns(objects, hook, target, value):
            value = await _ask(hook, target, call, value)
    return replace(call, content_type="application/json", body=json.dumps(value).encode())


def _as_sent(resource: Resource, namespace: str, given: Object) -> Object:
    """Returns the object as webhooks see it: with the server's defaults."""
    value = copy.deepcopy(given)
    value.setdefault("apiVersion", resource.api_version)
    value.setdefault("kind", resource.kind)
    metadata = value["metadata"] = dict(value.get("metadata") or {})
    if resource.namespaced:
        metadata.setdefault("namespace", namespace)
    if not resource.custom:
        built_in.prepare_new(resource.collection, value)
    return value


def _concerns(objects: ApiObjects, hook: Object, target: Target, value: Object) -> bool:
    resource = target.resource
    if not any(_covers(rule, resource) for rule in hook.get("rules") or []):
        return False
    if resource.namespaced:
        namespace = objects.storage.get(NAMESPACES.collection, ("", target.namespace)) or {"metadata": {}}
        if not matches_selector(
            hook.get("namespaceSelector") or {}, namespace["metadata"].get("labels") or {}
        ):
            return False
    return matches_selector(hook.get("objectSelector") or {}, value["metadata"].get("labels") or {})


def _covers(rule: Object, resource: Resource) -> bool:
    def among(wanted: str, field: str) -> bool:
        return bool({wanted, "*"} & set(rule.get(field) or []))

    scope = rule.get("scope") or "*"
    return (
        among("CREATE", "operations")
        and among(resource.group, "apiGroups")
        and among(resource.version, "apiVersions")
        and (among(resource.plural, "resources") or "*/*" in (rule.get("resources") or []))
        and scope in ("*", "Namespaced" if resource.namespaced else "Cluster")
    )


async def _ask(hook: Object, target: Target, call: ApiCall, value: Object) -> Object:
    resource, metadata = target.resource, value["metadata"]
    review = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": str(uuid.uuid4()),
            "kind": {"group": resource.group, "version": resource.version, "kind": resource.kind},
            "resource": {"group": resource.group, "version": resource.version, "resource": resource.plural},
            "name": metadata.get("name", ""),
            "namespace": target.namespace,
            "operation": "CREATE",
            "userInfo": {"username": "system:admin", "groups": ["system:masters"]},
            "object": value,
            "oldObject": None,
            "dryRun": call.options.dry_run,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    }
    try:
        response = await _answer(hook, review)
    except _Unreachable as error:
        if hook.get("failurePolicy", "Fail") == "Ignore":
            return value
        why = f'Internal error occurred: failed calling webhook "{hook["name"]}": {error}'
        raise ApiError(500, "InternalError", why, {"causes": [{"message": why}]}) from error
    call.warnings.extend(str(warning) for warning in response.get("warnings") or [])
    if not response.get("allowed"):
        status = response.get("status") or {}
        said = status.get("message") or status.get("reason") or "denied the request without explanation"
        raise ApiError(
            int(status.get("code") or 400), status.get("reason") or "BadRequest",
            f'admission webhook "{hook["name"]}" denied the request: {said}',
        )  # fmt: skip
    if not response.get("patch"):
        return value
    try:
        patched = json_patch(value, json.loads(base64.b64decode(response["patch"], validate=True)))
    except (ValueError, ApiError) as error:
        # A patch that cannot be applied is an error of the request under every failure policy.
        raise errors.ApiError(500, "InternalError", f"Internal error occurred: {error}") from error
    assert isinstance(patched, dict)
    return patched


async def _answer(hook: Object, review: Object) -> Object:
    """Returns the `response` of the webhook's AdmissionReview. Raises _Unreachable."""
    client: dict[str, Any] = hook.get("clientConfig") or {}
    seconds = int(hook.get("timeoutSeconds") or _DEFAULT_TIMEOUT)
    if not client.get("url"):
        raise _Unreachable("there is no network of Services here")
    try:
        context = ssl.create_default_context(
            cadata=base64.b64decode(client.get("caBundle") or "").decode() or None
        )
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session,
            session.post(
                client["url"], params={"timeout": f"{seconds}s"}, json=review, ssl=context
            ) as response,
        ):
            if response.status != 200:
                raise _Unreachable(
                    f"an error on the server ({(await response.text())[:200]!r}) has prevented the request"
                )
            answer = await response.json()
    except TimeoutError as error:
        raise _Unreachable("context deadline exceeded") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _Unreachable(str(error)) from error
    body = answer.get("response") if isinstance(answer, dict) else None
    if not isinstance(body, dict) or body.get("uid") != review["request"]["uid"]:
        raise _Unreachable(
            "received invalid webhook response: expected response.uid to be that of the request"
        )
    return body
