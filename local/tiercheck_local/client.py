"""A thin Kubernetes client: the agents and controllers need eight verbs and a watch that never loses an event.

The official client is large and its asynchronous form is a separate package; plain dicts over aiohttp start faster and cost
less on a machine whose cores belong to the training.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tiercheck_local import kubeconfig

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


@dataclass(frozen=True)
class Resource:
    """A collection of the API, such as v1 pods."""

    api_version: str
    plural: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        return f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """The URL path; without `namespace`, of all namespaces."""
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{self.root}{scope}/{self.plural}{tail}"


PODS = Resource("v1", "pods")
NODES = Resource("v1", "nodes", namespaced=False)
NAMESPACES = Resource("v1", "namespaces", namespaced=False)
SERVICES = Resource("v1", "services")
SECRETS = Resource("v1", "secrets")
CONFIG_MAPS = Resource("v1", "configmaps")
EVENTS = Resource("v1", "events")
DISRUPTION_BUDGETS = Resource("policy/v1", "poddisruptionbudgets")
LEASES = Resource("coordination.k8s.io/v1", "leases")
CRDS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)


class ApiFailure(Exception):
    """The API server refused. `code` is the HTTP status, `reason` its one word (NotFound, Conflict ...)."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class Listed:
    """The complete collection: what is not in it is gone."""

    items: tuple[Object, ...]


@dataclass(frozen=True)
class Changed:
    """One change. `kind` is ADDED, MODIFIED or DELETED."""

    kind: str
    object: Object


class Client:
    """One API server. Open with `async with`; every call raises ApiFailure, or aiohttp.ClientError if it is not there."""

    def __init__(self, access: kubeconfig.Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    @staticmethod
    def of(path: Path) -> Client:
        """The server that the kubeconfig at `path` names."""
        return Client(kubeconfig.load(path))

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._access.tls if self._access.tls is not None else True)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._access.headers, timeout=aiohttp.ClientTimeout(total=30)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Any call; the decoded JSON answer."""
        assert self._session is not None, "open the client with `async with`"
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": content_type} if data is not None else {}
        async with self._session.request(
            method, self._access.server + path, data=data, params=params, headers=headers
        ) as answer:
            text = await answer.read()
            if answer.status >= 400:
                raise _failure(answer.status, text)
            return dict(json.loads(text))

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        return await self.request("GET", resource.path(namespace, name))

    async def find(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """As `get`; None if there is no such object."""
        try:
            return await self.get(resource, namespace, name)
        except ApiFailure as failure:
            if failure.code == 404:
                return None
            raise

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> list[Object]:
        answer = await self.request("GET", resource.path(namespace), params=_selectors(labels, fields))
        return list(answer["items"])

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        return await self.request("POST", resource.path(namespace), body)

    async def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: object,
        *,
        subresource: str = "",
        content_type: str = MERGE,
    ) -> Object:
        return await self.request("PATCH", resource.path(namespace, name, subresource), body, content_type=content_type)

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str = "",
        grace: int | None = None,
        propagation: str = "Background",
    ) -> None:
        """Ask for deletion; `uid` guards against a newer object of the same name, which counts as success, as does 404."""
        body: Object = {"propagationPolicy": propagation}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self.request("DELETE", resource.path(namespace, name), body)
        except ApiFailure as failure:
            if failure.code != 404 and not (uid and failure.code == 409):
                raise

    async def follow(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Listed | Changed]:
        """The collection, then every change to it, for ever.

        A new `Listed` follows whenever changes may have been missed. An API server that is away is waited for.
        """
        pause = 0.1
        while True:
            try:
                answer = await self.request("GET", resource.path(namespace), params=_selectors(labels, fields))
                yield Listed(tuple(answer["items"]))
                pause = 0.1
                listed_at = answer["metadata"]["resourceVersion"]
                async for change in self._watch(resource.path(namespace), _selectors(labels, fields), listed_at):
                    yield change
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # away or restarting: list again
            except ApiFailure as failure:
                if failure.code < 500 and failure.code not in {401, 403, 404, 410, 429}:
                    raise
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)

    async def _watch(self, path: str, selectors: Mapping[str, str], version: str) -> AsyncIterator[Changed]:
        """Changes after `version`; resumes when the server ends a watch, returns when it has forgotten (410)."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=660)
        while True:
            params = {
                **selectors,
                "watch": "true",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": "600",
            }
            async with self._session.get(self._access.server + path, params=params, timeout=timeout) as answer:
                if answer.status >= 400:
                    raise _failure(answer.status, await answer.read())
                async for line in _lines(answer.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        if event["object"].get("code") == 410:
                            return
                        raise _failure(int(event["object"].get("code", 500)), json.dumps(event["object"]).encode())
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield Changed(event["type"], event["object"])


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    # Not readline(): it refuses lines longer than its buffer, and an object may be.
    rest = b""
    async for piece in content.iter_any():
        *complete, rest = (rest + piece).split(b"\n")
        for line in complete:
            if line.strip():
                yield line


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _failure(code: int, text: bytes) -> ApiFailure:
    try:
        status = json.loads(text)
        return ApiFailure(code, status.get("reason", ""), status.get("message", ""))
    except (ValueError, AttributeError):
        return ApiFailure(code, "", text[:300].decode(errors="replace"))
