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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import yaml

from tests.access import Access, load
from tests.sidecar.remote.s3.faulty_proxy import QuietHandler, listening
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


# A real API server's audit log would tell the same, but asking for it is not the laptop cluster's business.

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass
class Recording:
    kubeconfig: Path
    """The same access as the one that was given, through the recorder."""
    used: set[tuple[str, str, str]] = field(default_factory=set)
    """(API group, resource, verb) of everything that was asked."""
    refused: list[str] = field(default_factory=list)
    """What was answered with 401 or 403."""


@contextmanager
def recording(kubeconfig: Path, target: Path) -> Iterator[Recording]:
    """Everything is passed on, watches too, and what was asked is written down."""
    record = Recording(target)

    def respond(request: _Request) -> None:
        address = urlsplit(request.path)
        right = asked_for(request.command, address.path, dict(parse_qsl(address.query)))
        if right is not None:
            record.used.add(right)
        status, said = request.pass_on()
        if status in (401, 403):
            record.refused.append(f"{request.command} {request.path}: {said[:300].decode()}")

    with _standing_between(kubeconfig, target, respond, deaf=False):
        yield record


def asked_for(method: str, path: str, query: Mapping[str, str]) -> tuple[str, str, str] | None:
    """What RBAC calls this request; None for discovery and health, which every account may ask for."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    if parts[0] not in ("api", "apis") or not rest:
        return None
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    resource, named = "/".join(rest[::2]), len(rest) > 1
    if method == "GET":
        verb = "watch" if query.get("watch") in ("true", "1") else "get" if named else "list"
    else:
        verb = _VERBS[method] if named or method != "DELETE" else "deletecollection"
    return group, resource, verb


_METADATA = re.compile(rb'"metadata": *(\{[^{}]*\})')


class _Request(QuietHandler):
    access: Access

    def read_body(self) -> bytes | None:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None

    def pass_on(self) -> tuple[int, bytes]:
        """Status and text of the answer, which a watch has not."""
        body = self.read_body()
        headers = {name: self.headers[name] for name in _PASSED_ON if self.headers[name]}
        request = urllib.request.Request(
            self.access.server + self.path, body, {**self.access.headers, **headers}, method=self.command
        )
        endless = self.watches()
        try:
            answer = urllib.request.urlopen(request, timeout=None if endless else 30, context=self.access.tls)
        except urllib.error.HTTPError as error:
            answer, endless = error, False
        with answer:
            if endless:
                self.begin_watch()
                while piece := answer.read1(65536):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
                return answer.status, b""
            data = answer.read()
        self.say(answer.status, data, answer.headers.get("Content-Type"))
        return answer.status, data

    def watches(self) -> bool:
        return parse_qs(urlsplit(self.path).query).get("watch", [""])[0] in ("true", "1")

    def begin_watch(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def say(self, status: int, data: bytes, kind: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind or "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # whoever asked has read enough
            self.wfile.write(data)


@contextmanager
def _standing_between(
    kubeconfig: Path, target: Path, respond: Callable[[_Request], object], *, deaf: bool = True
) -> Iterator[None]:
    ended = threading.Event()

    class Handler(_Request):
        access = load(kubeconfig)

        def answer(self) -> None:
            if deaf and self.watches():
                self.begin_watch()
                ended.wait()
            else:
                respond(self)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

    with listening(Handler) as url:
        try:
            write_kubeconfig(target, url)
            yield
        finally:
            ended.set()


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
