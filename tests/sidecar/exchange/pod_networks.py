"""Pods with networks of their own, as Multus makes them: a network namespace for each, on bridges."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000
NETWORKS = {"eth0": "10.88.0.{}/24", "net1": "10.89.0.{}/24", "net2": "fd00:89::{}/64"}
"""Interfaces of each pod; net2 has IPv6 only."""


def why_not() -> str:
    """Empty if it works here."""
    if os.geteuid():
        return "network namespaces need root"
    name = f"tc-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "br0", "type", "bridge")
        _ip("-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces with bridges here: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return ""


def enter(namespace: str) -> None:
    """This thread is in the network of `namespace` from now on. Raises OSError."""
    with open(namespace) as file:
        if _LIBC.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")


class PodNetworks:
    """`close` removes them."""

    def __init__(self, pods: int) -> None:
        self._name = f"tc-{os.getpid()}"
        self._pods = pods
        self._made: list[str] = []
        try:
            hub = self._namespace("hub")
            for number, (interface, address) in enumerate(NETWORKS.items()):
                _ip("-n", hub, "link", "add", f"br-{interface}", "type", "bridge")
                _ip("-n", hub, "link", "set", f"br-{interface}", "up")
                if not number:  # the tests' own address
                    _ip("-n", hub, "addr", "add", address.format(254), "dev", f"br-{interface}")
            for pod in range(pods):
                inside = self._namespace(str(pod))
                _ip("-n", inside, "link", "set", "lo", "up")
                for interface, address in NETWORKS.items():
                    _ip("-n", hub, "link", "add", self._port(pod, interface), "type", "veth",
                        "peer", "name", interface, "netns", inside)  # fmt: skip
                    _ip(
                        "-n",
                        hub,
                        "link",
                        "set",
                        self._port(pod, interface),
                        "master",
                        f"br-{interface}",
                        "up",
                    )
                    extra = ("nodad",) if ":" in address else ()
                    _ip("-n", inside, "addr", "add", address.format(pod + 1), "dev", interface, *extra)
                    _ip("-n", inside, "link", "set", interface, "up")
        except BaseException:
            self.close()
            raise

    def path(self, pod: int) -> str:
        """Of the pod's network namespace."""
        return f"/run/netns/{self._name}-{pod}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread reaches the pods."""
        with open("/proc/thread-self/ns/net") as before:
            enter(f"/run/netns/{self._name}-hub")
            try:
                yield
            finally:
                enter(f"/proc/self/fd/{before.fileno()}")

    def cut(self, pod: int, interface: str) -> None:
        """Nothing gets through there any more, and nobody is told."""
        _ip("-n", f"{self._name}-hub", "link", "set", self._port(pod, interface), "nomaster")

    def carried(self, pod: int, interface: str) -> int:
        """Bytes that the pod has sent there."""
        command = ["ip", "-n", f"{self._name}-hub", "-j", "-s", "link", "show", self._port(pod, interface)]
        (found,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return int(found["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _port(self, pod: int, interface: str) -> str:
        return f"p{pod}-{interface}"

    def _namespace(self, what: str) -> str:
        name = f"{self._name}-{what}"
        _ip("netns", "add", name)
        self._made.append(name)
        return name


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
