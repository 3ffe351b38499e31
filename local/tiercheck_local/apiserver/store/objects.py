"""Creates, changes and deletes objects, in the two or three steps that Kubernetes deletes in.

It implements the verbs of the API over ObjectStorage, without HTTP. Arguments are fresh objects that may be
kept and changed.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.errors import FieldCause, Object
from tiercheck_local.apiserver.resources import (
    CRDS,
    NAMESPACES,
    PODS,
    Registry,
    Resource,
    established_status,
    prepare_definition,
    resources_of,
)
from tiercheck_local.apiserver.schema import built_in
from tiercheck_local.apiserver.store.storage import Key, ObjectStorage
from tiercheck_operator.model.status import rfc3339

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_SERVER_FIELDS = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "managedFields",
)
_OTHER_NAMESPACE = "the namespace of the provided object does not match the namespace sent on the request"
_ETERNAL = ("default", "kube-system", "kube-public")


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write. `validation` is Strict, Warn or Ignore."""

    dry_run: bool = False
    validation: str = "Warn"
    patched: bool = False
    """True if the object was made by applying a patch to the stored one."""
    warn: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class DeleteOptions:
    grace_seconds: int | None = None
    uid: str | None = None
    resource_version: str | None = None
    dry_run: bool = False


class ApiObjects:
    """Reads and writes of every served resource."""

    def __init__(self, storage: ObjectStorage) -> None:
        self.storage = storage
        self.registry = Registry()
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self.create(NAMESPACES, "", {"metadata": {"name": name}})

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        found = self.storage.get(resource.collection, (namespace, name))
        if found is None:
            raise errors.not_found(resource.plural, resource.group, name)
        return found

    def create(
        self, resource: Resource, namespace: str, value: Object, options: WriteOptions = WriteOptions()
    ) -> Object:
        """Creates an object. Raises ApiError 400, 403, 404 (no such namespace), 409 or 422."""
        self._check_type(resource, value)
        metadata = value["metadata"] = dict(value.get("metadata") or {})
        given = metadata.get("namespace")
        if given and given != namespace:
            raise errors.bad_request(_OTHER_NAMESPACE)
        if metadata.get("resourceVersion"):
            raise errors.ApiError(
                500, "InternalError", "resourceVersion should not be set on objects to be created"
            )
        name = self._new_name(resource, metadata)
        self._check_namespace(resource, namespace, name)
        metadata["name"] = name
        if resource.namespaced:
            metadata["namespace"] = namespace
        for field in (*_SERVER_FIELDS, "selfLink"):
            metadata.pop(field, None)
        _drop_empty(metadata)
        metadata.update(uid=str(uuid.uuid4()), creationTimestamp=rfc3339(time.time()))
        if _has_generation(resource):
            metadata["generation"] = 1
        value = self._prepared(resource, value, options)
        found = built_in.name_faults(resource.collection, name)
        found += built_in.metadata_faults(metadata)
        found += resource.custom.faults(value, None) if resource.custom else []
        if found:
            raise errors.invalid(resource.kind, resource.group, name, found)
        key = (namespace, name)
        if self.storage.get(resource.collection, key) is not None:
            raise errors.already_exists(resource.plural, resource.group, name)
        if options.dry_run:
            return value
        stored = self.storage.put(resource.collection, key, value)
        return self._after_write(resource, stored)

    def replace(
        self,
        resource: Resource,
        key: Key,
        value: Object,
        part: str = "",
        options: WriteOptions = WriteOptions(),
    ) -> Object:
        """Replaces the stored object. `part`: "", "status" or "finalize". No new version if unchanged."""
        old = self.get(resource, *key)
        self._check_type(resource, value)
        metadata = value["metadata"] = dict(value.get("metadata") or {})
        self._check_identity(resource, key, metadata, old, options.patched)
        for field in _SERVER_FIELDS:
            metadata.pop(field, None)
            if field in old["metadata"]:
                metadata[field] = old["metadata"][field]
        metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        _drop_empty(metadata)
        metadata.setdefault("name", key[1])
        if resource.namespaced:
            metadata.setdefault("namespace", key[0])
        if resource.custom:
            value = self._custom_accepted(resource, value, options)
        value = _restricted(resource, value, old, part)
        metadata = value["metadata"]
        found = _finalizer_faults(value, old) + built_in.metadata_faults(metadata)
        if not part:
            found += self._update_faults(resource, value, old)
        found += resource.custom.faults(value, old) if resource.custom else []
        if found:
            raise errors.invalid(resource.kind, resource.group, key[1], found)
        if _content(value) != _content(old) and _has_generation(resource):
            value["metadata"] = {**metadata, "generation": old["metadata"].get("generation", 0) + 1}
        if value == old or options.dry_run:
            return value if options.dry_run else old
        if _is_gone(value) or (resource.collection == "/namespaces" and _is_finalized(value)):
            return self._remove(resource, key, value)
        return self._after_write(resource, self.storage.put(resource.collection, key, value))

    def delete(self, resource: Resource, key: Key, options: DeleteOptions) -> tuple[Object, bool]:
        """Returns the last state, and whether the object is gone (else it waits for grace or finalizers)."""
        old = self.get(resource, *key)
        if resource.collection == "/namespaces" and key[1] in _ETERNAL:
            raise errors.forbidden("namespaces", "", key[1], "this namespace may not be deleted")
        metadata = dict(old["metadata"])
        self._check_preconditions(resource, key[1], metadata, options)
        grace = _grace_seconds(resource, old, options)
        held = resource.collection == "/namespaces" and not _spec_finalized(old)
        waits = bool(metadata.get("finalizers")) or grace > 0 or held
        if options.dry_run:
            return old, not waits
        if not waits:
            return self._remove(resource, key, old), True
        already = metadata.get("deletionGracePeriodSeconds") if "deletionTimestamp" in metadata else None
        if already is None or grace < already:
            metadata["deletionTimestamp"] = rfc3339(time.time() + grace)
            metadata["deletionGracePeriodSeconds"] = grace
            if already is None and "generation" in metadata:
                metadata["generation"] += 1
        value = {**old, "metadata": metadata}
        if resource.collection == "/namespaces":
            value["status"] = {**old.get("status", {}), "phase": "Terminating"}
            del metadata["deletionGracePeriodSeconds"]
        return (old if value == old else self.storage.put(resource.collection, key, value)), False

    def _remove(self, resource: Resource, key: Key, value: Object) -> Object:
        removed = self.storage.remove(resource.collection, key, value)
        if resource is CRDS:
            spec = removed["spec"]
            self.registry.replace_custom(spec["group"], spec["names"]["plural"], [])
            self.storage.drop(f"{spec['group']}/{spec['names']['plural']}")
        return removed

    def _after_write(self, resource: Resource, stored: Object) -> Object:
        if resource is CRDS:
            spec = stored["spec"]
            self.registry.replace_custom(spec["group"], spec["names"]["plural"], resources_of(stored))
        return stored

    def _check_type(self, resource: Resource, value: Any) -> None:
        if not isinstance(value, dict):
            raise errors.bad_request("the object provided is unrecognized (must be of type Object)")
        for field, word in (("kind", "Kind"), ("apiVersion", "apiVersion")):
            if resource.custom and not value.get(field):
                why = f"Object '{word}' is missing in '{json.dumps(value)}'"
                raise errors.bad_request(
                    f"the object provided is unrecognized (must be of type {resource.kind}): {why}"
                )
        value.setdefault("apiVersion", resource.api_version)
        value.setdefault("kind", resource.kind)
        if value["apiVersion"] != resource.api_version:
            raise errors.bad_request(
                f"the API version in the data ({value['apiVersion']}) does not match the expected API "
                f"version ({resource.api_version})"
            )
        if value["kind"] != resource.kind:
            raise errors.bad_request(
                f'{value["kind"]} in version "{resource.version}" cannot be handled as a {resource.kind}'
            )
        if not resource.custom:
            built_in.check_types(resource.kind, value)

    def _new_name(self, resource: Resource, metadata: Object) -> str:
        if metadata.get("name"):
            return str(metadata["name"])
        if not metadata.get("generateName"):
            cause = FieldCause(
                "metadata.name", "Required value: name or generateName is required", "FieldValueRequired"
            )
            raise errors.invalid(resource.kind, resource.group, "", [cause])
        return str(metadata["generateName"]) + "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(5))

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        if not resource.namespaced:
            return
        found = self.storage.get(NAMESPACES.collection, ("", namespace))
        if found is None:
            raise errors.not_found("namespaces", "", namespace)
        if "deletionTimestamp" in found["metadata"]:
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = {
                "reason": "NamespaceTerminating",
                "message": f"namespace {namespace} is being terminated",
                "field": "metadata.namespace",
            }
            raise errors.forbidden(resource.plural, resource.group, name, why, [cause])

    def _check_identity(
        self, resource: Resource, key: Key, metadata: Object, old: Object, patched: bool
    ) -> None:
        if metadata.get("name", key[1]) != key[1]:
            raise errors.bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL ({key[1]})"
            )
        if resource.namespaced and (metadata.get("namespace") or key[0]) != key[0]:
            raise errors.bad_request(_OTHER_NAMESPACE)
        uid, version = metadata.get("uid"), metadata.get("resourceVersion")
        if uid and uid != old["metadata"]["uid"]:
            if patched:
                cause = FieldCause("metadata.uid", f'Invalid value: "{uid}": field is immutable')
                raise errors.invalid(resource.kind, resource.group, key[1], [cause])
            why = (
                f"StorageError: invalid object: Precondition failed: UID in precondition: {uid}, UID in "
                f"object meta: {old['metadata']['uid']}"
            )
            raise errors.conflict(resource.plural, resource.group, key[1], why)
        if version and version != old["metadata"]["resourceVersion"]:
            raise errors.conflict(resource.plural, resource.group, key[1])
        if not version and resource.custom:
            cause = FieldCause(
                "metadata.resourceVersion", "Invalid value: 0: must be specified for an update"
            )
            raise errors.invalid(resource.plural, resource.group, key[1], [cause])

    def _check_preconditions(
        self, resource: Resource, name: str, metadata: Object, options: DeleteOptions
    ) -> None:
        wanted = (
            ("UID", options.uid, metadata["uid"]),
            ("ResourceVersion", options.resource_version, metadata["resourceVersion"]),
        )
        for word, given, actual in wanted:
            if given is not None and given != actual:
                fate = "deleted and then recreated" if word == "UID" else "modified"
                why = (
                    f"the {word} in the precondition ({given}) does not match the {word} in record "
                    f"({actual}). The object might have been {fate}"
                )
                raise errors.conflict(resource.plural, resource.group, name, why)

    def _prepared(self, resource: Resource, value: Object, options: WriteOptions) -> Object:
        if resource is CRDS:
            found = prepare_definition(value)
            if found:
                raise errors.invalid(resource.kind, resource.group, value["metadata"]["name"], found)
            value["status"] = established_status(value)
        elif resource.custom:
            if resource.custom.has_status:
                value.pop("status", None)
            value = self._custom_accepted(resource, value, options)
        else:
            found = built_in.prepare_new(resource.collection, value)
            if found:
                raise errors.invalid(resource.kind, resource.group, value["metadata"]["name"], found)
        return value

    def _custom_accepted(self, resource: Resource, value: Object, options: WriteOptions) -> Object:
        assert resource.custom is not None
        accepted, unknown = resource.custom.accept(value)
        if unknown and options.validation == "Strict":
            listed = ", ".join(f'unknown field "{path}"' for path in sorted(unknown))
            raise errors.bad_request(
                f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
                f"strict decoding error: {listed}"
            )
        if options.validation == "Warn":
            for path in sorted(unknown):
                options.warn(f'unknown field "{path}"')
        return accepted

    def _update_faults(self, resource: Resource, value: Object, old: Object) -> list[FieldCause]:
        if resource is CRDS:
            found = prepare_definition(value)
            if not found:
                value["status"] = established_status({**value, "status": old.get("status")})
            return found
        return [] if resource.custom else built_in.prepare_update(resource.collection, value, old)


