"""Speaks raw HTTP to a control plane, so that the suite judges what is on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import urllib3
import yaml

from tests.access import load
from tiercheck_local.running import wait_for

DEADLINE = 30.0
"""Seconds after which something that must happen is given up."""


class Refused(Exception):
    """The server answered with a Status of kind Failure."""

    def __init__(self, code: int, status: dict[str, Any]) -> None:
        super().__init__(f"{code} {status.get('message', status)}")
        self.code = code
        self.status = status
        self.reason = status.get("reason")
        self.message = status.get("message", "")


@contextmanager
def refused_with(*parts: str, code: int = 422, reason: str = "", field: str = "") -> Iterator[None]:
    """What happens meanwhile is refused, and these are parts of the answer."""
    with pytest.raises(Refused) as refused:
        yield
    assert refused.value.code == code
    assert (refused.value.reason == "Invalid") is (code == 422)
    assert reason in ("", refused.value.reason)
    assert not field or refused.value.status["details"]["causes"][0]["field"] == field
    assert [part for part in parts if part not in refused.value.message] == []


class Api:
    """One server, as its kubeconfig describes it."""

    def __init__(self, kubeconfig: Path) -> None:
        access = load(kubeconfig)
        self._server, self._headers = access.server, access.headers
        self._pool = urllib3.PoolManager(timeout=DEADLINE, retries=False, ssl_context=access.tls)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        **query: Any,
    ) -> tuple[int, Any]:
        """Status code and decoded body, whatever they are."""
        headers = {**self._headers, "Accept": accept}
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self._server}{path}" + (f"?{urlencode(query)}" if query else "")
        answer = self._pool.request(method, url, body=data, headers=headers)
        try:
            return answer.status, json.loads(answer.data)
        except ValueError:
            return answer.status, answer.data.decode()

    def _ok(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        code, answer = self.call(method, path, body, **more)
        if code >= 400:
            raise Refused(code, answer if isinstance(answer, dict) else {"message": answer})
        return answer

    def get(self, path: str, **more: Any) -> Any:
        return self._ok("GET", path, **more)

    def create(self, path: str, body: Any, **more: Any) -> Any:
        return self._ok("POST", path, body, **more)

    def replace(self, path: str, body: Any, **more: Any) -> Any:
        return self._ok("PUT", path, body, **more)

    def merge(self, path: str, body: Any, **more: Any) -> Any:
        return self._ok("PATCH", path, body, content_type="application/merge-patch+json", **more)

    def json_patch(self, path: str, body: Any, **more: Any) -> Any:
        return self._ok("PATCH", path, body, content_type="application/json-patch+json", **more)

    def strategic(self, path: str, body: Any, **more: Any) -> Any:
        return self._ok("PATCH", path, body, content_type="application/strategic-merge-patch+json", **more)

    def delete(self, path: str, body: Any = None, **more: Any) -> Any:
        return self._ok("DELETE", path, body, **more)

    @contextmanager
    def watch(
        self, path: str, accept: str = "application/json", **query: Any
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a watch as they come. Reading fails after DEADLINE seconds of silence."""
        url = f"{self._server}{path}?{urlencode({'watch': 'true', **query})}"
        answer = self._pool.request(
            "GET", url, headers={**self._headers, "Accept": accept}, preload_content=False
        )
        if answer.status >= 400:
            raise Refused(answer.status, json.loads(answer.read()))
        try:
            yield _lines(answer)
        finally:
            answer.close()


def _lines(answer: Any) -> Iterator[dict[str, Any]]:
    rest = b""
    for piece in answer.read_chunked() if answer.supports_chunked_reads() else answer.stream(1):
        rest += piece
        while b"\n" in rest:
            line, _, rest = rest.partition(b"\n")
            yield json.loads(line)


HERE = Path(__file__).parent


def define(api: Api, file: Path) -> None:
    """Create the CRD in `file` (once) and wait until its resource is served."""
    crd: dict[str, Any] = yaml.load(file.read_text(), yaml.CSafeLoader)
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    name, spec = crd["metadata"]["name"], crd["spec"]
    if api.call("GET", f"{crds}/{name}")[0] == 404:
        api.create(crds, crd)
    version = spec["versions"][0]["name"]
    path = f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
    eventually(lambda: api.call("GET", path)[0] == 200, f"{name} is served")


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Returns the first true answer of `condition`; fails after DEADLINE seconds."""
    return wait_for(condition, DEADLINE, what)


def _metadata(name: str, labels: dict[str, str] | None) -> dict[str, Any]:
    return {"name": name, **({"labels": labels} if labels else {})}


def pod(name: str, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "example:1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(name, labels),
        "spec": {"containers": [container], **spec},
    }


def config_map(name: str, labels: dict[str, str] | None = None, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(name, labels), "data": data}


def widget(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "conformance.test/v1",
        "kind": "Widget",
        "metadata": {"name": name},
        "spec": {"size": 3, **spec},
    }
