"""Stands between an operator and an API server, and sends raw requests to a real one."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.access import Access, load
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.controlplane import write_kubeconfig

_PASSED_ON = ("Accept", "Content-Type")


@contextmanager
def deaf_to_watches(kubeconfig: Path, target: Path) -> Iterator[Path]:
    """A kubeconfig, written to `target`, whose watches are answered and never say anything."""
    with _standing_between(kubeconfig, target, _Request.pass_on):
        yield target


@contextmanager
def withholding(kubeconfig: Path, target: Path, plural: str) -> Iterator[threading.Event]:
    """As `deaf_to_watches`; no list of whole objects of one kind is answered until the event is set."""
    released = threading.Event()

    def respond(request: _Request) -> None:
        whole = "PartialObjectMetadata" not in request.headers.get("Accept", "")
        if whole and request.command == "GET" and urlsplit(request.path).path.endswith(f"/{plural}"):
            released.wait()
        request.pass_on()

    with _standing_between(kubeconfig, target, respond):
        try:
            yield released
        finally:
            released.set()


@contextmanager
def adding(kubeconfig: Path, target: Path, plural: str, objects: Mapping[str, bytes]) -> Iterator[list[str]]:
    """As `deaf_to_watches`; lists of one kind begin with these objects, by name, page by page.

    Gives the messages of the conditions that are written for them.
    """
    told: list[str] = []
    many = list(objects.values())

    def respond(request: _Request) -> None:
        address = urlsplit(request.path)
        asked = {key: values[0] for key, values in parse_qs(address.query).items()}
        first = int(asked.get("continue", "added-0").removeprefix("added-") or 0)
        _, name, last = f"/{address.path}".rsplit("/", 2)
        if request.command == "GET" and name == plural and last in objects:
            request.say(200, objects[last])
            return
        if request.command == "PATCH" and name in objects:
            conditions = json.loads(request.read_body())["status"]["conditions"]
            told.extend(condition["message"] for condition in conditions)
            request.say(200, b'{"metadata":{"uid":"%s","resourceVersion":"3"}}' % name.encode())
        elif request.command == "GET" and last == plural and first < len(many):
            until = first + int(asked.get("limit", len(many)))
            page = many[first:until]
            if "PartialObjectMetadata" in request.headers.get("Accept", ""):
                page = [b'{"metadata":%s}' % _METADATA.search(each)[1] for each in page]  # type: ignore[index]
            items = b",".join(page)
            request.say(200, b'{"metadata":{"continue":"added-%d"},"items":[%s]}' % (until, items))
        else:
            request.path = re.sub(r"&continue=added-\d+", "", request.path)
            request.pass_on()

    with _standing_between(kubeconfig, target, respond):
        yield told


_METADATA = re.compile(rb'"metadata": *(\{[^{}]*\})')


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    access: Access

    def read_body(self) -> bytes | None:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None

    def pass_on(self) -> None:
        body = self.read_body()
        headers = {name: self.headers[name] for name in _PASSED_ON if self.headers[name]}
        request = urllib.request.Request(
            self.access.server + self.path, body, {**self.access.headers, **headers}, method=self.command
        )
        try:
            with urllib.request.urlopen(request, timeout=30, context=self.access.tls) as response:
                status, kind, data = response.status, response.headers.get("Content-Type"), response.read()
        except urllib.error.HTTPError as error:
            status, kind, data = error.code, error.headers.get("Content-Type"), error.read()
        self.say(status, data, kind)

    def say(self, status: int, data: bytes, kind: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind or "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # whoever asked has read enough
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@contextmanager
def _standing_between(kubeconfig: Path, target: Path, respond: Callable[[_Request], None]) -> Iterator[None]:
    ended = threading.Event()

    class Handler(_Request):
        access = load(kubeconfig)

        def answer(self) -> None:
            if "true" not in parse_qs(urlsplit(self.path).query).get("watch", ()):
                respond(self)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            ended.wait()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

    server = ThreadingHTTPServer(("127.83.5.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        write_kubeconfig(target, f"http://127.83.5.1:{server.server_port}")
        yield
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def post(kubeconfig: Path, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], list[str]]:
    """Status, answer and warnings."""
    access = load(kubeconfig)
    headers = {**access.headers, "Content-Type": "application/json"}
    request = urllib.request.Request(access.server + path, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30, context=access.tls) as answer:
            return answer.status, json.load(answer), answer.headers.get_all("Warning") or []
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers.get_all("Warning") or []


def service_account_kubeconfig(admin: Path, namespace: str, name: str, target: Path) -> Path:
    """A kubeconfig in `target` that is the service account and nobody else."""
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    status, answer, _ = post(admin, f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", request)
    assert status == 201, answer
    cluster = yaml.safe_load(admin.read_text())["clusters"][0]["cluster"]
    ca = base64.b64decode(cluster["certificate-authority-data"])
    write_kubeconfig(target, cluster["server"], answer["status"]["token"], ca)
    return target


_DEADLINE = 90.0
JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/{}/tiercheckjobs"


def short_job(name: str, namespace: str, command: str = "exit 0", **changes: Any) -> dict[str, Any]:
    """Two workers without anything to learn."""
    secure = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "trainer",
        "image": "i",
        "command": ["/bin/sh", "-c", command],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {"terminationGracePeriodSeconds": 3, "securityContext": secure, "containers": [container]}
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "workers": 2,
            "tiers": {"local": {"sizeLimit": "16Mi"}},
            "template": {"spec": pod},
            **changes,
        },
    }


def status(cluster: LocalCluster, name: str, namespace: str) -> dict[str, Any]:
    found = cluster.api.request("GET", f"{JOBS.format(namespace)}/{name}")
    return dict(found.get("status") or {})


def in_phase(cluster: LocalCluster, name: str, namespace: str, phase: str) -> None:
    cluster.wait_for(
        lambda: status(cluster, name, namespace).get("phase") == phase, _DEADLINE, f"{name} to be {phase}"
    )
