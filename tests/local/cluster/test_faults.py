"""Each fault does its harm and no more, and the cluster reports it as a real one would."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.cluster.bench import Bench, PodBuilder, condition
from tiercheck_local import markers
from tiercheck_local.cluster import LocalCluster, TargetNotFound
from tiercheck_local.nodespec import RACK, NodeSpec
from tiercheck_local.running import wait_for
from tiercheck_operator.kubernetes.api_server import NODES, PODS, ApiFailure

pytestmark = pytest.mark.cluster

LASTING = "trap 'echo asked to stop; exit 0' TERM; echo up; while :; do sleep 0.1; done"


def up(bench: Bench, builder: PodBuilder) -> str:
    name = bench.run(builder)
    bench.logged(name, "up")
    bench.ready(name)
    return name


def node_ready(bench: Bench, node: str, status: str) -> None:
    bench.wait(
        f"{node} Ready={status}", lambda: condition(bench.api.get(NODES, None, node), "Ready") == status
    )


def usable(bench: Bench, node: str) -> None:
    node_ready(bench, node, "True")
    bench.wait(f"{node} without taints", lambda: not bench.api.get(NODES, None, node)["spec"].get("taints"))


def processes_on(bench: Bench, node: str) -> list[int]:
    return markers.pids(markers.POD, markers.place(bench.cluster.id, node))


def test_evicted_pod_says_why_and_ends_gracefully(each_bench: Bench) -> None:
    bench = each_bench
    slow = "trap 'echo asked to stop; sleep 1; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    name = up(bench, PodBuilder().runs(slow))
    bench.faults.evict_pod(name)
    assert condition(bench.pod(name), "DisruptionTarget") == "True"
    bench.gone(name)
    assert "asked to stop" in bench.log(name)


def test_dead_node_is_noticed_and_its_pods_can_be_forced_away(each_bench: Bench) -> None:
    bench = each_bench
    name = up(bench, PodBuilder().runs(LASTING).memory().on("node-2"))
    bench.faults.kill_node("node-2")
    assert processes_on(bench, "node-2") == []
    assert not bench.cluster.memory_folder("node-2").exists()
    node_ready(bench, "node-2", "Unknown")
    bench.wait("the pod to be unready", lambda: condition(bench.pod(name), "Ready") == "False")
    assert bench.pod(name)["status"]["phase"] == "Running"  # nobody can tell otherwise
    bench.api.delete(PODS, "default", name)
    assert bench.pod(name)["metadata"]["deletionTimestamp"]  # and nobody can end it
    elsewhere = bench.run(PodBuilder().runs("exit 0"))
    assert bench.phase(elsewhere, "Succeeded")["spec"]["nodeName"] != "node-2"
    bench.faults.delete_pods(f"test={name}")
    bench.gone(name)
    bench.faults.revive_node("node-2")
    usable(bench, "node-2")
    assert bench.phase(bench.run(PodBuilder().runs("exit 0").on("node-2")), "Succeeded")


def test_pod_still_bound_to_a_revived_node_starts_again_with_empty_memory(bench: Bench) -> None:
    name = up(
        bench,
        PodBuilder().runs(f"ls /memory; touch /memory/old; {LASTING}").policy("Always").memory().on("node-2"),
    )
    bench.faults.kill_node("node-2")
    bench.faults.revive_node("node-2")
    bench.wait("a second life", lambda: bench.log(name).count("up") == 2)
    assert "old" not in bench.log(name)
    bench.wait("its count", lambda: bench.container(name)["restartCount"] == 1)
    usable(bench, "node-2")


def test_container_that_is_slow_to_start_runs_and_has_not_started(bench: Bench) -> None:
    """As a kubelet shows it: running at once, started with its startup probe, and nothing after it runs
    before."""
    probe = {"exec": {"command": ["test", "-e", "/memory/up"]}, "periodSeconds": 1, "failureThreshold": 60}
    bench.faults.hold_starts("sidecar")
    name = bench.run(
        PodBuilder()
        .beside(f"touch /memory/up; {LASTING}", startupProbe=probe)
        .runs(LASTING)
        .memory()
        .policy("Always")
    )
    sidecar = lambda: bench.container(name, "sidecar")  # noqa: E731
    bench.wait("it to run", lambda: "running" in sidecar()["state"])
    assert not sidecar()["started"]
    assert bench.log(name, "sidecar") == ""
    bench.faults.hold_starts("sidecar", held=False)
    bench.ready(name)
    assert sidecar()["started"]


def test_container_that_ends_twice_is_held_back_and_says_for_how_long(bench: Bench) -> None:
    name = up(bench, PodBuilder().beside(LASTING).runs(LASTING).policy("Always"))
    sidecar = lambda: bench.container(name, "sidecar")  # noqa: E731
    for restarts in (1, 2):
        bench.wait("it to run", lambda: "running" in sidecar()["state"])
        bench.faults.kill_container(name, "sidecar")
        if restarts == 2:
            waiting = bench.wait("it to be held back", lambda: sidecar()["state"].get("waiting"))
            assert waiting["reason"] == "CrashLoopBackOff"
            assert waiting["message"].startswith(
                f"back-off 500ms restarting failed container=sidecar pod={name}_default("
            )
        bench.wait("its next life", lambda n=restarts: sidecar()["restartCount"] == n)


def test_rack_dies_as_a_whole(bench: Bench) -> None:
    assert bench.faults.kill_rack("rack-0") == ["node-0", "node-1"]
    for node in ("node-0", "node-1"):
        node_ready(bench, node, "Unknown")
    node_ready(bench, "node-2", "True")
    for node in ("node-0", "node-1"):
        bench.faults.revive_node(node)
    for node in ("node-0", "node-1"):
        usable(bench, node)
    with pytest.raises(TargetNotFound, match=f"{RACK}=rack-9"):
        bench.faults.kill_rack("rack-9")


def test_partitioned_node_keeps_its_pods_until_it_hears_that_they_are_gone(bench: Bench) -> None:
    name = up(bench, PodBuilder().runs(LASTING).on("node-1"))
    before = bench.faults.container_processes(name, "main")
    bench.faults.partition_node("node-1")
    node_ready(bench, "node-1", "Unknown")
    bench.faults.delete_pods(f"test={name}")
    bench.gone(name)
    assert before[0] in processes_on(bench, "node-1")
    bench.faults.heal_node("node-1")
    bench.wait("the old processes to die", lambda: not processes_on(bench, "node-1"))
    usable(bench, "node-1")


def test_pods_are_ready_again_when_their_node_is_heard_again(bench: Bench) -> None:
    name = up(bench, PodBuilder().runs(LASTING).on("node-1"))
    bench.faults.partition_node("node-1")
    bench.wait("the pod to be unready", lambda: condition(bench.pod(name), "Ready") == "False")
    bench.faults.heal_node("node-1")
    bench.ready(name)
    usable(bench, "node-1")
    assert bench.log(name).count("up") == 1


def test_forced_deletion_kills_at_once(bench: Bench) -> None:
    name = up(bench, PodBuilder().runs(LASTING).memory())
    pod = bench.pod(name)
    place = markers.place(bench.cluster.id, pod["spec"]["nodeName"], pod["metadata"]["uid"])
    bench.faults.delete_pods(f"test={name}")
    bench.wait("its processes to die", lambda: not markers.pids(markers.POD, place))
    bench.wait("its memory to go", lambda: not bench.memory(pod).exists())
    assert "asked to stop" not in bench.log(name)


def test_loss_of_every_pod_is_reported_as_failed_pods_without_memory(bench: Bench) -> None:
    names = [
        up(bench, PodBuilder().runs(LASTING).policy("Always").memory().on(f"node-{n}")) for n in range(3)
    ]
    bench.faults.kill_all_pods()
    for name in names:
        pod = bench.phase(name, "Failed")
        assert pod["status"]["reason"] == "PodLost"
        assert not bench.memory(pod).exists()
        assert bench.faults.container_processes(name, "main") == []
        bench.faults.delete_pods(f"test={name}")


def test_killed_training_process_leaves_its_launcher_alone(bench: Bench) -> None:
    script = "sleep 300 & echo up $!; wait $!; echo ended with $?; exec sleep 300"
    name = up(bench, PodBuilder().runs(script))
    launcher = bench.faults.container_processes(name, "main")[0]
    bench.faults.kill_container_process(name, "main", signal.SIGKILL)
    bench.logged(name, "ended with 137")
    assert launcher in bench.faults.container_processes(name, "main")
    assert bench.container(name)["restartCount"] == 0


def test_container_killed_for_memory_says_so_and_starts_again(bench: Bench) -> None:
    name = up(bench, PodBuilder().runs("echo up; exec sleep 300").policy("OnFailure"))
    bench.faults.oom_kill_container(name, "main")
    last = lambda: bench.container(name)["lastState"].get("terminated", {})  # noqa: E731
    bench.wait("its second life", lambda: bench.container(name)["restartCount"])
    assert (last()["reason"], last()["exitCode"]) == ("OOMKilled", 137)
    bench.faults.kill_container(name, "main")
    bench.wait("an end of another kind", lambda: last().get("reason") == "Error")


def test_fault_without_target_says_so(bench: Bench) -> None:
    name = bench.run(PodBuilder().runs("exit 0"))
    bench.phase(name, "Succeeded")
    with pytest.raises(TargetNotFound, match=name):
        bench.faults.kill_container_process(name, "main")
    with pytest.raises(ApiFailure, match="not found"):
        bench.faults.evict_pod("no-such-pod")
    with pytest.raises(TargetNotFound, match="sealed"):
        bench.faults.flip_bit(name, rank=0)


def test_flipped_bit_changes_one_bit_of_the_data_and_nothing_else(bench: Bench) -> None:
    name = up(bench, PodBuilder().runs(LASTING).memory())
    pod = bench.pod(name)
    folder = bench.memory(pod) / "memory"
    slot = _sealed_slot(folder, rank=1)
    other = _sealed_slot(folder, rank=2)
    before, untouched = slot.read_bytes(), other.read_bytes()
    assert bench.faults.flip_bit(name, rank=1) == [slot]
    changed = [(a, b) for a, b in zip(before, slot.read_bytes(), strict=True) if a != b]
    assert [(a ^ b).bit_count() for a, b in changed] == [1]
    assert other.read_bytes() == untouched


def _sealed_slot(folder: Path, rank: int) -> Path:
    metadata = {"rank": str(rank), "step": "5", "attempt": "1", "world_size": "2"}
    header = json.dumps(
        {"__metadata__": metadata, "w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}
    ).encode()
    slot = folder / f"slot-{rank}"
    slot.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(8))
    slot.with_name(slot.name + ".seal").write_text("{}")
    return slot


# However a cluster ends, no process and no folder of it stays on the machine.

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
    typed = f"-m tiercheck_local up --nodes 2 --racks 1 --directory {tmp_path} --crds {tmp_path}"
    process = subprocess.Popen([sys.executable, *typed.split()], stdout=subprocess.PIPE, text=True)
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
