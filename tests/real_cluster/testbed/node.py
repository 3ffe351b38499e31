"""Runs one node: a kernel and what runs on it, so that either can be lost alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from testbed import device_plugin, network
from testbed.needs import CNI_PLUGINS, kube_bin
from testbed.processes import Processes, run, wait_for

DEVICE = "example.com/device"
SYSCTL = "kernel.msgmax"
"""Pods may set it where the kubelet allows it; else it refuses them."""
_PAUSE = f"{network.REGISTRY}/pause:1"
# Mounts /proc for the node's own processes, then adopts and reaps what others leave.
_INIT = "mount -t proc proc /proc && while :; do sleep 1000 & wait $!; done"


class Node:
    """`number` counts from 1; the node's name is node-<number>."""

    def __init__(self, processes: Processes, folder: Path, number: int) -> None:
        self._processes, self.number, self.name = processes, number, f"node-{number}"
        self._conf = folder / f"{self.name}.conf"
        self.folder = folder / self.name
        self.logs = self.folder / "logs"

    @property
    def kernel(self) -> int:
        """The pid that holds its network and mounts. Raises KeyError: the node is off."""
        return self._pid(f"{self.name}-kernel")

    @property
    def running(self) -> bool:
        return self._processes.pid(f"{self.name}-kernel") is not None

    def power_on(self) -> None:
        """Kernel, cable, containerd and kubelet; what was on its disk is still there."""
        self.folder.mkdir(exist_ok=True)
        kernel = self._processes.start(
            f"{self.name}-kernel", ["unshare", "-n", "-m", "--propagation", "private", "sleep", "infinity"]
        )
        wait_for(lambda: network.has_own(kernel, "net") and network.has_own(kernel, "mnt"), 10, "namespaces")
        network.connect_node(self._pid("core"), self.number, kernel)
        for path, size in (
            ("/run", "512m"), ("/dev/shm", "4g"), ("/var/lib/cni", "16m"), (str(device_plugin.FOLDER), "16m"),
        ):  # fmt: skip
            Path(path).mkdir(parents=True, exist_ok=True)
            run([*self._inside(), "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path])
        make_node_root(self.number)
        self._write_settings()
        self.start_userland()

    def start_userland(self) -> None:
        init = self._processes.start(
            f"{self.name}-init",
            [*self._inside(), "unshare", "-p", "-f", "--kill-child", "sh", "-c", _INIT],
            inner=True,
        )
        wait_for(lambda: network.has_own(init, "pid"), 10, "a PID namespace")
        self.start_containerd()
        self.start_kubelet()

    def start_containerd(self) -> None:
        self._daemon("containerd", ["containerd", "-c", f"{self.folder}/containerd.toml"])
        wait_for(lambda: self._ctr("version"), 60, f"containerd of {self.name}")

    def start_kubelet(self) -> None:
        self._daemon("kubelet", [
            kube_bin("kubelet"), f"--config={self.folder}/kubelet.json", f"--kubeconfig={self._conf}",
            f"--hostname-override={self.name}", f"--root-dir={self.folder}/kubelet",
            f"--cert-dir={self.folder}/kubelet-pki",
            f"--node-ip={network.node_address(self.number)}",
            f"--node-labels=topology.kubernetes.io/zone=z{(self.number - 1) // 4 + 1}",
        ])  # fmt: skip

    def kill_kubelet(self) -> None:
        self._processes.kill(f"{self.name}-kubelet")

    def allow_sysctl(self, allowed: bool) -> None:
        """Starts the kubelet anew, which from then on admits pods that set SYSCTL, or fails them."""
        self.kill_kubelet()
        (self.folder / "kubelet.json").write_text(_kubelet(self, [SYSCTL] if allowed else []))
        self.start_kubelet()

    def offer_device(self, health: str) -> None:
        """DEVICE of the node is in this health, Healthy or Unhealthy, from now on."""
        state = self.folder / "device.json"
        state.with_suffix(".new").write_text(json.dumps({"device-0": health}))
        state.with_suffix(".new").rename(state)
        if self._processes.pid(f"{self.name}-plugin") is None:
            script = str(Path(device_plugin.__file__))
            self._processes.start(
                f"{self.name}-plugin", [*self._inside(), sys.executable, script, str(state), DEVICE]
            )

    def take_device_away(self) -> None:
        self._processes.kill(f"{self.name}-plugin")

    def kill_containerd(self) -> None:
        """Its containers run on, as with systemd's KillMode=process."""
        self._processes.kill(f"{self.name}-containerd")

    def power_off(self) -> None:
        """A power cut: the cable first, so that nobody says good-bye, then everything at once."""
        network.set_uplink(self._pid("core"), self.number, "down")
        self.kill_userland()
        self._processes.kill(f"{self.name}-kernel")

    def kill_userland(self) -> None:
        """Every process of the node dies; its kernel lives on and answers with RST."""
        for name in ("containerd", "kubelet"):
            self._processes.wake_parent(f"{self.name}-{name}")
        self._processes.kill(f"{self.name}-init")
        wait_for(lambda: not processes_of(self.number), 20, f"the pods of {self.name} to end")
        for name in ("containerd", "kubelet"):
            wait_for(
                lambda name=name: self._processes.pid(f"{self.name}-{name}") is None, 20, f"{name} to end"
            )

    def cut(self) -> None:
        """Takes the whole node off the network; everything on it runs on."""
        network.set_uplink(self._pid("core"), self.number, "down")

    def mend(self) -> None:
        network.set_uplink(self._pid("core"), self.number, "up")

    def pids_of(self, pod_uid: str, words: str) -> list[int]:
        """Host pids of the pod's processes whose command line has `words` in it, oldest first."""
        found = []
        for pid, cgroup in processes_of(self.number):
            if pod_uid in cgroup or pod_uid.replace("-", "_") in cgroup:
                try:
                    line = (
                        Path(f"/proc/{pid}/cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
                except OSError:
                    continue
                if words in line:
                    found.append(pid)
        return sorted(found)

    def pull(self, image: str) -> None:
        """Brings an image to the node, under the name that pods know it by. `image`: without the registry."""
        ctr = "ctr -n k8s.io images"
        there, known = f"{network.REGISTRY}/{image}", f"{network.REGISTRY_NAME}/{image}"
        script = f"{ctr} pull --plain-http {there} >/dev/null && {ctr} tag --force {there} {known} >/dev/null"
        run([*self._inside(), "sh", "-c", script])

    def copy_images(self, other: Node) -> None:
        """Has from now on what the other one has. Both must be without processes."""
        target = self.folder / "containerd"
        shutil.rmtree(target, ignore_errors=True)
        # Layers and blobs are never written again, so they may be the same files; the databases may not.
        run(["cp", "-al", f"{other.folder}/containerd", str(target)])
        for database in target.rglob("*.db"):
            content = database.read_bytes()
            database.unlink()
            database.write_bytes(content)

    def iptables_restore(self, rules: str) -> None:
        run([*self._inside(), "iptables-restore", "--noflush"], text=rules)

    def _inside(self) -> list[str]:
        return ["nsenter", "-t", str(self.kernel), "-n", "-m", "--wd=/"]

    def _daemon(self, name: str, command: list[str]) -> None:
        init = self._pid(f"{self.name}-init")
        inside = ["nsenter", "-t", str(init), "-n", "-m", "-p", "--wd=/"]
        self._processes.start(f"{self.name}-{name}", [*inside, *command], inner=True)

    def _ctr(self, *words: str) -> bool:
        command = [*self._inside(), "ctr", "-n", "k8s.io", *words]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _pid(self, name: str) -> int:
        pid = self._processes.pid(name)
        if pid is None:
            raise KeyError(f"{name} does not run: {self._processes.end_of_log(name)}")
        return pid

    def _write_settings(self) -> None:
        (self.folder / "cni").mkdir(exist_ok=True)
        (self.folder / "cni" / "10-pods.conflist").write_text(_cni(self.number))
        (self.folder / "containerd.toml").write_text(_containerd(self.folder))
        (self.folder / "kubelet.json").write_text(_kubelet(self, [SYSCTL]))


def may_lower_oom_scores() -> bool:
    """Whether we have CAP_SYS_RESOURCE; without it runc must not be asked for what the kernel then
    refuses.
    """
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")
    )
    return bool(int(line.split()[1], 16) >> 24 & 1)


def _cni(number: int) -> str:
    subnet = network.pod_range(number)
    bridge = {
        "type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }  # fmt: skip
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]})


def _containerd(folder: Path) -> str:
    runc = "/usr/sbin/runc" if may_lower_oom_scores() else str(Path(__file__).with_name("runc_with_less.py"))
    return f"""version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{_PAUSE}"
  max_concurrent_downloads = 3
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."{network.REGISTRY}"]
    endpoint = ["http://{network.REGISTRY}"]
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."{network.REGISTRY_NAME}"]
    endpoint = ["http://{network.REGISTRY}"]
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
"""


def _kubelet(node: Node, sysctls: list[str]) -> str:
    return json.dumps({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "failSwapOn": False,
        "podLogsDir": str(node.logs),
        "clusterDNS": [network.CORE],
        "clusterDomain": "cluster.local",
        "cgroupRoot": node_root(node.number),
        "enforceNodeAllocatable": [],
        "maxPods": 50,
        "allowedUnsafeSysctls": sysctls,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    })  # fmt: skip


# A cgroup per node, so that the kubelets do not meet each other's.

_CGROUPS = Path("/sys/fs/cgroup")
_OURS = "tiercheck-testbed"
_SHARES = {"cpu.shares": "8192", "cpu.weight": "800"}
"""All pods of all nodes together weigh as much as eight processes of the machine; else it would be one."""


def is_unified() -> bool:
    return (_CGROUPS / "cgroup.controllers").exists()


def node_root(number: int) -> str:
    """As the kubelet's `cgroupRoot` names it."""
    return f"/{_OURS}/n{number}"


def make_node_root(number: int) -> None:
    for hierarchy in _hierarchies():
        for path in (hierarchy / _OURS, hierarchy / _OURS / f"n{number}"):
            path.mkdir(exist_ok=True)
            if is_unified():
                for parent in (path.parent, path):
                    for name in (_CGROUPS / "cgroup.controllers").read_text().split():
                        with contextlib.suppress(OSError):
                            (parent / "cgroup.subtree_control").write_text(f"+{name}")
            elif (path / "cpuset.cpus").exists():
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (path / name).write_text((path.parent / name).read_text())
        for name, value in _SHARES.items():
            if (hierarchy / _OURS / name).exists():
                (hierarchy / _OURS / name).write_text(value)


def processes_of(number: int) -> list[tuple[int, str]]:
    """(pid, cgroup) of everything that runs in the node's pods."""
    base = _CGROUPS if is_unified() else _CGROUPS / "memory"
    found = []
    for folder, _, _ in os.walk(base / _OURS / f"n{number}"):
        with contextlib.suppress(OSError):
            found += [(int(pid), folder) for pid in Path(folder, "cgroup.procs").read_text().split()]
    return found


def remove_cgroups() -> None:
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / _OURS, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _hierarchies() -> list[Path]:
    if is_unified():
        return [_CGROUPS]
    return [
        path
        for path in sorted(_CGROUPS.iterdir())
        if path.is_dir() and not path.is_symlink() and path.name != "unified"
    ]
