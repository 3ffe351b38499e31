"""Brings the whole cluster up and down, in one folder, and leaves nothing elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from testbed import control_plane, network
from testbed.node import Node, remove_cgroups
from testbed.processes import Processes, run, wait_for

FOLDER = Path(os.environ.get("TIERCHECK_TESTBED_FOLDER", "/var/tmp/tiercheck-testbed"))
NODES = 5
"""Four to train on, and the last for the operator, as the nodes of a cluster's own services are kept apart
elsewhere."""


class Testbed:
    """A cluster that runs, or is about to, in `folder`."""

    __test__ = False

    def __init__(self, folder: Path, nodes: int = NODES) -> None:
        self.folder, self.kubeconfig = folder, folder / "admin.conf"
        self.processes = Processes(folder)
        self.nodes = [Node(self.processes, folder, number) for number in range(1, nodes + 1)]

    @classmethod
    def anew(cls, folder: Path) -> Testbed:
        """A new one that is up, in place of what was in `folder`. Raises as `up` does."""
        cls(folder).down()
        folder.mkdir(parents=True)
        testbed = cls(folder)
        testbed.up()
        return testbed

    @property
    def core(self) -> int:
        """The pid that holds the network of API server, registry and S3. Raises RuntimeError: the cluster is
        down."""
        pid = self.processes.pid("core")
        if pid is None:
            raise RuntimeError(f"no cluster runs in {self.folder}")
        return pid

    def inside(self, command: list[str]) -> list[str]:
        """`command`, in the core's network."""
        return ["nsenter", "-t", str(self.core), "-n", *command]

    def call(self, command: list[str]) -> int:
        """Exit code of `command`, which runs in the core's network and finds the cluster by its
        environment.
        """
        variables = {"KUBECONFIG": str(self.kubeconfig), "TIERCHECK_TESTBED": str(self.folder)}
        return subprocess.run(self.inside(command), env={**os.environ, **variables}, check=False).returncode

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def up(self) -> None:
        """Raises TimeoutError or RuntimeError; what was started by then is ended by `down`."""
        since = time.monotonic()

        def say(what: str) -> None:
            print(f"{time.monotonic() - since:5.0f} s  {what}", flush=True)

        core = network.start_core(self.processes)
        network.start_registry(self.processes, self.folder, core)
        control_plane.start(self.processes, self.folder, core, len(self.nodes))
        say("API server answers")
        self.start_services()
        for node in self.nodes:
            node.power_on()
        network.route_between({node.number: node.kernel for node in self.nodes})
        for node in self.nodes:
            wait_for(lambda node=node: self.is_ready(node), 120, f"{node.name} to be Ready")
            say(f"{node.name} is Ready")

    def start_services(self) -> None:
        script = Path(__file__).with_name("services.py")
        command = ["env", f"PYTHONPATH={script.parent.parent}", sys.executable, str(script), str(self.folder)]
        self.processes.start("services", self.inside(command))

    def power_on(self, node: Node) -> None:
        """After a power cut."""
        node.power_on()
        network.route_between({other.number: other.kernel for other in self.nodes if other.running})

    def is_ready(self, node: Node) -> bool:
        path = '{.status.conditions[?(@.type=="Ready")].status}'
        return self.kubectl("get", "node", node.name, "-o", f"jsonpath={path}", check=False) == "True"

    def kubectl(self, *words: str, check: bool = True) -> str:
        return run(self.inside(["kubectl", f"--kubeconfig={self.kubeconfig}", *words]), check=check)

    def apply(self, manifest: dict[str, Any], namespace: str) -> None:
        """Raises RuntimeError with what kubectl said."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", "-n", namespace, "apply", "-f", "-"]
        run(command, text=json.dumps(manifest))

    def down(self) -> None:
        """Ends everything by its pid and removes what it left; a second call does no harm."""
        for node in self.nodes:
            node.kill_userland()
        for name in self.processes.names():
            self.processes.kill(name)
        remove_cgroups()
        subprocess.run(["umount", "-R", "-q", str(self.folder)], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)