def _drop_empty(metadata: Object) -> None:
    """Removes empty maps and lists, which mean the same as none."""
    for field in ("labels", "annotations", "finalizers", "ownerReferences"):
        if field in metadata and not metadata[field]:
            del metadata[field]


def _has_generation(resource: Resource) -> bool:
    return resource.custom is not None or resource.collection in (
        "/pods", "policy/poddisruptionbudgets", CRDS.collection,
    )  # fmt: skip


def _content(value: Object) -> str:
    """Returns what a generation counts: everything that is neither metadata nor status."""
    return json.dumps({k: v for k, v in value.items() if k not in ("metadata", "status")}, sort_keys=True)


def _restricted(resource: Resource, value: Object, old: Object, part: str) -> Object:
    """Returns `value` with what this endpoint must not change taken from `old`."""
    separate = "status" in resource.subresources
    if part == "status":
        if resource.custom:
            kept = {k: v for k, v in old.items() if k != "status"}
            return {**kept, **({"status": value["status"]} if "status" in value else {})}
        result = {**value, **({"spec": old["spec"]} if "spec" in old else {})}
        if resource is PODS and "ownerReferences" in old["metadata"]:
            result["metadata"] = {**value["metadata"], "ownerReferences": old["metadata"]["ownerReferences"]}
        return result
    if part == "finalize":
        return {**old, "spec": {**old["spec"], "finalizers": value.get("spec", {}).get("finalizers", [])}}
    if separate:
        value = {k: v for k, v in value.items() if k != "status"}
        if "status" in old:
            value["status"] = old["status"]
    return value


