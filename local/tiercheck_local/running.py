"""Starts and stops control plane, controllers and nodes together on one machine.

Everything started carries the cluster's id in its environment and holds the read end of a pipe from this
process, so that nothing outlives it: `stop` finds stragglers by the id, and if this process dies, the others
see the pipe end and clean up.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from tiercheck.failpoints import ENV_FAILPOINTS
from tiercheck.protocol.encoding import to_json
from tiercheck_local import markers
from tiercheck_local.client import open_local
from tiercheck_local.controllers.scheduler import ready_status
from tiercheck_local.controlplane import ControlPlane, await_end, open_control_plane, tail_of
from tiercheck_local.markers import Octet, free_ports
from tiercheck_local.node.pod import Settings
from tiercheck_local.node.process import FIRST_BACK_OFF
from tiercheck_local.nodespec import NodeSpec
from tiercheck_operator.kubernetes.api_server import NODES, PODS, ApiServer, Object

T = TypeVar("T")

PATIENCE = 60.0


class WaitTimeout(AssertionError):
    """The awaited condition did not come true in time; the message describes the state instead."""


def wait_for(
    condition: Callable[[], T | None], deadline: float, what: str, explain: Callable[[], str] = lambda: ""
) -> T:
    """Returns the first truthy `condition()`, polled every 0.1 s. Raises WaitTimeout with `explain()`."""
    end = time.monotonic() + deadline
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > end:
            raise WaitTimeout(
                f"waited {deadline:.0f} s in vain for {what}; last answer: {result!r}\n{explain()}"
            )
        time.sleep(0.1)


class RunningCluster:
    """A laptop cluster: a context manager, or `start` and `stop`, to be used from the main thread.

    `control_plane`: "embedded" or "real". `lease_grace`: seconds after which a silent node is unreachable.
    `back_off`: seconds for which a container that ended twice is held back. `cuttable`: links may be cut
    (`Faults.cut_links`), at the cost of a thread in every Python process of the cluster. `failpoints`: those
    of operator and containers may be armed (`Faults.arm`).
    """

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[NodeSpec],
        control_plane: str = "embedded",
        *,
        lease_grace: float = 2.0,
        back_off: float = FIRST_BACK_OFF,
        cuttable: bool = False,
        failpoints: bool = False,
    ) -> None:
        self.directory = directory.absolute()
        self.nodes = {node.name: node for node in nodes}
        self.operator: subprocess.Popen[bytes] | None = None
        self._operators: list[subprocess.Popen[bytes]] = []
        self.metrics_address = ""
        """host:port of the operator's metrics, once it was started."""
        self._kind, self._lease_grace = control_plane, lease_grace
        self._back_off = back_off
        self.cuts = self.directory / "cut-links" if cuttable else None
        self.failpoints = self.directory / "failpoints" if failpoints else None
        """Folder of the files that arm failpoints: <pod>.<container>, and one for each operator replica."""
        self._numbers = {node.name: number for number, node in enumerate(nodes, start=1)}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._controllers: subprocess.Popen[bytes] | None = None
        self._api: ApiServer | None = None
        self._octet: Octet | None = None
        self._control_plane: ControlPlane | None = None
        self.id = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def kubeconfig(self) -> Path:
        assert self._control_plane is not None, "the cluster is not started"
        return self._control_plane.kubeconfig

    @property
    def api(self) -> ApiServer:
        """Returns the API client; valid between `start` and `stop`."""
        assert self._api is not None, "the cluster is not started"
        return self._api

    @property
    def logs(self) -> Path:
        """Returns the folder of <pod>/<container>.log and of agents', controllers' and operator's logs."""
        return self.directory / "logs"

    def start(self) -> None:
        """Returns when every node is Ready. Cleans up if it raises ControlPlaneFailed or WaitTimeout."""
        self.logs.mkdir(parents=True, exist_ok=True)
        if self.failpoints is not None:
            self.failpoints.mkdir(exist_ok=True)
        self._octet = Octet()
        self.id = f"{self._octet.value}-{secrets.token_hex(3)}"
        try:
            markers.remove_all_at(self._octet.value)
            self._control_plane = open_control_plane(self._kind, self.directory / "control-plane")
            self._control_plane.start()
            self._api = open_local(self.kubeconfig)
            self.start_controllers()
            for name in self.nodes:
                self.start_agent(name)
            self.wait_for(self.all_ready, PATIENCE, "all nodes to be Ready")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends every process and deletes every memory folder of the cluster. May be called twice."""
        if self._octet is None:
            return
        controllers = [self._controllers] if self._controllers is not None else []
        started = [*self._operators, *controllers, *self.agents.values()]
        for process in started:
            process.terminate()
        markers.kill(markers.POD, markers.place(self.id, ""))
        end = time.monotonic() + 2
        for process in started:
            await_end(process, max(0.0, end - time.monotonic()))
        if self._api is not None:
            self._api.close()
            self._api = None
        if self._control_plane is not None:
            self._control_plane.stop()
        markers.remove(self.id)
        self._octet.release()
        self._octet = None

    # Parts that faults stop and start again.

    def start_controllers(self) -> None:
        arguments = ["--kubeconfig", str(self.kubeconfig), "--grace", str(self._lease_grace)]
        command = ["-m", "tiercheck_local.controllers.manager", *arguments]
        self._controllers = self._start("controllers", command, lifeline=True)

    def start_agent(self, name: str) -> None:
        """Starts (again) the agent of one node, without the memory and processes of its earlier run."""
        command = ["-m", "tiercheck_local.node.agent", to_json(self.settings(name)).decode()]
        self.agents[name] = self._start(f"node-{name}", command, lifeline=True)

    def settings(self, node: str) -> Settings:
        """Returns the settings of a node's agent, with the folders of its pods."""
        assert self._octet is not None
        return Settings(
            node=self.nodes[node],
            cluster=self.id,
            kubeconfig=str(self.kubeconfig),
            directory=str(self.directory),
            address_prefix=f"127.{self._octet.value}.{self._numbers[node]}",
            back_off=self._back_off,
            cuts=str(self.cuts) if self.cuts is not None else None,
            failpoints=str(self.failpoints) if self.failpoints is not None else None,
        )

    def start_operator(
        self, env: Mapping[str, str] | None = None, replica: str = "operator"
    ) -> subprocess.Popen[bytes]:
        """Starts the real operator; its log is logs/<replica>.log, its metrics are at `metrics_address`.

        If several run at a time, only one may act: give them all the same TIERCHECK_LEASE.
        """
        self.metrics_address = f"127.0.0.1:{free_ports(1)[0]}"
        environment = {
            "KUBECONFIG": str(self.kubeconfig),
            "TIERCHECK_METRICS_ADDRESS": self.metrics_address,
            **(env or {}),
        }
        if self.cuts is not None:
            environment = markers.hooked_environment({**os.environ, **environment}, str(self.cuts))
        if self.failpoints is not None:
            environment[ENV_FAILPOINTS] = str(self.failpoints / replica)
        self.operator = self._start(replica, ["-m", "tiercheck_operator"], environment)
        self._operators.append(self.operator)
        return self.operator

    def memory_folder(self, node: str, pod_uid: str = "") -> Path:
        """Returns the folder of the memory volumes of a node's pods, or of one pod."""
        roots = self.settings(node).roots
        return roots.of_pod(pod_uid)[0] if pod_uid else roots.memory

    def pods(self, labels: str = "", namespace: str = "default") -> list[Object]:
        return self.api.list(PODS, namespace, labels)

    def wait_for(self, condition: Callable[[], T | None], deadline: float, what: str) -> T:
        """Does as the function of that name, and explains a timeout by the state of the cluster."""
        return wait_for(condition, deadline, what, self.explain)

    def explain(self) -> str:
        """Returns a text with nodes, pods with their reasons, and the ends of the newest logs."""
        lines = []
        for node in self.api.list(NODES):
            lines.append(f"node {node['metadata']['name']}: Ready={ready_status(node)}")
        for pod in self.api.list(PODS):
            lines.append(_describe(pod))
        newest = sorted(self.logs.rglob("*.log"), key=lambda file: file.stat().st_mtime)[-6:]
        for file in newest:
            lines += [f"--- {file.relative_to(self.logs)}", tail_of(file, 12)]
        return "\n".join(lines)

    def all_ready(self) -> bool:
        """Returns whether every node is Ready and accepts pods."""
        mine = [node for node in self.api.list(NODES) if node["metadata"]["name"] in self.nodes]
        # A new node carries a taint until the life-cycle controller has seen it alive.
        return len(mine) == len(self.nodes) and all(
            ready_status(node) == "True" and not node["spec"].get("taints") for node in mine
        )

    def _start(
        self, name: str, arguments: list[str], env: Mapping[str, str] | None = None, lifeline: bool = False
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **(env or {}), markers.CLUSTER: self.id, "PYTHONUNBUFFERED": "1"}
        with open(self.logs / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the cluster, which stops its parts in order
            )


def _describe(pod: Object) -> str:
    status = pod.get("status") or {}
    parts = [f"pod {pod['metadata']['name']} on {pod['spec'].get('nodeName', '-')}: {status.get('phase')}"]
    if pod["metadata"].get("deletionTimestamp"):
        parts.append("(being deleted)")
    parts += [
        f"{c['type']}: {c['message']}"
        for c in status.get("conditions") or []
        if c["status"] != "True" and c.get("message")
    ]
    for entry in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        parts.append(f"{entry['name']}={_state(entry['state'])} restarts={entry['restartCount']}")
    return " ".join(parts)


def _state(state: Mapping[str, Any]) -> str:
    if "terminated" in state:
        return f"exit {state['terminated']['exitCode']}"
    return "running" if "running" in state else str(state.get("waiting", {}).get("reason", "?"))
