"""Ways to hurt a training on a real cluster, each as it happens in the world."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import control_plane
from testbed.cluster import Testbed
from testbed.node import Node, is_unified
from testbed.processes import wait_for

from tiercheck.protocol import names

if TYPE_CHECKING:
    from training import Training

_HOG = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
print(len(bytearray(256 << 20)))
"""


def rank_pids(training: Training, worker: int) -> list[int]:
    """Host pids of the worker's training processes: those that write into its memory and are not the
    sidecar.
    """
    pod = training.pod(worker)
    node, uid = training.testbed.node(pod["spec"]["nodeName"]), pod["metadata"]["uid"]
    sidecars = node.pids_of(uid, "tiercheck_sidecar")
    return [pid for pid in node.pids_of(uid, "") if pid not in sidecars and names.MEMORY_DIR in _mapped(pid)]


def kill_rank(training: Training, worker: int) -> None:
    os.kill(rank_pids(training, worker)[0], signal.SIGKILL)


def kill_sidecar(training: Training, worker: int) -> None:
    pod = training.pod(worker)
    node = training.testbed.node(pod["spec"]["nodeName"])
    os.kill(node.pids_of(pod["metadata"]["uid"], "tiercheck_sidecar")[0], signal.SIGKILL)


def starve_of_memory(training: Training, worker: int) -> None:
    """The kernel kills the largest process of the container, which is a rank, as its limit is met."""
    folder = _memory_cgroup(rank_pids(training, worker)[0])
    used, limit = (
        ("memory.current", "memory.max")
        if is_unified()
        else ("memory.usage_in_bytes", "memory.limit_in_bytes")
    )
    before = (folder / limit).read_text()
    (folder / limit).write_text(str(int((folder / used).read_text()) + (16 << 20)))
    subprocess.run([sys.executable, "-c", _HOG, str(folder)], check=False, capture_output=True)
    (folder / limit).write_text(before)


def evict(training: Training, pod: str) -> None:
    """Through the Eviction API, once."""
    path = training.testbed.folder / "eviction.json"
    metadata = {"name": pod, "namespace": training.namespace}
    path.write_text(json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}))
    place = f"/api/v1/namespaces/{training.namespace}/pods/{pod}/eviction"
    training.testbed.kubectl("create", "--raw", place, "-f", str(path))


def drain(testbed: Testbed, *nodes: Node) -> None:
    """As an admin does; all at once. Until the pods are gone."""
    command = [
        "kubectl",
        f"--kubeconfig={testbed.kubeconfig}",
        "drain",
        "--ignore-daemonsets",
        "--delete-emptydir-data",
    ]
    under_way = [
        subprocess.Popen(
            [*command, "--timeout=240s", node.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for node in nodes
    ]
    for each in under_way:
        assert each.wait() == 0, "kubectl drain did not end"


def stop_kubelets(testbed: Testbed) -> None:
    for node in testbed.nodes:
        testbed.processes.kill(f"{node.name}-kubelet", signal.SIGSTOP)


def continue_kubelets(testbed: Testbed) -> None:
    for node in testbed.nodes:
        testbed.processes.kill(f"{node.name}-kubelet", signal.SIGCONT)


def kill_operator(testbed: Testbed, pod: str) -> None:
    """SIGKILL of the process; the kubelet starts it again."""
    where = testbed.kubectl(
        "-n", "tiercheck-system", "get", "pod", pod, "-o", "jsonpath={.metadata.uid} {.spec.nodeName}"
    ).split()
    os.kill(testbed.node(where[1]).pids_of(where[0], "tiercheck_operator")[0], signal.SIGKILL)


def restart_api_server(testbed: Testbed, seconds: float) -> None:
    """It is away for so long, and comes back with what etcd knows."""
    testbed.processes.kill("kube-apiserver")
    time.sleep(seconds)
    control_plane.start_api_server(testbed.processes, testbed.folder, testbed.core)


def fill_disk(training: Training, worker: int, size: int) -> None:
    """Writes so many bytes into the root file system of the worker's trainer."""
    Path(f"/proc/{rank_pids(training, worker)[0]}/root/tmp/filled").write_bytes(bytes(size))


def renew_certificate(testbed: Testbed, kept: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """The API server goes on with another certificate, which signs itself as the CA of all, or with `kept`.
    The files of the old one, for `kept`."""
    folder = testbed.folder / "apiserver"
    testbed.processes.kill("kube-apiserver")
    old = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in old:
        (folder / name).unlink()
    for name, content in (kept or {}).items():
        (folder / name).write_bytes(content)
    control_plane.start_api_server(testbed.processes, testbed.folder, testbed.core)
    control_plane.restart_controllers(testbed.processes, testbed.folder, testbed.core)
    for node in testbed.nodes:
        node.kill_kubelet()
        node.start_kubelet()
    return old


def mend_nodes(testbed: Testbed) -> bool:
    """Whether anything was broken of API server and nodes; all of it is well when this returns."""
    if testbed.processes.pid("kube-apiserver") is None:
        control_plane.start_api_server(testbed.processes, testbed.folder, testbed.core)
    continue_kubelets(testbed)
    broken = False
    for node in testbed.nodes:
        broken |= not testbed.is_ready(node)
        if not node.running:
            testbed.power_on(node)
        node.mend()
        if testbed.processes.pid(f"{node.name}-init") is None:
            node.power_off()
            testbed.power_on(node)
        if testbed.processes.pid(f"{node.name}-containerd") is None:
            node.start_containerd()
        if not testbed.kubectl("get", "node", node.name, "--ignore-not-found"):
            node.kill_kubelet()  # it registers its node when it starts, and never again
        if testbed.processes.pid(f"{node.name}-kubelet") is None:
            node.start_kubelet()
        wait_for(lambda node=node: testbed.is_ready(node), 120, f"{node.name} to be Ready")
        testbed.kubectl("uncordon", node.name)
    return broken


def _mapped(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def _memory_cgroup(pid: int) -> Path:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if is_unified():
            return Path("/sys/fs/cgroup" + path)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path)
    raise LookupError(f"no memory cgroup of process {pid}")
