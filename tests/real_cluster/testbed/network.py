"""Joins the nodes by a bridge in a network namespace of its own, and has the registry they pull from."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from testbed.processes import Processes, run, wait_for

CORE = "10.99.0.1"
"""API server, registry, S3 and DNS; the tests run here as well."""
PODS = "10.244"
SERVICES = "10.96.0.0/16"
API_SERVER = f"https://{CORE}:6443"
REGISTRY = f"{CORE}:5000"
REGISTRY_NAME = "registry.example.com"
"""As the docs name the user's own."""
_BRIDGE = "nodes"


def node_address(number: int) -> str:
    return f"10.99.0.{10 + number}"


def pod_range(number: int) -> str:
    return f"{PODS}.{number}.0/24"


def uplink(number: int) -> str:
    """The core's end of the node's cable."""
    return f"node-{number}"


def start_core(processes: Processes) -> int:
    """The pid that holds the core's network namespace."""
    pid = processes.start("core", ["unshare", "-n", "sleep", "infinity"])
    wait_for(lambda: has_own(pid, "net"), 10, "a network namespace")
    inside = ["nsenter", "-t", str(pid), "-n"]
    for line in (
        "ip link set lo up",
        f"ip link add {_BRIDGE} type bridge",
        f"ip addr add {CORE}/24 dev {_BRIDGE}",
        f"ip link set {_BRIDGE} up",
        # for webhooks: a ClusterIP needs a route before it is rewritten
        f"ip route add {SERVICES} dev {_BRIDGE}",
        "sysctl -qw net.ipv4.ip_forward=1",
    ):
        run([*inside, *line.split()])
    return pid


def has_own(pid: int, kind: str) -> bool:
    """Whether the process has left our namespace of this kind."""
    return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


def connect_node(core: int, number: int, kernel: int) -> None:
    """A cable from the core's bridge to the node whose network namespace `kernel` holds."""
    name, inside, there = (
        uplink(number),
        ["nsenter", "-t", str(core), "-n"],
        ["nsenter", "-t", str(kernel), "-n"],
    )
    run([*inside, "ip", "link", "del", name], check=False)
    run([*inside, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(kernel)])
    run([*inside, "ip", "link", "set", name, "master", _BRIDGE, "up"])
    run([*inside, "ip", "route", "replace", pod_range(number), "via", node_address(number)])
    for line in (
        "ip link set lo up",
        f"ip addr add {node_address(number)}/24 dev eth0",
        "ip link set eth0 up",
        f"ip route add default via {CORE}",
        "sysctl -qw net.ipv4.ip_forward=1",
    ):
        run([*there, *line.split()])


def route_between(nodes: dict[int, int]) -> None:
    """Pods of each node reach those of the others straight. Number -> pid that holds its network
    namespace.
    """
    for number, pid in nodes.items():
        for other in nodes:
            if other != number:
                route = ["ip", "route", "replace", pod_range(other), "via", node_address(other)]
                run(["nsenter", "-t", str(pid), "-n", *route])


def set_uplink(core: int, number: int, state: str) -> None:
    """`state`: up or down."""
    run(["nsenter", "-t", str(core), "-n", "ip", "link", "set", uplink(number), state])


# A real registry, which the nodes pull from as a user's would.


def start_registry(processes: Processes, folder: Path, core: int) -> None:
    """With the image that every pod's sandbox needs."""
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": f"{folder}/registry"}},
        "http": {"addr": f"{CORE}:5000"},
        "log": {"level": "warn"},
    }
    (folder / "registry.json").write_text(json.dumps(settings))
    inside = ["nsenter", "-t", str(core), "-n"]
    processes.start("registry", [*inside, "docker-registry", "serve", f"{folder}/registry.json"])
    ask = [*inside, "curl", "-sf", f"http://{REGISTRY}/v2/"]
    wait_for(
        lambda: subprocess.run(ask, capture_output=True, check=False).returncode == 0, 30, "the registry"
    )
    _push_pause(folder, inside)


def push_archive(core: int, archive: Path, image: str) -> None:
    """`image` with tag and without registry, from a docker archive."""
    command = ["nsenter", "-t", str(core), "-n", "skopeo", "copy", "--dest-tls-verify=false", "--quiet"]
    run([*command, f"docker-archive:{archive}", f"docker://{REGISTRY}/{image}"])


def _push_pause(folder: Path, inside: list[str]) -> None:
    """One program that waits to be ended, and ends at once: busybox as PID 1 has no default for SIGTERM."""
    context = folder / "pause"
    context.mkdir()
    (context / "Containerfile").write_text(
        "FROM scratch\nCOPY busybox /bin/busybox\n"
        'ENTRYPOINT ["/bin/busybox", "sh", "-c", "trap exit TERM; while :; do /bin/busybox sleep 1000 & '
        'wait $!; done"]\n'
    )
    run(["cp", "/bin/busybox", str(context)])
    store = ["--root", f"{folder}/pause-store", "--runroot", f"{folder}/pause-run", "--storage-driver", "vfs"]
    run(["buildah", *store, "bud", "--isolation", "chroot", "-q", "-t", "pause", str(context)])
    run(
        [
            *inside,
            "buildah",
            *store,
            "push",
            "--tls-verify=false",
            "-q",
            "pause",
            f"docker://{REGISTRY}/pause:1",
        ]
    )
