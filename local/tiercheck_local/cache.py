"""A collection of the API kept in memory, true as far as its watch has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercheck_local.client import Client, Listed, Object, Resource

OnChange = Callable[[str, Object], Any]


class Cache:
    """`objects` by UID. `on_change(kind, object)` is called after each change, for ADDED, MODIFIED and DELETED;
    `on_sync()` after each complete listing."""

    def __init__(
        self,
        client: Client,
        resource: Resource,
        on_change: OnChange,
        *,
        on_sync: Callable[[], Any] = lambda: None,
        namespace: str | None = None,
    ) -> None:
        self.objects: dict[str, Object] = {}
        self.synced = False
        self.resource = resource
        self._client, self._namespace = client, namespace
        self._on_change, self._on_sync = on_change, on_sync

    async def run(self) -> None:
        """Never returns. Raises ApiFailure if the collection cannot be watched at all."""
        async for news in self._client.follow(self.resource, self._namespace):
            if isinstance(news, Listed):
                self._replace(news)
            elif news.kind == "DELETED":
                self.objects.pop(news.object["metadata"]["uid"], None)
                self._on_change("DELETED", news.object)
            else:
                self._put(news.object)

    def _replace(self, news: Listed) -> None:
        present = {item["metadata"]["uid"] for item in news.items}
        gone = [self.objects.pop(uid) for uid in set(self.objects) - present]
        self.synced = True
        for item in gone:
            self._on_change("DELETED", item)
        for item in news.items:
            self._put(item)
        self._on_sync()

    def _put(self, item: Object) -> None:
        uid = item["metadata"]["uid"]
        kind = "MODIFIED" if uid in self.objects else "ADDED"
        self.objects[uid] = item
        self._on_change(kind, item)
