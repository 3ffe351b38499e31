"""Events have two faces, core/v1 and events.k8s.io/v1, over the same stored objects (kept in the core form)."""

from __future__ import annotations

from tiercheck_local.apiserver.errors import Object

_CORE_TO_NEW = {
    "involvedObject": "regarding",
    "message": "note",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "reportingComponent": "reportingController",
}
_NEW_TO_CORE = {new: core for core, new in _CORE_TO_NEW.items()}


def to_new(event: Object) -> Object:
    """A stored event as events.k8s.io/v1."""
    renamed = {_CORE_TO_NEW.get(key, key): value for key, value in event.items()}
    return renamed | {"apiVersion": "events.k8s.io/v1"}


def to_core(event: Object) -> Object:
    """The inverse of `to_new`."""
    return {_NEW_TO_CORE.get(key, key): value for key, value in event.items()} | {"apiVersion": "v1"}
