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
from typing import Any

import pytest

from tests.access import load
from tests.local.apiserver.api_client import (
    HERE,
    Api,
    Refused,
    config_map,
    eventually,
    pod,
    refused_with,
    widget,
)
from tiercheck_local.controlplane import (
    ControlPlane,
    ControlPlaneFailed,
    EmbeddedControlPlane,
    open_control_plane,
    start_child,
    stop_child,
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
    script = HERE / "small_operator.py"
    command = f"{sys.executable} -m kopf run --standalone --namespace {namespace} {script}"
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
    process = start_child(command.split(), log, environment)
    try:
        yield log
    finally:
        stop_child(process, 30)


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


# Pods and nodes: bound once, evicted with a reason, deleted with grace.


def bound_pod(api: Api, core: str, name: str = "p", **spec: Any) -> str:
    """A pod on a node. Returns its path."""
    api.create(f"{core}/pods", pod(name, {"app": "x"}, **spec))
    target = {"kind": "Node", "name": "node-1"}
    api.create(f"{core}/pods/{name}/binding", {"metadata": {"name": name}, "target": target})
    return f"{core}/pods/{name}"


def eviction(name: str = "p", **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    return body | ({"deleteOptions": options} if options else {})


def test_new_pod_is_pending_whatever_it_says(api: Api, core: str) -> None:
    made = api.create(f"{core}/pods", pod("p") | {"status": {"phase": "Running"}})
    assert made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    spec = made["spec"]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Always", 30)
    assert {t["key"]: t["tolerationSeconds"] for t in spec["tolerations"]} == {
        "node.kubernetes.io/not-ready": 300,
        "node.kubernetes.io/unreachable": 300,
    }


def test_pod_without_containers_is_invalid(api: Api, core: str) -> None:
    with pytest.raises(Refused) as refused:
        api.create(f"{core}/pods", {"metadata": {"name": "p"}, "spec": {}})
    assert refused.value.message == 'Pod "p" is invalid: spec.containers: Required value'


def test_pod_spec_is_frozen(api: Api, core: str) -> None:
    api.create(f"{core}/pods", pod("p"))
    with refused_with("pod updates may not change fields other than"):
        api.merge(f"{core}/pods/p", {"spec": {"nodeName": "elsewhere"}})


def test_pod_status_has_its_own_door(api: Api, core: str) -> None:
    api.create(f"{core}/pods", pod("p"))
    assert api.merge(f"{core}/pods/p", {"status": {"phase": "Running"}})["status"]["phase"] == "Pending"
    after = api.merge(f"{core}/pods/p/status", {"status": {"phase": "Running"}, "spec": {"nodeName": "x"}})
    assert after["status"]["phase"] == "Running"
    assert "nodeName" not in after["spec"]


def test_pod_is_bound_once(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    seen = api.get(path)
    assert seen["spec"]["nodeName"] == "node-1"
    assert [(c["type"], c["status"]) for c in seen["status"]["conditions"]] == [("PodScheduled", "True")]
    with refused_with('pod p is already assigned to node "node-1"', code=409, reason="Conflict"):
        api.create(
            f"{path}/binding", {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "node-2"}}
        )


def test_unbound_pod_is_deleted_at_once(api: Api, core: str) -> None:
    api.create(f"{core}/pods", pod("p"))
    api.delete(f"{core}/pods/p")
    assert api.call("GET", f"{core}/pods/p")[0] == 404


def test_bound_pod_is_deleted_when_its_node_has_stopped_it(api: Api, core: str) -> None:
    path = bound_pod(api, core, terminationGracePeriodSeconds=7)
    answer = api.delete(path)
    assert answer["metadata"]["deletionTimestamp"]
    assert answer["metadata"]["deletionGracePeriodSeconds"] == 7
    assert answer["metadata"]["generation"] == 2
    api.delete(path, {"gracePeriodSeconds": 0})
    assert api.call("GET", path)[0] == 404


def test_grace_can_be_shortened_but_not_prolonged(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    api.delete(path, gracePeriodSeconds="20")
    assert api.delete(path, {"gracePeriodSeconds": 40})["metadata"]["deletionGracePeriodSeconds"] == 20
    assert api.delete(path, {"gracePeriodSeconds": 5})["metadata"]["deletionGracePeriodSeconds"] == 5


def test_finished_pod_needs_no_grace(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    api.merge(f"{path}/status", {"status": {"phase": "Succeeded"}})
    api.delete(path)
    assert api.call("GET", path)[0] == 404


def test_evicted_pod_says_why_it_goes(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    assert api.create(f"{path}/eviction", eviction())["status"] == "Success"
    seen = api.get(path)
    assert seen["metadata"]["deletionGracePeriodSeconds"] == 30
    condition = next(c for c in seen["status"]["conditions"] if c["type"] == "DisruptionTarget")
    assert (condition["status"], condition["reason"]) == ("True", "EvictionByEvictionAPI")
    assert condition["message"] == "Eviction API: evicting"


def test_eviction_of_nobody_is_not_found(api: Api, core: str) -> None:
    assert api.call("POST", f"{core}/pods/p/eviction", eviction())[0] == 404


def test_eviction_takes_a_grace_period(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    api.create(f"{path}/eviction", eviction(gracePeriodSeconds=3))
    assert api.get(path)["metadata"]["deletionGracePeriodSeconds"] == 3


def test_disruption_budget_refuses_an_eviction(api: Api, core: str, namespace: str) -> None:
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    api.create(budgets, {"metadata": {"name": "b"}, "spec": spec})
    path = bound_pod(api, core)
    api.merge(
        f"{path}/status",
        {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}},
    )
    with refused_with(code=429, reason="TooManyRequests"):
        api.create(f"{path}/eviction", eviction())
    assert "deletionTimestamp" not in api.get(path)["metadata"]


def test_pods_of_a_node_can_be_selected(api: Api, core: str) -> None:
    bound_pod(api, core, "here")
    api.create(f"{core}/pods", pod("nowhere"))

    def names(selector: str) -> list[str]:
        return [item["metadata"]["name"] for item in api.get(f"{core}/pods", fieldSelector=selector)["items"]]

    assert names("spec.nodeName=node-1") == ["here"]
    assert names("spec.nodeName=") == ["nowhere"]
    assert names("spec.nodeName!=node-1,status.phase=Pending") == ["nowhere"]


def test_node_is_registered_with_its_status_and_not_yet_trusted(api: Api, namespace: str) -> None:
    status = {"conditions": [{"type": "Ready", "status": "True"}], "capacity": {"cpu": "4"}}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-{namespace}"}, "status": status}
    made = api.create("/api/v1/nodes", body)
    assert made["status"]["conditions"][0]["status"] == "True"
    assert made["spec"]["taints"] == [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]
    path = f"/api/v1/nodes/node-{namespace}"
    assert api.merge(path, {"spec": {"unschedulable": True, "taints": None}})["spec"] == {
        "unschedulable": True
    }
    unknown = [{"type": "Ready", "status": "Unknown"}]
    assert api.merge(path, {"status": {"conditions": unknown}})["status"]["conditions"][0]["status"] == "True"
    after = api.merge(f"{path}/status", {"status": {"conditions": unknown}})
    assert after["status"]["conditions"][0]["status"] == "Unknown"
    api.delete(path)
