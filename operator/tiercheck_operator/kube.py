"""Calls to the API server with plain dictionaries, off the event loop. Authentication is the kubernetes client's business."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kubernetes
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tiercheck.protocol import names

JOBS = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{{namespace}}/{names.PLURAL}"
CORE = "/api/v1/namespaces/{namespace}"
MERGE_PATCH = "application/merge-patch+json"

_THREADS = 8


class ApiFailure(Exception):
    """The API server refused or did not answer. `status` is the HTTP status; 0: no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status

    @property
    def conflict(self) -> bool:
        return self.status == 409

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def refused(self) -> bool:
        """The server understood and said no (quota, admission, rights, validation): asking again soon will not help."""
        return self.status in (400, 403, 405, 413, 422)


def load_configuration() -> kubernetes.client.Configuration:
    """In-cluster if there is a service account, else $KUBECONFIG or ~/.kube/config. Raises ConfigException."""
    configuration = kubernetes.client.Configuration()
    try:
        kubernetes.config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except kubernetes.config.ConfigException:
        kubernetes.config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = _THREADS
    return configuration


class Kube:
    """One connection pool to the API server."""

    def __init__(self, configuration: kubernetes.client.Configuration, timeout: float = 15.0) -> None:
        self._client = kubernetes.client.ApiClient(configuration)
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kube")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def get(self, path: str, **names: str) -> dict[str, Any] | None:
        """None if there is no such object. Raises ApiFailure."""
        try:
            return await self._call("GET", path.format(**names))
        except ApiFailure as error:
            if error.not_found:
                return None
            raise

    async def create(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        """Raises ApiFailure; `conflict` if it exists already."""
        return await self._call("POST", path.format(**names), body)

    async def replace(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        """Raises ApiFailure."""
        return await self._call("PUT", path.format(**names), body)

    async def merge(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        """JSON merge patch; a resourceVersion in `body` is a precondition. Raises ApiFailure."""
        return await self._call("PATCH", path.format(**names), body, MERGE_PATCH)

    async def delete(self, path: str, options: Mapping[str, Any], **names: str) -> None:
        """With DeleteOptions; an object that is gone already is fine. Raises ApiFailure."""
        try:
            await self._call("DELETE", path.format(**names), {"apiVersion": "v1", "kind": "DeleteOptions", **options})
        except ApiFailure as error:
            if not error.not_found:
                raise

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call_now, method, path, body, content_type)

    def _call_now(self, method: str, path: str, body: Mapping[str, Any] | None, content_type: str) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            request = self._client.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = self._client.call_api(*request, _request_timeout=self._timeout)
            data = response.read()  # type: ignore[no-untyped-call]
        except ApiException as error:
            raise ApiFailure(int(error.status or 0), _sentence(error.body) or str(error.reason)) from error
        except (HTTPError, OSError) as error:
            raise ApiFailure(0, f"the API server does not answer: {error}") from error
        if not 200 <= response.status < 300:
            raise ApiFailure(int(response.status), _sentence(data) or str(response.reason))
        return dict(json.loads(data)) if data else {}


def _sentence(body: bytes | str | None) -> str:
    """The message of a Status object."""
    try:
        return str(json.loads(body or b"{}").get("message") or "")
    except (ValueError, AttributeError):
        return str(body or "")[:500]
