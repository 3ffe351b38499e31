"""Stores objects, one counter of versions, and enough history for watches to resume.

It is independent of HTTP and of kinds. Stored objects are never changed in place: a write stores a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str]
"""(namespace, name); the namespace is "" for cluster-scoped objects."""


@dataclass(eq=False)
class Change:
    """One write, as watches see it. `previous` is None for the first version of an object."""

    version: int
    type: str
    collection: str
    object: Object
    previous: Object | None


class Expired(Exception):
    """The requested history is not kept. Carries the oldest version that can be followed."""

    def __init__(self, oldest: int) -> None:
        super().__init__(oldest)
        self.oldest = oldest


Listener = Callable[[Change], None]


class ObjectStorage:
    """Collections of objects. Every write takes the next version and is one of the last `history` changes."""

    def __init__(self, history: int = 10_000) -> None:
        self.version = 1
        self._collections: dict[str, dict[Key, Object]] = {}
        self._changes: deque[Change] = deque(maxlen=history)
        self._forgotten = 1
        self._listeners: dict[str, list[Listener]] = {}

    def get(self, collection: str, key: Key) -> Object | None:
        return self._collections.get(collection, {}).get(key)

    def items(self, collection: str, namespace: str = "") -> list[tuple[Key, Object]]:
        """Returns the objects sorted by namespace and name, as lists are."""
        found = self._collections.get(collection, {})
        return sorted((key, value) for key, value in found.items() if not namespace or key[0] == namespace)

    def put(self, collection: str, key: Key, value: Object) -> Object:
        """Stores `value` under the next version, which its metadata gets. Returns what was stored."""
        objects = self._collections.setdefault(collection, {})
        previous = objects.get(key)
        stored = self._stamped(value)
        objects[key] = stored
        self._record("MODIFIED" if previous is not None else "ADDED", collection, stored, previous)
        return stored

    def remove(self, collection: str, key: Key, value: Object | None = None) -> Object:
        """Removes the object; watchers see `value` (default: its last state) with the removal's version."""
        previous = self._collections[collection].pop(key)
        last = self._stamped(value if value is not None else previous)
        self._record("DELETED", collection, last, previous)
        return last

    def drop(self, collection: str) -> None:
        """Removes every object of a collection, as happens when its CRD is deleted."""
        for key, _ in self.items(collection):
            self.remove(collection, key)

    def changes_after(self, collection: str, version: int) -> Iterator[Change]:
        """Returns the changes after `version`. Raises Expired if some of them are not kept."""
        if version < self._forgotten:
            raise Expired(self._forgotten)
        return iter([c for c in self._changes if c.version > version and c.collection == collection])

    def subscribe(self, collection: str, listener: Listener) -> Callable[[], None]:
        """Calls `listener` at every further change of the collection. Returns a function that stops that."""
        listeners = self._listeners.setdefault(collection, [])
        listeners.append(listener)
        return lambda: listeners.remove(listener)

    def _stamped(self, value: Object) -> Object:
        self.version += 1
        return {**value, "metadata": {**value["metadata"], "resourceVersion": str(self.version)}}

    def _record(self, kind: str, collection: str, value: Object, previous: Object | None) -> None:
        change = Change(self.version, kind, collection, value, previous)
        if len(self._changes) == self._changes.maxlen:
            self._forgotten = self._changes[0].version
        self._changes.append(change)
        for listener in list(self._listeners.get(collection, ())):
            listener(change)
