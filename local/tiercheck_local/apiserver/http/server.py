"""Serves HTTP: paths and headers around `requests`, and watches as streams."""

from __future__ import annotations

import asyncio
import hmac
import random
from collections.abc import AsyncIterator

from aiohttp import web

from tiercheck_local.apiserver import errors
from tiercheck_local.apiserver.errors import Object
from tiercheck_local.apiserver.http import discovery
from tiercheck_local.apiserver.http.admission import admit_object
from tiercheck_local.apiserver.http.requests import ApiCall, carry_out, selection
from tiercheck_local.apiserver.http.views import ResponseView, dump, view
from tiercheck_local.apiserver.resources import Target, resolve
from tiercheck_local.apiserver.store.objects import ApiObjects
from tiercheck_local.apiserver.store.selectors import Predicate
from tiercheck_local.apiserver.store.storage import Change, Expired, ObjectStorage

_BOOKMARK_SECONDS = 55.0


async def stream(
    storage: ObjectStorage,
    view: ResponseView,
    namespace: str,
    selects: Predicate,
    *,
    version: int | None,
    bookmarks: bool,
    initial_events: bool,
    seconds: float,
) -> AsyncIterator[bytes]:
    """Yields the lines of a watch response; for a history that is not kept, one ERROR event (410).
    If `version` is None or 0, existing objects come first, as if just added."""
    encoder = _Encoder(view)
    collection = view.resource.collection
    queue: asyncio.Queue[Change] = asyncio.Queue()
    unsubscribe = storage.subscribe(collection, queue.put_nowait)
    try:
        seen = storage.version
        if initial_events or not version:
            for _, value in storage.items(collection, namespace):
                if selects(value):
                    yield encoder.event("ADDED", value)
            if initial_events and bookmarks:
                yield encoder.bookmark(seen, end_of_initial=True)
        else:
            try:
                missed = list(storage.changes_after(collection, version))
            except Expired as error:
                why = f"too old resource version: {version} ({error.oldest})"
                yield encoder.failure(errors.ApiError(410, "Expired", why))
                return
            for change in missed:
                if (line := encoder.change(change, namespace, selects)) is not None:
                    yield line
        deadline = asyncio.get_running_loop().time() + seconds
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                async with asyncio.timeout(min(left, _BOOKMARK_SECONDS)):
                    change = await queue.get()
            except TimeoutError:
                if bookmarks:
                    yield encoder.bookmark(storage.version)
                continue
            if change.version > seen and (line := encoder.change(change, namespace, selects)) is not None:
                yield line
    finally:
        unsubscribe()


class _Encoder:
    """Turns changes into lines for one watcher."""

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
            # It left the selection: the client gets the state it had, at the version at which it left.
            version = change.object["metadata"]["resourceVersion"]
            shown = {
                **change.previous,
                "metadata": {**change.previous["metadata"], "resourceVersion": version},
            }
        return self.event(kind, shown)

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


_LARGEST_BODY = 3 * 1024 * 1024
_OWN_HOSTS = {"127.0.0.1", "localhost", "::1"}
_HEALTH = ("/healthz", "/livez", "/readyz")
_PUBLIC = (*_HEALTH, "/version")


def application(storage: ObjectStorage, token: str) -> web.Application:
    """Returns the whole server. Clients with the token may do everything, others read health and version."""
    app = web.Application(client_max_size=_LARGEST_BODY)
    handler = _Handler(ApiObjects(storage), token)
    app.router.add_route("*", "/{path:.*}", handler.answer)
    return app


class _Handler:
    def __init__(self, objects: ApiObjects, token: str) -> None:
        self._objects = objects
        self._token = token.encode()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._routed(request)
        except errors.ApiError as error:
            headers = {"Retry-After": "1"} if error.code == 429 else None
            return _json(error.status(), error.code, headers)

    def _check_caller(self, path: str, request: web.Request) -> None:
        """Rejects other users of the machine, and web pages under a name that resolves to 127.0.0.1."""
        if (request.url.host or "") not in _OWN_HOSTS:
            raise errors.ApiError(403, "Forbidden", f"this server is not {request.host!r}")
        # The scheme's case does not matter (RFC 9110, 11.1); the official client writes it small inside of a
        # cluster.
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        believed = scheme.lower() == "bearer" and hmac.compare_digest(
            shown.encode(errors="surrogateescape"), self._token
        )
        if path not in _PUBLIC and not believed:
            raise errors.ApiError(401, "Unauthorized", "Unauthorized")

    async def _routed(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/") or "/"
        self._check_caller(path, request)
        found = self._information(path, request)
        if found is not None:
            return found
        target = resolve(self._objects.registry, path)
        chosen = view(
            target.resource, request.headers.get("Accept", ""), request.query.get("includeObject", "")
        )
        if request.method == "GET" and request.query.get("watch") in ("true", "1") and not target.subresource:
            return await self._watch(request, target, chosen)
        # The body is read whole, and webhooks are called, before anything is done, so a call is carried out
        # in one piece.
        content_type = request.content_type if request.body_exists else ""
        call = ApiCall(request.method, request.query, content_type, await request.read())
        call = await admit_object(self._objects, target, call)
        status, body = carry_out(self._objects, target, call, chosen)
        response = _json(body, status)
        for warning in call.warnings:
            escaped = warning.replace("\\", "\\\\").replace('"', '\\"')
            response.headers.add("Warning", f'299 - "{escaped}"')
        return response

    def _information(self, path: str, request: web.Request) -> web.Response | None:
        """Answers everything that is not a resource: health, version, discovery, OpenAPI."""
        registry, parts = self._objects.registry, path.strip("/").split("/")
        if path in _HEALTH:
            return web.Response(text="ok")
        if path == "/version":
            return _json(discovery.VERSION)
        if path == "/openapi/v2":
            info = {"title": "Kubernetes", "version": "v1.33.0"}
            return _json({"swagger": "2.0", "info": info, "paths": {}, "definitions": {}})
        if path == "/openapi/v3":
            return _json(discovery.openapi_index(registry))
        body = None
        match parts:
            case ["openapi", "v3", "api", version]:
                body = discovery.openapi(registry, "", version)
            case ["openapi", "v3", "apis", group, version]:
                body = discovery.openapi(registry, group, version)
            case ["api"]:
                body = discovery.core_versions(request.host)
            case ["apis"]:
                body = discovery.groups(registry)
            case ["api", version]:
                body = discovery.resources(registry, "", version)
            case ["apis", group]:
                body = discovery.group(registry, group)
            case ["apis", group, version]:
                body = discovery.resources(registry, group, version)
        return _json(body) if body is not None else None

    async def _watch(self, request: web.Request, target: Target, chosen: ResponseView) -> web.StreamResponse:
        query = request.query
        try:
            version = int(query["resourceVersion"]) if query.get("resourceVersion") else None
            seconds = float(query.get("timeoutSeconds") or 0) or random.uniform(1800, 3600)
        except ValueError as error:
            raise errors.bad_request(f"invalid watch parameter: {error}") from error
        selects = selection(target, query)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        lines = stream(
            self._objects.storage,
            chosen,
            target.namespace,
            selects,
            version=version,
            bookmarks=query.get("allowWatchBookmarks") in ("true", "1"),
            initial_events=query.get("sendInitialEvents") in ("true", "1"),
            seconds=seconds,
        )
        try:
            async for line in lines:
                await response.write(line)
        except (ConnectionResetError, ConnectionAbortedError):
            return response  # the client went away
        finally:
            await lines.aclose()  # type: ignore[attr-defined]
        await response.write_eof()
        return response


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=dump(body), status=status, content_type="application/json", headers=headers)
