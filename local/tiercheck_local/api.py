"""The API for code that is not asynchronous, such as tests, the demo and the command line: same client, own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tiercheck_local.client import ApiFailure, Client, Object, Resource

T = TypeVar("T")


class GaveUp(AssertionError):
    """What was waited for did not come; the message says what was seen instead."""


class Api:
    """One API server. `close` when done. Every call raises ApiFailure when the server refuses."""

    def __init__(self, kubeconfig: Path) -> None:
        self._client = Client.of(kubeconfig)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api", daemon=True)
        self._thread.start()
        self._kinds: dict[tuple[str, str], Resource] = {}
        self._call(self._client.__aenter__())

    def close(self) -> None:
        self._call(self._client.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        return self._call(self._client.get(resource, namespace, name))

    def find(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """None if there is no such object."""
        return self._call(self._client.find(resource, namespace, name))

    def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> list[Object]:
        return self._call(self._client.list(resource, namespace, labels, fields))

    def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        return self._call(self._client.create(resource, namespace, body))

    def patch(
        self, resource: Resource, namespace: str | None, name: str, body: object, *, subresource: str = ""
    ) -> Object:
        """JSON merge patch."""
        return self._call(self._client.patch(resource, namespace, name, body, subresource=subresource))

    def delete(self, resource: Resource, namespace: str | None, name: str, *, grace: int | None = None) -> None:
        """No error if it is gone already."""
        self._call(self._client.delete(resource, namespace, name, grace=grace))

    def request(self, method: str, path: str, body: object = None) -> Object:
        return self._call(self._client.request(method, path, body))

    def apply(self, manifest: Object) -> Object:
        """Create it, or merge it into what exists. Raises ApiFailure 404 for an unknown kind."""
        resource = self.resource(manifest["apiVersion"], manifest["kind"])
        metadata = manifest["metadata"]
        namespace = metadata.get("namespace", "default") if resource.namespaced else None
        try:
            return self.create(resource, namespace, manifest)
        except ApiFailure as failure:
            if failure.code != 409:
                raise
        return self.patch(resource, namespace, metadata["name"], manifest)

    def resource(self, api_version: str, kind: str) -> Resource:
        """The collection of a kind, by discovery. Raises ApiFailure 404."""
        if (api_version, kind) not in self._kinds:
            answer = self.request("GET", Resource(api_version, "").root)
            for entry in answer.get("resources") or []:
                if "/" not in entry["name"]:
                    self._kinds[api_version, entry["kind"]] = Resource(
                        api_version, entry["name"], bool(entry["namespaced"])
                    )
        if (api_version, kind) not in self._kinds:
            raise ApiFailure(404, "NotFound", f"the server has no {kind} in {api_version}")
        return self._kinds[api_version, kind]


def wait_for(
    condition: Callable[[], T | None], deadline: float, what: str, explain: Callable[[], str] = lambda: ""
) -> T:
    """The first truthy result of `condition`, asked ten times a second for `deadline` seconds. Raises GaveUp with `explain()`."""
    end = time.monotonic() + deadline
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > end:
            raise GaveUp(f"waited {deadline:.0f} s in vain for {what}; last answer: {result!r}\n{explain()}")
        time.sleep(0.1)
