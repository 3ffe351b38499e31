"""Calls a Kubernetes API server with plain dictionaries; a `ServerAccess` provides the credentials."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from urllib.parse import quote, urlencode

import urllib3
from urllib3.exceptions import HTTPError

from tiercheck.about import __version__
from tiercheck.protocol import names
from tiercheck.protocol.plain_json import parse_json

Object = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")

MERGE_PATCH = "application/merge-patch+json"
_PAGE = 500
WATCH_SECONDS = 600
_LONGEST_HOLD = 30.0
"""Seconds. Caps the Retry-After of the server."""
_MOST_ERROR = 2**20
"""Bytes that are read of an error response."""
TOO_LARGE = 413
_BAD_ANSWER = "BadAnswer"
_NO_SUCH_PATH = "404 page not found"
"""The API server's answer, without a Status, for a kind that it does not serve."""


@dataclass(frozen=True)
class ApiResource:
    """A resource of the API, such as v1 pods."""

    api_version: str
    plural: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        return ("/apis/" if "/" in self.api_version else "/api/") + "/".join(
            map(_segment, self.api_version.split("/", 1))
        )

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Returns the URL path; without `namespace`, for all of them. Raises ApiFailure for invalid names."""
        scope = f"/namespaces/{_segment(namespace)}" if self.namespaced and namespace is not None else ""
        tail = "" if name is None else f"/{_segment(name)}"
        return f"{self.root}{scope}/{self.plural}{tail}{subresource and '/' + subresource}"


def _segment(name: str) -> str:
    """Quotes a name, which may come from any user, so that it stays one segment of the path."""
    if name in ("", ".", ".."):  # clients resolve these, quoted or not
        raise ApiFailure(400, f"{name!r} is no name", reason="BadRequest")
    return quote(name, safe=":")


PODS = ApiResource("v1", "pods")
NODES = ApiResource("v1", "nodes", namespaced=False)
NAMESPACES = ApiResource("v1", "namespaces", namespaced=False)
SERVICES = ApiResource("v1", "services")
SECRETS = ApiResource("v1", "secrets")
CONFIG_MAPS = ApiResource("v1", "configmaps")
EVENTS = ApiResource("v1", "events")
DISRUPTION_BUDGETS = ApiResource("policy/v1", "poddisruptionbudgets")
LEASES = ApiResource("coordination.k8s.io/v1", "leases")
CRDS = ApiResource("apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)
JOBS = ApiResource(f"{names.API_GROUP}/{names.API_VERSION}", names.PLURAL)


class ApiFailure(Exception):
    """The API server refused or did not answer. `status` is the HTTP status; 0: no answer.
    `reason`: the server's reason (NotFound ...), or NoAnswer, BadAnswer, or BadRequest for a request that
    cannot be sent. `retry_after`: the seconds of Retry-After; None: not given. `considered`: the server
    evaluated this call, instead of rejecting it as it would reject any call."""

    def __init__(
        self,
        status: int,
        message: str,
        retry_after: float | None = None,
        considered: bool = False,
        reason: str = "",
    ) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status, self.message, self.reason = status, message, reason
        self.retry_after = retry_after
        self.considered = considered

    @property
    def conflict(self) -> bool:
        return self.status == 409

    @property
    def not_found(self) -> bool:
        """Returns whether the API server has no such object or kind; a proxy's 404 says nothing of them."""
        return self.status == 404 and self.reason != _BAD_ANSWER

    @property
    def busy(self) -> bool:
        """Returns whether the server rejected the call unseen, so that it may be sent again unchanged.
        It does so by priority and fairness, or when overloaded. A disruption budget and a webhook may answer
        429 as well, about one object."""
        if self.considered:
            return False
        return self.status == 429 or (self.status == 503 and self.retry_after is not None)

    @property
    def refused(self) -> bool:
        """Returns whether the server refused (quota, admission, rights, validation): no retry soon helps."""
        return self.status in (400, 403, 405, TOO_LARGE, 422)


class ServerAccess(Protocol):
    """The server's address and the client's credentials; read at each call, because they are rotated."""

    server: str
    """The server's URL."""

    def pool(self) -> urllib3.PoolManager:
        """Returns a pool of connections that authenticate the server."""

    def headers(self) -> Mapping[str, str]:
        """Returns the headers that authenticate the client."""


