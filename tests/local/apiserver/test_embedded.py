"""The embedded API server keeps to itself, ends with its parent, and carries an operator of kopf."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.access import load
from tests.local.apiserver.api_client import HERE, Api, config_map, eventually, widget
from tiercheck_local.controlplane import (
    ControlPlane,
    ControlPlaneFailed,
    EmbeddedControlPlane,
    open_control_plane,
)

MAPS = "/api/v1/namespaces/default/configmaps"


def test_watch_from_forgotten_version_is_told_to_list_again(tmp_path: Path) -> None:
    with EmbeddedControlPlane(tmp_path, history=5) as plane:
        api = Api(plane.kubeconfig)
        old = api.get(MAPS)["metadata"]["resourceVersion"]
        for index in range(10):
            api.create(MAPS, config_map(f"m{index}"))
        with api.watch(MAPS, resourceVersion=old) as events:
            seen = list(events)
        assert [event["type"] for event in seen] == ["ERROR"]
        assert (seen[0]["object"]["code"], seen[0]["object"]["reason"]) == (410, "Expired")
        new = api.get(MAPS)["metadata"]["resourceVersion"]
        with api.watch(MAPS, resourceVersion=new) as events:
            api.delete(f"{MAPS}/m0")
            assert next(events)["type"] == "DELETED"


def test_stopped_server_leaves_no_process(tmp_path: Path) -> None:
    plane = EmbeddedControlPlane(tmp_path)
    plane.start()
    pid = plane._process.pid if plane._process else 0
    with Api(plane.kubeconfig).watch(MAPS):
        plane.stop()  # an open watch must not hold it up
    plane.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_server_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tiercheck_local.controlplane import "
        "EmbeddedControlPlane;"
        "plane = EmbeddedControlPlane(Path(sys.argv[1])); plane.start(); print(plane._process.pid, "
        "flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    eventually(lambda: _ended(server), "the server ends when its parent is killed")


def _ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # whoever adopted it has not looked yet


def test_kubeconfig_is_private(tmp_path: Path) -> None:
    with EmbeddedControlPlane(tmp_path) as plane:
        assert plane.kubeconfig.stat().st_mode & 0o077 == 0


def test_failure_to_start_shows_the_log(tmp_path: Path) -> None:
    with EmbeddedControlPlane(tmp_path / "one") as first:
        port = int(first.kubeconfig.read_text().partition("127.0.0.1:")[2].split()[0])
        with pytest.raises(ControlPlaneFailed, match="in use"):
            EmbeddedControlPlane(tmp_path / "two", port=port).start()


def test_kinds_of_control_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    assert isinstance(open_control_plane("embedded", tmp_path), EmbeddedControlPlane)
    for kind, word in (("real", "KUBEBUILDER_ASSETS"), ("other", "unknown kind")):
        with pytest.raises(ValueError, match=word):
            open_control_plane(kind, tmp_path)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    with pytest.raises(ControlPlaneFailed, match="no executable etcd"):
        open_control_plane("real", tmp_path).start()


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("", {}, 401),
        ("", {"Authorization": "Bearer wrong"}, 401),
        ("", {"Authorization": "Bearer \xff"}, 401),
        ("", {"Origin": "https://evil.example"}, 401),
        ("rebound.evil.example", {"Authorization": "right"}, 403),
        ("rebound.evil.example:80", {"Authorization": "right"}, 403),
        ("localhost", {"Authorization": "right"}, 200),
        ("", {"Authorization": "right"}, 200),
    ],
)
def test_only_who_has_the_kubeconfig_is_served_and_no_web_page(
    stranger: Stranger, host: str, headers: dict[str, str], status: int
) -> None:
    assert stranger.asks("GET", "/api/v1/namespaces/default/pods", host, headers) == status
    made = {"metadata": {"name": "driveby"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    wanted = 415 if status == 200 else status  # without a type, as a page may send it
    assert stranger.asks("POST", "/api/v1/namespaces/default/pods", host, headers, made) == wanted


def test_how_the_server_is_may_be_asked_by_everyone(stranger: Stranger) -> None:
    for path in ("/healthz", "/readyz", "/version"):
        assert stranger.asks("GET", path, "", {}) == 200


class Stranger:
    """A process of another user of the machine, who can connect to every port."""

    def __init__(self, plane: EmbeddedControlPlane) -> None:
        self._access = load(plane.kubeconfig)

    def asks(self, method: str, path: str, host: str, headers: dict[str, str], body: object = None) -> int:
        right = self._access.headers["Authorization"]
        sent = {name: right if value == "right" else value for name, value in headers.items()}
        if host:
            sent["Host"] = host
        address = self._access.server.removeprefix("https://")
        connection = http.client.HTTPSConnection(address, context=self._access.tls, timeout=30)
        try:
            connection.request(method, path, json.dumps(body).encode() if body else None, sent)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    with EmbeddedControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        assert plane.kubeconfig.stat().st_mode & 0o077 == 0, "the token is the owner's"
        yield Stranger(plane)


@pytest.fixture
def operator(plane: ControlPlane, widgets_defined: None, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """The running operator; yields its log."""
    log = tmp_path / "operator.log"
    command = [
        sys.executable,
        "-m",
        "kopf",
        "run",
        "--standalone",
        "--namespace",
        namespace,
        str(HERE / "small_operator.py"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "KUBECONFIG": str(plane.kubeconfig)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def test_operator_sees_changes_and_reports_status(api: Api, widgets: str, core: str, operator: Path) -> None:
    api.create(widgets, widget("w"))

    def observed(generation: int) -> bool:
        return api.get(f"{widgets}/w").get("status", {}).get("observedGeneration") == generation

    eventually(lambda: observed(1), f"creation is handled; see {operator}")
    api.merge(f"{widgets}/w", {"spec": {"paused": True}})
    eventually(lambda: observed(2), "the change is handled")
    eventually(
        lambda: "Observed" in {event["reason"] for event in api.get(f"{core}/events")["items"]},
        "an event is posted",
    )
    assert api.get(f"{widgets}/w")["metadata"]["finalizers"] == ["conformance.test/kopf"]
    api.delete(f"{widgets}/w")
    eventually(lambda: api.call("GET", f"{widgets}/w")[0] == 404, "the finalizer is taken off")
    assert "Traceback" not in operator.read_text()