def _finalizer_faults(value: Object, old: Object) -> list[FieldCause]:
    if "deletionTimestamp" not in old["metadata"]:
        return []
    before = old["metadata"].get("finalizers") or []
    added = [f'"{f}"' for f in value["metadata"].get("finalizers") or [] if f not in before]
    if not added:
        return []
    why = "no new finalizers can be added if the object is being deleted, found new finalizers "
    why += f"[]string{{{', '.join(added)}}}"
    return [FieldCause("metadata.finalizers", f"Forbidden: {why}", "FieldValueForbidden")]


def _is_gone(value: Object) -> bool:
    """Returns whether deletion was requested and nothing delays it any more."""
    metadata = value["metadata"]
    waiting = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    return "deletionTimestamp" in metadata and not waiting and value.get("kind") != "Namespace"


def _is_finalized(namespace: Object) -> bool:
    metadata = namespace["metadata"]
    return "deletionTimestamp" in metadata and not metadata.get("finalizers") and _spec_finalized(namespace)


def _spec_finalized(namespace: Object) -> bool:
    return not namespace.get("spec", {}).get("finalizers")


def _grace_seconds(resource: Resource, pod: Object, options: DeleteOptions) -> int:
    """Returns the grace period in seconds: 0 unless a node may be running the pod."""
    if resource is not PODS:
        return 0
    if not pod["spec"].get("nodeName") or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    if (wanted := options.grace_seconds) is None:
        wanted = pod["spec"].get("terminationGracePeriodSeconds", 30)
    return max(0, int(wanted))