class ApiServer:
    """A thread-safe client of one API server. Every call raises ApiFailure."""

    def __init__(self, access: ServerAccess, timeout: float = 15.0, agent: str = "tiercheck") -> None:
        self._access, self._timeout, self._agent = access, urllib3.Timeout(total=timeout), agent
        self._known: dict[tuple[str, str], ApiResource] = {}
        self.url = access.server

    def close(self) -> None:
        self._access.pool().clear()

    def get(self, resource: ApiResource, namespace: str | None, name: str) -> Object:
        return self.request("GET", resource.path(namespace, name))

    def find(self, resource: ApiResource, namespace: str | None, name: str) -> Object | None:
        """Returns an object; None if it does not exist."""
        try:
            return self.get(resource, namespace, name)
        except ApiFailure as failure:
            if not failure.not_found:
                raise
            return None

    def list(
        self, resource: ApiResource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> list[Object]:
        items: list[Object] = []
        page = {"limit": str(_PAGE), **selectors(labels, fields)}
        while True:
            answer = self.request("GET", f"{resource.path(namespace)}?{urlencode(page)}")
            items += answer.get("items") or []
            following = (answer.get("metadata") or {}).get("continue")
            if not following:
                return items
            page["continue"] = following

    def create(self, resource: ApiResource, namespace: str | None, body: Object) -> Object:
        """Creates an object. The failure is a `conflict` if it exists already."""
        return self.request("POST", resource.path(namespace), body)

    def create_or_find(self, resource: ApiResource, namespace: str | None, body: Object) -> Object | None:
        """Creates an object. Returns None, or the object that has its name already."""
        try:
            self.create(resource, namespace, body)
        except ApiFailure as failure:
            found = self.find(resource, namespace, body["metadata"]["name"]) if failure.conflict else None
            if found is None:
                raise
            return found
        return None

    def bind(self, namespace: str, name: str, binding: Object) -> Object:
        """Binds a pod to its node."""
        return self.request("POST", PODS.path(namespace, name, "binding"), binding)

    def replace(self, resource: ApiResource, namespace: str | None, name: str, body: Object) -> Object:
        return self.request("PUT", resource.path(namespace, name), body)

    def patch(
        self, resource: ApiResource, namespace: str | None, name: str, body: Object, *, subresource: str = ""
    ) -> Object:
        """Sends a JSON merge patch; a resourceVersion in `body` is a precondition."""
        return self.request("PATCH", resource.path(namespace, name, subresource), body)

    def evict(self, namespace: str, name: str, *, uid: str = "", grace: int | None = None) -> Object:
        """Evicts a pod. The failure is `considered` if a disruption budget forbids it."""
        metadata, options = {"namespace": namespace, "name": name}, _delete_options(uid, grace)
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        return self.request("POST", PODS.path(namespace, name, "eviction"), body)

    def delete(
        self,
        resource: ApiResource,
        namespace: str | None,
        name: str,
        *,
        uid: str = "",
        grace: int | None = None,
    ) -> bool:
        """Deletes an object. Returns False if it is gone already, or has another UID than `uid`."""
        try:
            self.request("DELETE", resource.path(namespace, name), _delete_options(uid, grace))
        except ApiFailure as failure:
            if not failure.not_found and not (uid and failure.conflict):
                raise
            return False
        return True

    def apply(self, manifest: Object) -> Object:
        """Creates an object, or merges it into an existing one. Raises ApiFailure 404 for an unknown kind."""
        resource = self.resource(manifest["apiVersion"], manifest["kind"])
        metadata = manifest["metadata"]
        namespace = metadata.get("namespace", "default") if resource.namespaced else None
        try:
            return self.create(resource, namespace, manifest)
        except ApiFailure as failure:
            if not failure.conflict:
                raise
        return self.patch(resource, namespace, metadata["name"], manifest)

    def resource(self, api_version: str, kind: str) -> ApiResource:
        """Returns the resource for objects of this kind, by discovery. Raises ApiFailure 404."""
        if (api_version, kind) not in self._known:
            answer = self.request("GET", ApiResource(api_version, "").root)
            for entry in answer.get("resources") or []:
                if "/" not in entry["name"]:
                    found = ApiResource(api_version, entry["name"], bool(entry["namespaced"]))
                    self._known[api_version, entry["kind"]] = found
        if (api_version, kind) not in self._known:
            raise ApiFailure(404, f"the server has no {kind} in {api_version}")
        return self._known[api_version, kind]

    def find_resource(self, api_version: str, kind: str) -> ApiResource | None:
        """Returns the resource of a kind; None if the server does not serve it, perhaps not yet."""
        try:
            return self.resource(api_version, kind)
        except ApiFailure as failure:
            if not failure.not_found:
                raise
            return None

    def lines(self, path: str) -> Iterator[bytes]:
        """Yields each line of an answer as soon as it arrives. A line may be longer than any buffer."""
        rest, timeout = b"", urllib3.Timeout(connect=10.0, read=WATCH_SECONDS + 60.0)
        with self._answer("GET", path, timeout=timeout) as response:
            try:
                for piece in response.stream(amt=None):
                    *complete, rest = (rest + piece).split(b"\n")
                    yield from (line for line in complete if line.strip())
            finally:
                response.close()

    def request(self, method: str, path: str, body: object = None) -> Object:
        """Makes any call and returns the decoded JSON answer. A patch is a JSON merge patch."""
        data = self.read(method, path, body)
        try:
            return self._decode(path, data)
        except (TypeError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ApiFailure:
        why = f"the answer of the API server {self.url} cannot be read: {error}"
        return ApiFailure(0, why, reason=_BAD_ANSWER)

    def _decode(self, path: str, data: bytes) -> Object:
        return dict(parse_json(data))

    def read(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        accept: str = "application/json",
        most: int | None = None,
    ) -> bytes:
        """Makes any call and returns the raw answer. Raises ApiFailure if it has more than `most` bytes."""
        with self._answer(method, path, body, accept) as response:
            return _content(response, most)

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: object = None,
        accept: str = "application/json",
        timeout: urllib3.Timeout | None = None,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Yields a 2xx response, to be read inside the context."""
        headers = {"Accept": accept, "User-Agent": f"{self._agent}/{__version__}"}
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH if method == "PATCH" else "application/json"
        try:
            response = self._access.pool().request(
                method,
                self.url + path,
                body=json.dumps(body, default=dict) if body is not None else None,
                headers={**headers, **self._access.headers()},
                timeout=timeout or self._timeout,
                preload_content=False,
            )
            if not 200 <= response.status < 300:
                raise _refusal(path, response)
            yield response
        except (HTTPError, OSError) as error:
            why = f"the API server {self.url} does not answer: {first_line(error)}"
            raise ApiFailure(0, why, reason="NoAnswer") from error
        except ValueError:  # its text contains the header that cannot be sent
            why = "its address or our token has characters that HTTP refuses"
            raise ApiFailure(
                0, f"the API server {self.url} cannot be asked: {why}", reason="BadRequest"
            ) from None


def _in_thread(
    call: Callable[Concatenate[ApiServer, P], R],
) -> Callable[Concatenate[ApiClient, P], Coroutine[Any, Any, R]]:
    @functools.wraps(call)
    async def waiting(self: ApiClient, /, *arguments: P.args, **named: P.kwargs) -> R:
        return await self.run(functools.partial(call, self.server, *arguments, **named))

    return waiting


class ApiClient:
    """Makes an ApiServer's calls from asynchronous code, on at most `threads` threads."""

    def __init__(self, server: ApiServer, threads: int = 8) -> None:
        self.server = server
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="api")

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: functools.partial[R]) -> R:
        """Runs one of the server's calls in a thread and waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)

    find = _in_thread(ApiServer.find)
    list = _in_thread(ApiServer.list)
    find_resource = _in_thread(ApiServer.find_resource)
    create = _in_thread(ApiServer.create)
    create_or_find = _in_thread(ApiServer.create_or_find)
    bind = _in_thread(ApiServer.bind)
    replace = _in_thread(ApiServer.replace)
    patch = _in_thread(ApiServer.patch)
    evict = _in_thread(ApiServer.evict)
    delete = _in_thread(ApiServer.delete)
    apply = _in_thread(ApiServer.apply)


def _delete_options(uid: str, grace: int | None) -> Object:
    only: Object = {"preconditions": {"uid": uid}} if uid else {}
    soon: Object = {} if grace is None else {"gracePeriodSeconds": grace}
    return {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", **only, **soon}


def _content(response: urllib3.BaseHTTPResponse, most: int | None) -> bytes:
    """Returns the body. Raises ApiFailure if it has more than `most` bytes."""
    data = response.read(None if most is None else most + 1)
    if most is not None and len(data) > most:
        response.close()
        raise ApiFailure(TOO_LARGE, f"the API server's answer has more than {most} bytes")
    response.release_conn()
    return data


def _refusal(path: str, response: urllib3.BaseHTTPResponse) -> ApiFailure:
    data = response.read(_MOST_ERROR)
    response.release_conn() if len(data) < _MOST_ERROR else response.close()
    status: Mapping[str, Any] = {}
    with contextlib.suppress(ValueError):
        found = parse_json(data or b"{}")
        status = found if isinstance(found, dict) else {}
    text = "" if data[:1] == b"{" else data[:500].decode(errors="replace").strip()
    # Only whole seconds: a date, which the API server never sends, is ignored.
    wait = response.headers.get("Retry-After") or ""
    return ApiFailure(
        int(response.status),
        str(status.get("message") or "") or text or str(response.reason),
        min(float(wait), _LONGEST_HOLD) if wait.isdigit() else None,
        # Priority and fairness answer in plain text, before the call is evaluated.
        considered=response.status == 429
        and (status.get("kind") == "Status" or (path.endswith("/eviction") and bool(status))),
        reason=str(status.get("reason") or ("" if status or text == _NO_SUCH_PATH else _BAD_ANSWER)),
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
