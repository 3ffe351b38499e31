"""Calls one Kubernetes API server with plain dictionaries, for all parts that talk to one.

Who they are is the business of their `ServerAccess`.
"""

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
"""Seconds; a server that wants to be left alone for longer is asked again after that."""
_MOST_ERROR = 2**20
"""Bytes of an answer that says no."""
TOO_LARGE = 413


@dataclass(frozen=True)
class ApiResource:
    """A collection of the API, such as v1 pods."""

    api_version: str
    plural: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        return ("/apis/" if "/" in self.api_version else "/api/") + "/".join(
            map(_segment, self.api_version.split("/", 1))
        )

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """The URL path; without `namespace`, of all namespaces. Raises ApiFailure for what is no name."""
        scope = f"/namespaces/{_segment(namespace)}" if self.namespaced and namespace is not None else ""
        tail = "" if name is None else f"/{_segment(name)}"
        return f"{self.root}{scope}/{self.plural}{tail}{subresource and '/' + subresource}"


def _segment(name: str) -> str:
    """Anybody may write names, so none becomes more than the one segment of a path that it stands for."""
    if name in ("", ".", ".."):  # which clients resolve, quoted or not
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

    `reason`: the server's one word (NotFound ...), or NoAnswer, BadAnswer, or BadRequest for what cannot even
    be sent. `retry_after`: seconds for which the server wants to be left alone; None: it did not say.
    `considered`: it is the answer to this call, not one that whatever is called would get.
    """

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
        return self.status == 404

    @property
    def busy(self) -> bool:
        """The server has not even looked at it (priority and fairness, or overload), so that it may be sent
        again as it is. A disruption budget and a webhook may answer 429 as well, about one object."""
        if self.considered:
            return False
        return self.status == 429 or (self.status == 503 and self.retry_after is not None)

    @property
    def refused(self) -> bool:
        """The server said no (quota, admission, rights, validation): asking again soon will not help."""
        return self.status in (400, 403, 405, TOO_LARGE, 422)


class ServerAccess(Protocol):
    """Where the server is and who we are; asked at each call, as authorities and tokens change."""

    server: str
    """Its URL."""

    def pool(self) -> urllib3.PoolManager:
        """Connections that check who the server is."""

    def headers(self) -> Mapping[str, str]:
        """Say who we are."""


class ApiServer:
    """Safe for use by several threads. Every call raises ApiFailure."""

    def __init__(self, access: ServerAccess, timeout: float = 15.0, agent: str = "tiercheck") -> None:
        self._access, self._timeout, self._agent = access, urllib3.Timeout(total=timeout), agent
        self._known: dict[tuple[str, str], ApiResource] = {}
        self.url = access.server

    def close(self) -> None:
        self._access.pool().clear()

    def get(self, resource: ApiResource, namespace: str | None, name: str) -> Object:
        return self.request("GET", resource.path(namespace, name))

    def find(self, resource: ApiResource, namespace: str | None, name: str) -> Object | None:
        """None if there is no such object."""
        with _missing_ok():
            return self.get(resource, namespace, name)
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
        """`conflict` if it exists already."""
        return self.request("POST", resource.path(namespace), body)

    def bind(self, namespace: str, name: str, binding: Object) -> Object:
        """Gives a pod its node."""
        return self.request("POST", PODS.path(namespace, name, "binding"), binding)

    def replace(self, resource: ApiResource, namespace: str | None, name: str, body: Object) -> Object:
        return self.request("PUT", resource.path(namespace, name), body)

    def patch(
        self, resource: ApiResource, namespace: str | None, name: str, body: Object, *, subresource: str = ""
    ) -> Object:
        """JSON merge patch; a resourceVersion in `body` is a precondition."""
        return self.request("PATCH", resource.path(namespace, name, subresource), body)

    def evict(self, namespace: str, name: str, *, uid: str = "", grace: int | None = None) -> Object:
        """A pod. `considered` if a disruption budget keeps it."""
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
        """Ask for deletion. False: it is gone already, or a newer namesake of the one with `uid` is there."""
        try:
            self.request("DELETE", resource.path(namespace, name), _delete_options(uid, grace))
        except ApiFailure as failure:
            if not failure.not_found and not (uid and failure.conflict):
                raise
            return False
        return True

    def apply(self, manifest: Object) -> Object:
        """Create it, or merge it into what exists. Raises ApiFailure 404 for an unknown kind."""
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
        """The collection that holds objects of this kind, by discovery. Raises ApiFailure 404."""
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
        """None if the server does not know the kind, perhaps not yet."""
        with _missing_ok():
            return self.resource(api_version, kind)
        return None

    def lines(self, path: str) -> Iterator[bytes]:
        """Each line of an answer as soon as it is there. An object may be longer than any buffer."""
        rest, timeout = b"", urllib3.Timeout(connect=10.0, read=WATCH_SECONDS + 60.0)
        with self._answer("GET", path, timeout=timeout) as response:
            try:
                for piece in response.stream(amt=None):
                    *complete, rest = (rest + piece).split(b"\n")
                    yield from (line for line in complete if line.strip())
            finally:
                response.close()

    def request(self, method: str, path: str, body: object = None) -> Object:
        """Any call; the decoded JSON answer. A patch is a JSON merge patch."""
        data = self.read(method, path, body)
        try:
            return dict(parse_json(data))
        except (TypeError, ValueError) as error:
            raise self._unreadable(error) from error

    def read(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        accept: str = "application/json",
        most: int | None = None,
    ) -> bytes:
        """Any call; the answer as it is. One of more than `most` bytes is a failure."""
        with self._answer(method, path, body, accept) as response:
            return _content(response, most)

    def _unreadable(self, error: Exception) -> ApiFailure:
        return ApiFailure(
            0, f"the answer of the API server {self.url} cannot be read: {error}", reason="BadAnswer"
        )

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: object = None,
        accept: str = "application/json",
        timeout: urllib3.Timeout | None = None,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Gives an answer of 2xx, to be read inside."""
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
        except ValueError:  # the error quotes the header that cannot be sent
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
    """An ApiServer's calls for asynchronous code, in as many threads as are called at once at most."""

    def __init__(self, server: ApiServer, threads: int = 8) -> None:
        self.server = server
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="api")

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: functools.partial[R]) -> R:
        """Waits for one of the server's calls."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)

    find = _in_thread(ApiServer.find)
    find_resource = _in_thread(ApiServer.find_resource)
    create = _in_thread(ApiServer.create)
    bind = _in_thread(ApiServer.bind)
    replace = _in_thread(ApiServer.replace)
    patch = _in_thread(ApiServer.patch)
    evict = _in_thread(ApiServer.evict)
    delete = _in_thread(ApiServer.delete)
    apply = _in_thread(ApiServer.apply)


@contextlib.contextmanager
def _missing_ok() -> Iterator[None]:
    try:
        yield
    except ApiFailure as failure:
        if not failure.not_found:
            raise


def _delete_options(uid: str, grace: int | None) -> Object:
    only: Object = {"preconditions": {"uid": uid}} if uid else {}
    soon: Object = {} if grace is None else {"gracePeriodSeconds": grace}
    return {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", **only, **soon}


def _content(response: urllib3.BaseHTTPResponse, most: int | None) -> bytes:
    """Raises ApiFailure if there are more bytes than `most`."""
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
    # Only whole seconds: a date, which the API server never sends, counts as not said.
    wait = response.headers.get("Retry-After") or ""
    return ApiFailure(
        int(response.status),
        str(status.get("message") or "") or text or str(response.reason),
        min(float(wait), _LONGEST_HOLD) if wait.isdigit() else None,
        # Priority and fairness answer in plain text, before anything of the call is looked at.
        considered=response.status == 429
        and (status.get("kind") == "Status" or (path.endswith("/eviction") and bool(status))),
        reason=str(status.get("reason") or ""),
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
