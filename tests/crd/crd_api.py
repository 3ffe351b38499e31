"""Asks an API server by plain HTTP, so that nothing stands between the tests and its words."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "tiercheckjobs.yaml").read_text())
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs"


class Refused(Exception):
    """The API server's answer to a bad request: code, reason and the message that kubectl prints."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self.code: int = status["code"]
        self.reason: str = status["reason"]
        self.message: str = status["message"]
        super().__init__(f"{self.code} {self.reason}: {self.message}")


@contextlib.contextmanager
def refused_with(*parts: str, code: int = 422) -> Iterator[None]:
    """What happens meanwhile is refused, and these are parts of the answer."""
    with pytest.raises(Refused) as refused:
        yield
    assert refused.value.code == code
    assert (refused.value.reason == "Invalid") is (code == 422)
    assert [part for part in parts if part not in refused.value.message] == []


@dataclass
class Api:
    """A server that knows the CRD. Everything raises Refused."""

    host: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None

    def create(self, raw: Mapping[str, Any], **query: str) -> dict[str, Any]:
        return self.call("POST", _JOBS, raw, query)

    def read(self, name: str) -> dict[str, Any]:
        return self.call("GET", f"{_JOBS}/{name}")

    def patch(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        return self.call("PATCH", f"{_JOBS}/{name}", patch)

    def patch_status(self, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
        return self.call("PATCH", f"{_JOBS}/{name}/status", {"status": dict(status)})

    def table(self) -> dict[str, Any]:
        """The list as kubectl asks for it."""
        return self.call("GET", _JOBS, accept="application/json;as=Table;v=v1;g=meta.k8s.io")

    def install_crd(self) -> None:
        """Returns when the server serves jobs. Raises AssertionError if it does not within half a minute."""
        self.call("POST", _CRDS, CRD, {"fieldValidation": "Strict"})
        name = CRD["metadata"]["name"]
        query = {"watch": "true", "fieldSelector": f"metadata.name={name}", "timeoutSeconds": "30"}
        with self._open(self._request("GET", _CRDS, None, query)) as events:
            for line in events:
                conditions = (json.loads(line)["object"].get("status") or {}).get("conditions") or ()
                if any(entry["type"] == "Established" and entry["status"] == "True" for entry in conditions):
                    return self._wait_until_served()
        raise AssertionError(f"{name} was not established")

    def _wait_until_served(self) -> None:
        """A real server serves a new resource a moment after it says that it is established."""
        deadline = time.monotonic() + 30
        while True:
            try:
                self.call("GET", _JOBS)
                return
            except Refused as refused:
                if refused.code not in (404, 429) or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        accept: str = "",
    ) -> dict[str, Any]:
        request = self._request(method, path, body, query or {}, accept or "application/json")
        try:
            with self._open(request) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            # A path that is not served yet is answered in plain words.
            status = (
                json.loads(text)
                if text.startswith("{")
                else {"code": error.code, "reason": error.reason, "message": text}
            )
            raise Refused(status) from error

    def _request(
        self, method: str, path: str, body: Any, query: Mapping[str, str], accept: str = "application/json"
    ) -> urllib.request.Request:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return urllib.request.Request(
            f"{self.host}{path}?{urllib.parse.urlencode(query)}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={**self.headers, "Accept": accept, "Content-Type": kind},
        )

    def _open(self, request: urllib.request.Request) -> Any:
        return urllib.request.urlopen(request, timeout=40, context=self.tls)


def open_api(kubeconfig: Path) -> Api:
    settings = kubernetes.client.Configuration()
    kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=settings)
    token = settings.get_api_key_with_prefix("BearerToken") or settings.get_api_key_with_prefix(
        "authorization"
    )
    tls = None
    if settings.host.startswith("https"):
        tls = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if settings.cert_file:
            tls.load_cert_chain(settings.cert_file, settings.key_file)
        if not settings.verify_ssl:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    return Api(settings.host, {"Authorization": token} if token else {}, tls)
