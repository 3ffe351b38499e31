"""However a cluster ends, no process and no folder of it stays on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.cluster.bench import PodBuilder
from tiercheck_cli.api_server import PODS
from tiercheck_local import markers
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec
from tiercheck_local.running import wait_for

pytestmark = pytest.mark.cluster

# A grandchild in a session of its own, deaf to SIGTERM: what process groups would miss.
STUBBORN = (
    "setsid sh -c \"trap '' TERM; echo up; while :; do sleep 0.1; done\" & trap '' TERM; while :; "
    "do sleep 0.1; done"
)


def leftovers(cluster: str) -> list[object]:
    return [
        *markers.pids(markers.CLUSTER, cluster),
        *(folder for folder in markers.folders(cluster) if folder.exists()),
    ]


def test_stop_leaves_nothing(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, NodeSpec.racks(2, 1)) as cluster:
        builder = PodBuilder().runs(STUBBORN).memory()
        cluster.apply(builder.manifest)
        log = cluster.logs / builder.name / "main.log"
        cluster.wait_for(lambda: log.exists() and "up" in log.read_text(), 30, "the pod to be up")
        cluster.faults.partition_node("node-1")
        assert leftovers(cluster.id)
    assert leftovers(cluster.id) == []


def test_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: LocalCluster, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalCluster, "start_agent", interrupted)
    cluster = LocalCluster(tmp_path, NodeSpec.racks(1, 1))
    with pytest.raises(KeyboardInterrupt):
        cluster.start()
    assert leftovers(cluster.id) == []


def test_clusters_side_by_side_do_not_meet(tmp_path: Path) -> None:
    with (
        LocalCluster(tmp_path / "a", NodeSpec.racks(1, 1)) as one,
        LocalCluster(tmp_path / "b", NodeSpec.racks(1, 1)) as other,
    ):
        addresses = []
        for cluster in (one, other):
            builder = PodBuilder("same-name").runs("sleep 60")
            cluster.apply(builder.manifest)
            find = lambda cluster=cluster: cluster.api.get(PODS, "default", "same-name")  # noqa: E731
            cluster.wait_for(lambda find=find: find().get("status", {}).get("podIP"), 30, "an address")
            addresses.append(find()["status"]["podIP"])
        assert addresses[0] != addresses[1]
        one.faults.kill_all_pods()
        assert other.faults.container_processes("same-name", "main")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_foreground_cluster_takes_everything_along(tmp_path: Path, number: int) -> None:
    command = [
        sys.executable,
        "-m",
        "tiercheck_local",
        "up",
        "--nodes",
        "2",
        "--racks",
        "1",
        "--directory",
        str(tmp_path),
    ]
    process = subprocess.Popen([*command, "--crds", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == f"export KUBECONFIG={tmp_path}/control-plane/kubeconfig\n"
    (identity,) = {_cluster_of(pid) for pid in _children(process.pid)} - {""}
    process.send_signal(number)
    code = process.wait(30)
    assert code == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    wait_for(lambda: not leftovers(identity), 30, "everything to be gone", lambda: str(leftovers(identity)))


def _children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return found


def _cluster_of(pid: int) -> str:
    try:
        environment = Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""
    values = dict(entry.partition("=")[::2] for entry in environment.split("\0"))
    return values.get(markers.CLUSTER, "")
