"""Calls the API server of the laptop cluster, and follows collections."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml

from tiercheck.protocol.plain_json import parse_json
from tiercheck_operator.kubernetes.api_server import (
    WATCH_SECONDS,
    ApiClient,
    ApiFailure,
    ApiResource,
    ApiServer,
    Object,
    selectors,
)

OnChange = Callable[[str, Object], Any]

_OUTDATED = {404, 409}
"""Status codes of a call on an object that is gone or was changed meanwhile."""
log = logging.getLogger(__name__)


WatchItem = tuple[str, Object]
"""ADDED, MODIFIED or DELETED with the object, or LISTED with the collection: all others are gone."""


class LocalAccess:
    """The access that a kubeconfig as `write_kubeconfig` writes it gives, with no proxy between.

    It does without the kubernetes package, which takes half of the time in which a node's agent starts.
    """

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        authority = cluster.get("certificate-authority-data")
        self.tls = (
            ssl.create_default_context(cadata=base64.b64decode(authority).decode()) if authority else None
        )
        self.server: str = cluster["server"]
        self._headers = {"Authorization": f"Bearer {user['token']}"} if user.get("token") else {}
        # Many calls at once, and one try of each: nothing may be written twice.
        self._pool = urllib3.PoolManager(maxsize=16, retries=False, ssl_context=self.tls)

    def pool(self) -> urllib3.PoolManager:
        return self._pool

    def headers(self) -> Mapping[str, str]:
        return self._headers


def open_local(kubeconfig: Path) -> ApiServer:
    """Opens the server of a laptop cluster by its kubeconfig."""
    return ApiServer(LocalAccess(kubeconfig), timeout=30.0)


class Client(ApiClient):
    """A client of one API server, for `async with`; every call raises ApiFailure and does as in ApiServer."""

    @staticmethod
    def of(kubeconfig: Path) -> Client:
        """Returns a client of the server that this file names."""
        return Client(open_local(kubeconfig))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        self.server.close()

    async def patch_as_read(
        self, resource: ApiResource, item: Mapping[str, Any], change: Object, *, subresource: str = ""
    ) -> Object | None:
        """Merges `change` into an unchanged object; else returns None: the watch will show what happened."""
        metadata = item["metadata"]
        guard = {**change.get("metadata", {}), "resourceVersion": metadata["resourceVersion"]}
        body = {**change, "metadata": guard}
        try:
            return await self.patch(
                resource, metadata.get("namespace"), metadata["name"], body, subresource=subresource
            )
        except ApiFailure as failure:
            if failure.status not in _OUTDATED:
                raise
            return None

    async def delete_as_read(
        self, resource: ApiResource, item: Mapping[str, Any], *, grace: int | None = None
    ) -> None:
        """Deletes this object, but not a newer one of the same name."""
        metadata = item["metadata"]
        await self.delete(
            resource, metadata.get("namespace"), metadata["name"], uid=metadata["uid"], grace=grace
        )

    async def follow(
        self, resource: ApiResource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> AsyncIterator[WatchItem]:
        """Yields the collection, then every change, for ever.
        The collection is listed anew whenever a change may be missed. An API server that is away is waited
        for."""
        loop, stop = asyncio.get_running_loop(), threading.Event()
        news: asyncio.Queue[WatchItem | BaseException] = asyncio.Queue()

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                try:
                    for one in _follow(self.server, resource.path(namespace), selectors(labels, fields)):
                        if stop.is_set():
                            return
                        loop.call_soon_threadsafe(news.put_nowait, one)
                except Exception as error:
                    loop.call_soon_threadsafe(news.put_nowait, error)

        # A daemon, as it may wait for the next change for minutes.
        threading.Thread(target=read, name=f"follow {resource.plural}", daemon=True).start()
        try:
            while True:
                one = await news.get()
                if isinstance(one, BaseException):
                    raise one
                yield one
        finally:
            stop.set()


def _follow(server: ApiServer, path: str, selected: Mapping[str, str]) -> Iterator[WatchItem]:
    pause = 0.1
    while True:
        try:
            answer = server.request("GET", f"{path}?{urlencode(selected)}")
            yield "LISTED", answer
            pause = 0.1
            yield from _watch(server, path, selected, answer["metadata"]["resourceVersion"])
        except ApiFailure as failure:
            if 0 < failure.status < 500 and failure.status not in {401, 403, 404, 410, 429}:
                raise
        time.sleep(pause)
        pause = min(2.0, pause * 2)


def _watch(server: ApiServer, path: str, selected: Mapping[str, str], version: str) -> Iterator[WatchItem]:
    """Yields changes after `version`; resumes when the server ends a watch, returns if it lost them (410)."""
    asked = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS), **selected}
    while True:
        for line in server.lines(f"{path}?{urlencode({**asked, 'resourceVersion': version})}"):
            event = parse_json(line)
            found = event["object"]
            if event["type"] == "ERROR":
                if found.get("code") == 410:
                    return
                raise ApiFailure(int(found.get("code", 500)), found.get("message", ""))
            version = found["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                yield event["type"], found


class Cache:
    """A collection kept in memory and updated by a watch: `objects` by UID.
    `on_change(kind, object)` is called after each change, for ADDED, MODIFIED and DELETED; `on_sync()` after
    each complete listing."""

    def __init__(
        self,
        client: Client,
        resource: ApiResource,
        on_change: OnChange,
        *,
        on_sync: Callable[[], Any] = lambda: None,
        namespace: str | None = None,
        fields: str = "",
    ) -> None:
        self.objects: dict[str, Object] = {}
        self.synced = False
        self.resource = resource
        self._client, self._namespace, self._fields = client, namespace, fields
        self._on_change, self._on_sync = on_change, on_sync

    async def run(self) -> None:
        """Updates the cache for ever. Raises ApiFailure if the collection cannot be watched at all."""
        async for kind, found in self._client.follow(self.resource, self._namespace, fields=self._fields):
            if kind == "LISTED":
                self._replace(found["items"])
            elif kind == "DELETED":
                self.objects.pop(found["metadata"]["uid"], None)
                self._on_change("DELETED", found)
            else:
                self._put(found)

    def _replace(self, items: Sequence[Object]) -> None:
        present = {item["metadata"]["uid"] for item in items}
        gone = [self.objects.pop(uid) for uid in set(self.objects) - present]
        self.synced = True
        for item in gone:
            self._on_change("DELETED", item)
        for item in items:
            self._put(item)
        self._on_sync()

    def _put(self, item: Object) -> None:
        uid = item["metadata"]["uid"]
        kind = "MODIFIED" if uid in self.objects else "ADDED"
        self.objects[uid] = item
        self._on_change(kind, item)


class WokenController(ABC):
    """A controller that works whenever it was woken, once all its caches are complete."""

    def __init__(self, client: Client, caches: Iterable[Cache]) -> None:
        self._client, self._needed = client, list(caches)
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Runs for ever. Work that the server refuses is retried a second later."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if all(cache.synced for cache in self._needed):
                try:
                    await self.work()
                except ApiFailure as failure:
                    log.warning("%s: %s", type(self).__name__, failure)
                    asyncio.get_running_loop().call_later(1.0, self.wake)

    @abstractmethod
    async def work(self) -> None:
        """Brings all objects to their wanted state. Raises ApiFailure."""


async def attempt(what: str, work: Awaitable[None]) -> None:
    """Waits for `work` on one of many objects; logs a refusal, so that the others are still handled."""
    try:
        await work
    except ApiFailure as failure:
        if failure.status not in _OUTDATED:
            log.warning("%s: %s", what, failure)
