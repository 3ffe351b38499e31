"""Streams the changes of one collection, from a version on, as seen through a selector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.errors import Object
from tiercheck_local.apiserver.http.wire import ResponseView, dump
from tiercheck_local.apiserver.store.selectors import Predicate
from tiercheck_local.apiserver.store.storage import Change, Expired, ObjectStorage

_BOOKMARK_SECONDS = 55.0


@dataclass(frozen=True)
class WatchOptions:
    """`version` None or 0: begin with the objects that exist, as if they were just added."""

    version: int | None
    bookmarks: bool
    initial_events: bool
    seconds: float


async def stream(
    storage: ObjectStorage, view: ResponseView, namespace: str, selects: Predicate, options: WatchOptions
) -> AsyncIterator[bytes]:
    """The lines of a watch response. A history that is no longer kept gives one ERROR event (410)."""
    encoder = _Encoder(view)
    collection = view.resource.collection
    queue: asyncio.Queue[Change] = asyncio.Queue()
    unsubscribe = storage.subscribe(collection, queue.put_nowait)
    try:
        seen = storage.version
        initial = options.initial_events or not options.version
        if initial:
            for _, value in storage.items(collection, namespace):
                if selects(value):
                    yield encoder.event("ADDED", value)
            if options.initial_events and options.bookmarks:
                yield encoder.bookmark(seen, end_of_initial=True)
        else:
            assert options.version is not None
            try:
                missed = list(storage.changes_after(collection, options.version))
            except Expired as error:
                yield encoder.failure(errors.too_old(options.version, error.oldest))
                return
            for change in missed:
                if (line := encoder.change(change, namespace, selects)) is not None:
                    yield line
        deadline = asyncio.get_running_loop().time() + options.seconds
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                async with asyncio.timeout(min(left, _BOOKMARK_SECONDS)):
                    change = await queue.get()
            except TimeoutError:
                if options.bookmarks:
                    yield encoder.bookmark(storage.version)
                continue
            if change.version > seen and (line := encoder.change(change, namespace, selects)) is not None:
                yield line
    finally:
        unsubscribe()


class _Encoder:
    """Turns changes into lines. Whole objects are encoded once for all watchers that see them alike."""

    def __init__(self, view: ResponseView) -> None:
        self._view = view
        self._headers = True

    def change(self, change: Change, namespace: str, selects: Predicate) -> bytes | None:
        if namespace and change.object["metadata"].get("namespace") != namespace:
            return None
        before = change.previous is not None and selects(change.previous)
        after = change.type != "DELETED" and selects(change.object)
        if not before and not after:
            return None
        kind = "MODIFIED" if before and after else "ADDED" if after else "DELETED"
        shown = change.object
        if kind == "DELETED" and change.type != "DELETED" and change.previous is not None:
            # It left the selection: the client gets what it knew, at the version at which it left.
            version = change.object["metadata"]["resourceVersion"]
            shown = {
                **change.previous,
                "metadata": {**change.previous["metadata"], "resourceVersion": version},
            }
        if self._view.as_table:
            return self.event(kind, shown)
        key = kind + self._view.name
        if key not in change.encoded:
            change.encoded[key] = self.event(kind, shown)
        return change.encoded[key]

    def event(self, kind: str, value: Object) -> bytes:
        shown = self._view.one(value, self._headers)
        self._headers = False
        return dump({"type": kind, "object": shown}) + b"\n"

    def bookmark(self, version: int, end_of_initial: bool = False) -> bytes:
        resource = self._view.resource
        metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
        if end_of_initial:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        value = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        if self._view.as_table:
            value = {**self._view.one(value), "columnDefinitions": []}
        return dump({"type": "BOOKMARK", "object": value}) + b"\n"

    @staticmethod
    def failure(error: errors.ApiError) -> bytes:
        return dump({"type": "ERROR", "object": error.status()}) + b"\n"
