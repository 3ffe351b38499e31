"""kubectl works with the kubeconfig that is printed, as a person would type it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.local.apiserver.api_client import DEADLINE, Api, config_map, pod, widget
from tiercheck_local.controlplane import ControlPlane

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


class Kubectl:
    """kubectl in one namespace, with a cache of its own: discovery must not come from an earlier server."""

    def __init__(self, plane: ControlPlane, namespace: str, home: Path) -> None:
        self._environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig), "HOME": str(home)}
        self._command = ["kubectl", "--namespace", namespace, f"--cache-dir={home / 'cache'}"]
        self._home = home

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self._command, *arguments]
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )

    def __call__(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *arguments], env=self._environment, stdout=subprocess.PIPE, text=True
        )

    def file(self, value: Any) -> str:
        path = self._home / f"{value['kind']}-{value['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump(value))
        return str(path)


@pytest.fixture
def kubectl(plane: ControlPlane, namespace: str, widgets_defined: None, tmp_path: Path) -> Kubectl:
    return Kubectl(plane, namespace, tmp_path)


def test_apply_creates_then_changes_then_leaves_alone(kubectl: Kubectl) -> None:
    assert "created" in kubectl("apply", "-f", kubectl.file(config_map("a", x="1", y="1")))
    assert "configured" in kubectl("apply", "-f", kubectl.file(config_map("a", x="2")))
    assert "unchanged" in kubectl("apply", "-f", kubectl.file(config_map("a", x="2")))
    assert json.loads(kubectl("get", "configmap", "a", "-o", "json"))["data"] == {"x": "2"}


def test_apply_of_a_custom_resource(kubectl: Kubectl) -> None:
    assert "widget.conformance.test/w created" in kubectl("apply", "-f", kubectl.file(widget("w")))
    assert "configured" in kubectl("apply", "-f", kubectl.file(widget("w", paused=True)))
    lines = kubectl("get", "wg").splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "READY", "AGE"]
    assert lines[1].split()[:2] == ["w", "3"]
    assert kubectl("get", "wg", "w", "-o", "jsonpath={.spec.paused}") == "true"


def test_apply_of_a_wrong_field_is_refused_with_a_sentence(kubectl: Kubectl) -> None:
    unknown = kubectl.run("apply", "-f", kubectl.file(widget("w", sise=4)))
    assert unknown.returncode != 0
    assert 'unknown field "spec.sise"' in unknown.stderr
    wrong = kubectl.run("apply", "-f", kubectl.file(widget("w", size=0)))
    assert wrong.returncode != 0
    assert "spec.size in body should be greater than or equal to 1" in wrong.stderr


def test_get_pods_looks_as_usual(kubectl: Kubectl, api: Api, core: str) -> None:
    api.create(f"{core}/pods", pod("p"))
    lines = kubectl("get", "pods", "-o", "wide").splitlines()
    assert lines[0].split()[:5] == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert lines[1].split()[:4] == ["p", "0/1", "Pending", "0"]


def test_describe_shows_the_object_and_its_events(
    kubectl: Kubectl, api: Api, core: str, namespace: str
) -> None:
    kubectl("apply", "-f", kubectl.file(widget("w")))
    uid = kubectl("get", "wg", "w", "-o", "jsonpath={.metadata.uid}")
    about = {
        "kind": "Widget",
        "apiVersion": "conformance.test/v1",
        "namespace": namespace,
        "name": "w",
        "uid": uid,
    }
    event = {
        "involvedObject": about,
        "reason": "Grown",
        "message": "it has grown",
        "type": "Normal",
        "count": 1,
    }
    api.create(f"{core}/events", {"metadata": {"name": "w.1"}, **event})
    shown = kubectl("describe", "widget", "w")
    assert "Size:" in shown
    assert "it has grown" in shown
    assert "it has grown" in kubectl("get", "events")
    api.create(f"{core}/pods", pod("p"))
    assert "example:1" in kubectl("describe", "pod", "p")


def test_describe_node(kubectl: Kubectl, api: Api, namespace: str) -> None:
    name = f"node-{namespace}"
    status = {
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        "capacity": {"cpu": "4"},
    }
    api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": {"rack": "r1"}}, "status": status})
    assert "rack=r1" in kubectl("describe", "node", name)
    assert "SchedulingDisabled" not in kubectl("get", "node", name)
    kubectl("cordon", name)
    assert "SchedulingDisabled" in kubectl("get", "node", name)
    kubectl("delete", "node", name)


def test_watch_prints_changes(kubectl: Kubectl, api: Api, widgets: str) -> None:
    api.create(widgets, widget("w"))
    process = kubectl.start("get", "wg", "-w", f"--request-timeout={DEADLINE:.0f}s")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("NAME")
        assert process.stdout.readline().startswith("w ")
        api.merge(f"{widgets}/w/status", {"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
        assert "False" in process.stdout.readline()
    finally:
        process.terminate()
        process.wait()


def test_delete_waits_until_the_object_is_gone(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", kubectl.file(widget("w")))
    assert "deleted" in kubectl("delete", "wg", "w", "--timeout=30s")
    assert "No resources found" in kubectl.run("get", "wg").stderr


def test_label_annotate_patch_and_edit_status(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", kubectl.file(widget("w")))
    kubectl("label", "wg", "w", "team=a")
    kubectl("annotate", "wg", "w", "note=b")
    kubectl("patch", "wg", "w", "--type=merge", "-p", '{"spec": {"paused": true}}')
    kubectl(
        *["patch", "wg", "w", "--type=merge", "--subresource=status", "-p"],
        '{"status": {"observedGeneration": 2}}',
    )
    shown = json.loads(kubectl("get", "wg", "-l", "team=a", "-o", "json"))["items"][0]
    assert shown["metadata"]["annotations"]["note"] == "b"
    assert (shown["spec"]["paused"], shown["status"]["observedGeneration"]) == (True, 2)


def test_explain_knows_the_schema(kubectl: Kubectl) -> None:
    assert "paused" in kubectl("explain", "widget.spec")
