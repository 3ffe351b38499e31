"""What the real cluster needs of the machine, in one sentence where it is not there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

KUBERNETES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
DEBIAN = {
    "containerd": "containerd", "ctr": "containerd", "runc": "runc", "ip": "iproute2", "bridge": "iproute2",
    "iptables": "iptables", "nsenter": "util-linux", "docker-registry": "docker-registry",
    "kubectl": "kubectl", "skopeo": "skopeo",
    "radosgw": "radosgw", "ceph-mon": "ceph-mon", "ceph-osd": "ceph-osd", "buildah": "buildah",
}  # fmt: skip
CNI_PLUGINS = Path("/usr/lib/cni")
_OLDEST = (1, 34)


def no_root() -> str:
    """Why nothing can be done about a cluster here, not even to end one; empty if something can."""
    return "" if os.geteuid() == 0 else "a real cluster needs root, for namespaces, networks and containers"


def missing() -> str:
    """Why a cluster cannot be started here; empty if it can."""
    if why := no_root():
        return why
    folder = os.environ.get("KUBE_BIN", "")
    if not folder:
        return f"KUBE_BIN names no folder with {', '.join(KUBERNETES)}"
    absent = [name for name in KUBERNETES if not os.access(Path(folder) / name, os.X_OK)]
    if absent:
        return f"KUBE_BIN ({folder}) has no {', '.join(absent)}"
    packages = {package for program, package in DEBIAN.items() if shutil.which(program) is None}
    if not all((CNI_PLUGINS / name).exists() for name in ("bridge", "host-local", "loopback")):
        packages.add("containernetworking-plugins")
    if not Path("/bin/busybox").exists():
        packages.add("busybox-static")
    if packages:
        return f"Debian's packages are missing: {' '.join(sorted(packages))}"
    version = kubelet_version()
    if version < _OLDEST:
        return (
            f"kubelet {'.'.join(map(str, version))} is too old: {'.'.join(map(str, _OLDEST))} or newer "
            "is needed"
        )
    return ""


def kube_bin(name: str) -> str:
    """Path of one of Kubernetes' programs."""
    return str(Path(os.environ["KUBE_BIN"]) / name)


def kubelet_version() -> tuple[int, int]:
    said = subprocess.run(
        [kube_bin("kubelet"), "--version"], capture_output=True, text=True, check=True
    ).stdout
    major, minor = said.split("v")[1].split(".")[:2]
    return int(major), int(minor)
