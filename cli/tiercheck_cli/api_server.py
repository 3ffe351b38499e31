"""Calls one Kubernetes API server with plain dictionaries, for the commands and the laptop cluster.

Logging in is the business of the kubernetes package; its model classes are not used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, urlencode

import kubernetes
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tiercheck.protocol import names
from tiercheck.protocol.plain_json import parse_json

Object = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

MERGE_PATCH = "application/merge-patch+json"
_PAGE = 500
_WATCH_SECONDS = 600


@dataclass(frozen=True)
class ApiResource:
    """A collection of the API, such as v1 pods."""

    api_version: str
    plural: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        return f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """The URL path; without `namespace`, of all namespaces."""
        scope = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced and namespace else ""
        tail = "".join(f"/{part}" for part in (quote(name, safe=":"), subresource) if part)
        return f"{self.root}{scope}/{self.plural}{tail}"


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


class RequestFailed(Exception):
    """The API server refused, or did not answer. `code` is the HTTP status, `reason` its one word (NotFound
    ...).

    Without an answer `code` is 0 and `reason` NoAnswer, BadAnswer, or BadRequest for what cannot even be
    sent.
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}" if code else message)
        self.code, self.reason, self.message = code, reason, message


@dataclass(frozen=True)
class Listing:
    """The complete collection: what is not in it is gone."""

    items: tuple[Object, ...]


@dataclass(frozen=True)
class Changed:
    """One change. `kind` is ADDED, MODIFIED or DELETED."""

    kind: str
    object: Object


