"""What only the embedded server promises: a bounded memory of changes, and no life after its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from api_client import Api
from builders import config_map
from defining import eventually

from tiercheck_local.controlplane import (
    ControlPlaneFailed,
    EmbeddedControlPlane,
    ExistingControlPlane,
    RealControlPlane,
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
        "import sys, time; from pathlib import Path; from tiercheck_local.controlplane import EmbeddedControlPlane;"
        "plane = EmbeddedControlPlane(Path(sys.argv[1])); plane.start(); print(plane._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
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
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert isinstance(open_control_plane("embedded", tmp_path), EmbeddedControlPlane)
    assert isinstance(open_control_plane("real", tmp_path, assets=tmp_path), RealControlPlane)
    assert isinstance(open_control_plane("existing", tmp_path, kubeconfig=tmp_path / "k"), ExistingControlPlane)
    for kind, word in (("real", "KUBEBUILDER_ASSETS"), ("existing", "KUBECONFIG"), ("other", "unknown kind")):
        with pytest.raises(ValueError, match=word):
            open_control_plane(kind, tmp_path)
    with pytest.raises(ControlPlaneFailed, match="no executable etcd"):
        open_control_plane("real", tmp_path, assets=tmp_path).start()
    with pytest.raises(ControlPlaneFailed, match="no kubeconfig"):
        open_control_plane("existing", tmp_path, kubeconfig=tmp_path / "k").start()
