"""Stands in for kube-proxy and CoreDNS: services.py FOLDER, inside the core's network.

Once a second it reads Services and EndpointSlices. ClusterIPs become DNAT rules of the core and of every node
that is on; *.svc.cluster.local is answered as CoreDNS would (A records). Other names do not exist.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.control_plane import ask
from testbed.network import CORE, pod_range
from testbed.node import Node
from testbed.processes import Processes

_CHAIN = "TESTBED-SERVICES"


def read_services(kubeconfig: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Addresses by name, and rules for ClusterIPs."""
    slices: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for item in _items(kubeconfig, "/apis/discovery.k8s.io/v1/endpointslices"):
        meta = item["metadata"]
        service = (meta.get("labels") or {}).get("kubernetes.io/service-name", "")
        slices.setdefault((meta["namespace"], service), []).append(item)
    names: dict[str, list[str]] = {}
    rules: list[str] = []
    for service in _items(kubeconfig, "/api/v1/services"):
        meta, spec = service["metadata"], service["spec"]
        base = f"{meta['name']}.{meta['namespace']}.svc.cluster.local"
        ready = [
            (endpoint, entry)
            for entry in slices.get((meta["namespace"], meta["name"]), [])
            for endpoint in entry.get("endpoints") or []
            if endpoint["conditions"].get("ready", True)
        ]
        if spec.get("clusterIP") == "None":
            for endpoint, _ in ready:
                names.setdefault(base, []).extend(endpoint["addresses"])
                if endpoint.get("hostname"):
                    names.setdefault(f"{endpoint['hostname']}.{base}", []).extend(endpoint["addresses"])
            continue
        names[base] = [spec["clusterIP"]]
        for port in spec.get("ports", []):
            rules += _balance(spec["clusterIP"], port, ready)
    return names, rules


def answer_query(query: bytes, names: Mapping[str, Sequence[str]]) -> bytes:
    """The datagram that goes back."""
    position, labels = 12, []
    while query[position]:
        labels.append(query[position + 1 : position + 1 + query[position]].decode().lower())
        position += query[position] + 1
    kind = struct.unpack(">H", query[position + 1 : position + 3])[0]
    name = ".".join(labels)
    exists = name in names or any(other.endswith("." + name) for other in names)
    found = names.get(name, []) if kind == 1 else []
    head = query[:2] + struct.pack(">HHHHH", 0x8580 | (0 if exists else 3), 1, len(found), 0, 0)
    records = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 5, 4) + socket.inet_aton(ip) for ip in found)
    return head + query[12 : position + 5] + records


class Watcher:
    """Keeps names and rules up to date."""

    def __init__(self, folder: Path) -> None:
        self.names: dict[str, list[str]] = {}
        self._kubeconfig = folder / "admin.conf"
        processes = Processes(folder)
        numbers = range(1, 1 + len(list(folder.glob("node-*.conf"))))
        self._nodes = [Node(processes, folder, number) for number in numbers]
        self._written: dict[int, list[str]] = {}

    def run(self) -> None:
        while True:
            try:
                self.names, rules = read_services(self._kubeconfig)
                self._write(0, rules)
                for node in self._nodes:
                    if node.running:
                        self._write(node.number, rules)
                    else:
                        self._written.pop(node.number, None)
            except Exception as error:  # the API server may be away: the next look is in a second
                print(time.time(), repr(error), flush=True)
            time.sleep(1)

    def _write(self, where: int, rules: list[str]) -> None:
        """0 is the core itself."""
        if self._written.get(where) == rules:
            return
        first = where not in self._written
        jumps = [f"-A {chain} -j {_CHAIN}" for chain in ("PREROUTING", "OUTPUT")] if first else []
        if first and where:
            # What came by a ClusterIP goes back through the node, although both pods are on its bridge.
            local = pod_range(where)
            jumps.append(f"-A POSTROUTING -s {local} -d {local} -m conntrack --ctstate DNAT -j MASQUERADE")
        text = "\n".join(["*nat", f":{_CHAIN} - [0:0]", *jumps, *rules, "COMMIT", ""])
        if where:
            self._nodes[where - 1].iptables_restore(text)
        else:
            subprocess.run(["iptables-restore", "--noflush"], input=text, text=True, check=True)
        self._written[where] = rules


def main() -> None:
    watcher = Watcher(Path(sys.argv[1]))
    threading.Thread(target=watcher.run, daemon=True).start()
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind((CORE, 53))
    while True:
        query, client = listener.recvfrom(4096)
        try:
            listener.sendto(answer_query(query, watcher.names), client)
        except (IndexError, UnicodeDecodeError, OSError, struct.error) as error:
            print(time.time(), repr(error), flush=True)


def _items(kubeconfig: Path, path: str) -> list[dict[str, Any]]:
    found: Any = ask(kubeconfig, path)["items"]
    return list(found)


def _balance(
    address: str, port: Mapping[str, Any], ready: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> list[str]:
    targets = [
        f"{ip}:{entry_port['port']}"
        for endpoint, entry in ready
        for ip in endpoint["addresses"]
        for entry_port in entry["ports"]
        if entry_port.get("name", "") == port.get("name", "")
    ]
    rules = []
    for n, target in enumerate(targets):
        left = len(targets) - n
        share = f"-m statistic --mode random --probability {1 / left:.4f} " if left > 1 else ""
        match = f"-d {address}/32 -p {port.get('protocol', 'TCP').lower()} --dport {port['port']}"
        rules.append(f"-A {_CHAIN} {match} {share}-j DNAT --to-destination {target}")
    return rules


if __name__ == "__main__":
    main()