class ApiServer:
    """Safe for use by several threads. Every call raises RequestFailed."""

    def __init__(self, configuration: kubernetes.client.Configuration, timeout: float = 15.0) -> None:
        # One try of each call: whoever waits wants to know, and nothing is to be written twice.
        configuration.retries = False
        self._client = kubernetes.client.ApiClient(configuration)
        self._timeout = timeout
        self._known: dict[tuple[str, str], ApiResource] = {}
        self.url = str(configuration.host)

    @staticmethod
    def of(kubeconfig: Path) -> ApiServer:
        """The server of the laptop cluster that this file names: many calls at once, no proxy between."""
        configuration = kubernetes.client.Configuration()
        config: Any = kubernetes.config
        config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
        configuration.proxy = None
        configuration.connection_pool_maxsize = 16
        return ApiServer(configuration, timeout=30.0)

    def close(self) -> None:
        self._client.rest_client.pool_manager.clear()

    def get(self, resource: ApiResource, namespace: str | None, name: str) -> Object:
        return self.request("GET", resource.path(namespace, name))

    def find(self, resource: ApiResource, namespace: str | None, name: str) -> Object | None:
        """None if there is no such object."""
        return self._none_if_missing(self.get, resource, namespace, name)

    def list(
        self, resource: ApiResource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> list[Object]:
        items: list[Object] = []
        page = {"limit": str(_PAGE), **_selectors(labels, fields)}
        while True:
            answer = self.request("GET", f"{resource.path(namespace)}?{urlencode(page)}")
            items += answer.get("items") or []
            following = (answer.get("metadata") or {}).get("continue")
            if not following:
                return items
            page["continue"] = following

    def create(self, resource: ApiResource, namespace: str | None, body: Object) -> Object:
        return self.request("POST", resource.path(namespace), body)

    def patch(
        self, resource: ApiResource, namespace: str | None, name: str, body: Object, *, subresource: str = ""
    ) -> Object:
        """JSON merge patch."""
        return self.request("PATCH", resource.path(namespace, name, subresource), body, MERGE_PATCH)

    def delete(
        self,
        resource: ApiResource,
        namespace: str | None,
        name: str,
        *,
        uid: str = "",
        grace: int | None = None,
        propagation: str = "Background",
    ) -> None:
        """Ask for deletion. It may be gone already, or a newer namesake of the object with `uid` be there."""
        body: Object = {"propagationPolicy": propagation}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", resource.path(namespace, name), body)
        except RequestFailed as failure:
            if failure.code != 404 and not (uid and failure.code == 409):
                raise

    def apply(self, manifest: Object) -> Object:
        """Create it, or merge it into what exists. Raises RequestFailed 404 for an unknown kind."""
        resource = self.resource(manifest["apiVersion"], manifest["kind"])
        metadata = manifest["metadata"]
        namespace = metadata.get("namespace", "default") if resource.namespaced else None
        try:
            return self.create(resource, namespace, manifest)
        except RequestFailed as failure:
            if failure.code != 409:
                raise
        return self.patch(resource, namespace, metadata["name"], manifest)

    def resource(self, api_version: str, kind: str) -> ApiResource:
        """The collection that holds objects of this kind, by discovery. Raises RequestFailed 404."""
        if (api_version, kind) not in self._known:
            answer = self.request("GET", ApiResource(api_version, "").root)
            for entry in answer.get("resources") or []:
                if "/" not in entry["name"]:
                    found = ApiResource(api_version, entry["name"], bool(entry["namespaced"]))
                    self._known[api_version, entry["kind"]] = found
        if (api_version, kind) not in self._known:
            raise RequestFailed(404, "NotFound", f"the server has no {kind} in {api_version}")
        return self._known[api_version, kind]

    def find_resource(self, api_version: str, kind: str) -> ApiResource | None:
        """None if the server does not know the kind, perhaps not yet."""
        return self._none_if_missing(self.resource, api_version, kind)

    def follow(
        self, resource: ApiResource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> Iterator[Listing | Changed]:
        """The collection, then every change to it, for ever.

        A new `Listing` follows whenever changes may have been missed. An API server that is away is waited
        for.
        """
        path, selectors, pause = resource.path(namespace), _selectors(labels, fields), 0.1
        while True:
            try:
                answer = self.request("GET", f"{path}?{urlencode(selectors)}")
                yield Listing(tuple(answer["items"]))
                pause = 0.1
                yield from self._watch(path, selectors, answer["metadata"]["resourceVersion"])
            except RequestFailed as failure:
                if failure.code and failure.code < 500 and failure.code not in {401, 403, 404, 410, 429}:
                    raise
            time.sleep(pause)
            pause = min(2.0, pause * 2)

    def _none_if_missing(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        try:
            return call(*arguments, **named)
        except RequestFailed as failure:
            if failure.code == 404:
                return None
            raise

    def _watch(self, path: str, selectors: Mapping[str, str], version: str) -> Iterator[Changed]:
        """Changes after `version`; resumes when the server ends a watch, returns when it forgot (410)."""
        asked = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
            **selectors,
        }
        while True:
            for line in self._lines(f"{path}?{urlencode({**asked, 'resourceVersion': version})}"):
                event = parse_json(line)
                found = event["object"]
                if event["type"] == "ERROR":
                    if found.get("code") == 410:
                        return
                    raise RequestFailed(
                        int(found.get("code", 500)), found.get("reason", ""), found.get("message", "")
                    )
                version = found["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    yield Changed(event["type"], found)

    def _lines(self, path: str) -> Iterator[bytes]:
        """Each line of an answer as soon as it is there. An object may be longer than any buffer."""
        response = self._send("GET", path, timeout=(10.0, _WATCH_SECONDS + 60.0)).response
        rest = b""
        try:
            for piece in response.stream(amt=None):
                *complete, rest = (rest + piece).split(b"\n")
                yield from (line for line in complete if line.strip())
        except (HTTPError, OSError) as error:
            raise self._no_answer(error) from error
        finally:
            response.close()

    def request(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> Object:
        """Any call; the decoded JSON answer."""
        data = self.read(method, path, body, content_type)
        try:
            return dict(parse_json(data))
        except (TypeError, ValueError) as error:
            raise RequestFailed(
                0, "BadAnswer", f"the answer of the API server {self.url} cannot be read: {error}"
            ) from error

    def read(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> bytes:
        """Any call; the answer as it is."""
        try:
            return bytes(self._send(method, path, body, content_type).read())
        except (HTTPError, OSError) as error:
            raise self._no_answer(error) from error

    def _send(
        self,
        method: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        timeout: float | tuple[float, float] | None = None,
    ) -> Any:
        headers = {"Accept": "application/json"} | (
            {"Content-Type": content_type} if body is not None else {}
        )
        try:
            request = self._client.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response: Any = self._client.call_api(*request, _request_timeout=timeout or self._timeout)
            if 200 <= response.status < 300:
                return response
            code, data, said = int(response.status), response.read(), str(response.reason)
        except ApiException as error:
            code, data, said = int(error.status or 0), error.body, str(error.reason)
        except (HTTPError, OSError) as error:
            raise self._no_answer(error) from error
        except ValueError:  # the error quotes the header that cannot be sent
            why = "its address or your token has characters that HTTP refuses"
            raise RequestFailed(
                0, "BadRequest", f"the API server {self.url} cannot be asked: {why}"
            ) from None
        reason, message = _status(data)
        if not code:
            raise RequestFailed(
                0, "NoAnswer", f"the API server {self.url} does not answer: {message or said}"
            )
        raise RequestFailed(code, reason, message or said)

    def _no_answer(self, error: Exception) -> RequestFailed:
        return RequestFailed(0, "NoAnswer", f"the API server {self.url} does not answer: {first_line(error)}")


def configured(kubeconfig: str | None, context: str | None) -> tuple[kubernetes.client.Configuration, str]:
    """Where the server is and who we are, as kubectl finds it, and the namespace to look into.

    That is the given kubeconfig, $KUBECONFIG, ~/.kube/config, or the pod's own service account. Raises
    ConfigException.
    """
    configuration = kubernetes.client.Configuration()
    config: Any = kubernetes.config
    # The client looks at $KUBECONFIG only once, when it is imported.
    path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        config.load_kube_config(config_file=path, context=context, client_configuration=configuration)
        contexts, active = config.list_kube_config_contexts(config_file=path)
    except config.ConfigException as error:
        if kubeconfig is not None or context is not None:
            raise
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            raise error from None
        own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        return configuration, (own.read_text().strip() if own.is_file() else "") or "default"
    chosen = next((entry for entry in contexts if entry["name"] == context), active)
    return configuration, chosen["context"].get("namespace") or "default"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _status(body: bytes | str | None) -> tuple[str, str]:
    """Reason and message of a Status object."""
    try:
        status = parse_json(body or b"{}")
        return str(status.get("reason") or ""), str(status.get("message") or "")
    except (ValueError, AttributeError):
        return "", (body.decode(errors="replace") if isinstance(body, bytes) else str(body or ""))[
            :300
        ].strip()
