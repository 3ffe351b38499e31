"""Runs the laptop cluster and injects faults, from one killed process to the loss of every pod."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import yaml

from tiercheck.failpoints import STRUCK, Arming
from tiercheck.protocol.artifacts.slot import NotASlot, SlotHeader, read_header
from tiercheck.warm import IDLE_NAME
from tiercheck_local import markers
from tiercheck_local.node.agent import LOSE_EVERY_POD
from tiercheck_local.node.container import HOLD, OUT_OF_MEMORY
from tiercheck_local.nodespec import RACK
from tiercheck_local.running import PATIENCE, RunningCluster
from tiercheck_operator.kubernetes.api_server import NODES, PODS, ApiFailure, Object

_HEADER_ROOM = 4 * 1024 * 1024


@dataclass(frozen=True)
class FailpointHit:
    pid: int
    at: float
    """Unix seconds."""


class TargetNotFound(LookupError):
    """The target of the fault does not exist; the message names it."""


class Faults:
    """The faults of one cluster. Each returns once injected; the caller waits for the cluster to react."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._cut: set[frozenset[str]] = set()

    # Processes of a pod.

    def kill_container_process(
        self, pod: str, container: str = "trainer", number: int = signal.SIGKILL
    ) -> int:
        """Signals one process of the user's command and returns its PID. Raises TargetNotFound.

        It is a leaf of the container's process tree: not the first process (the launcher), unless that is
        alone, nor the interpreter that waits for the next attempt."""
        found = self.container_processes(pod, container)
        if not found:
            raise TargetNotFound(f"no process runs in container {container} of pod {pod}")
        parents = {_parent(pid) for pid in found}
        leaves = [pid for pid in found if pid not in parents and not waits_warm(pid)] or found[:1]
        target = max(leaves, key=_resident)  # the training process, not a helper that it started
        os.kill(target, number)
        return target

    def container_processes(self, pod: str, container: str) -> list[int]:
        """Returns the host PIDs of everything in the container, the lowest (as a rule the oldest) first."""
        return sorted(markers.pids(markers.POD, self._place(pod, container)))

    def processes_of(self, node: str, pod_uid: str, container: str) -> list[int]:
        """Returns the host PIDs for a pod that may be gone from the API, as after a partition."""
        return sorted(markers.pids(markers.POD, markers.place(self._cluster.id, node, pod_uid, container)))

    def kill_container(self, pod: str, container: str) -> None:
        """Sends SIGKILL to everything in one container at once. Raises TargetNotFound."""
        if not markers.send(markers.POD, self._place(pod, container), signal.SIGKILL):
            raise TargetNotFound(f"no process runs in container {container} of pod {pod}")

    def oom_kill_container(self, pod: str, container: str = "trainer") -> None:
        """Kills a container as the kernel does when it exceeds its memory limit. Raises TargetNotFound.

        Everything in it is killed at once, and its status has the reason OOMKilled."""
        mark = (self._cluster.logs / pod / container).with_suffix(OUT_OF_MEMORY)
        mark.touch()
        try:
            self.kill_container(pod, container)
        except TargetNotFound:
            mark.unlink()
            raise

    def hold_starts(self, container: str, held: bool = True) -> None:
        """Makes containers of that name run without their process while held: a busy node, slow to listen."""
        mark = self._cluster.directory / f"{HOLD}{container}"
        mark.touch() if held else mark.unlink(missing_ok=True)

    # Pods.

    def evict_pod(self, pod: str) -> None:
        """Calls the Eviction API once. Raises ApiFailure 429 if a disruption budget forbids the eviction."""
        self._cluster.api.evict("default", pod)

    def drain_pod(self, pod: str) -> None:
        """Evicts a pod as `kubectl drain` does, retrying while a budget forbids it. Raises WaitTimeout."""

        def evicted() -> bool:
            try:
                self.evict_pod(pod)
            except ApiFailure as failure:
                if failure.status != 429:
                    raise
                return False
            return True

        self._cluster.wait_for(evicted, 120.0, f"pod {pod} to be evicted")

    def delete_pods(self, labels: str = "", grace: int | None = 0) -> list[str]:
        """Deletes the selected pods (by default at once, without grace); returns their names."""
        names = [pod["metadata"]["name"] for pod in self._cluster.pods(labels)]
        for name in names:
            self._cluster.api.delete(PODS, "default", name, grace=grace)
        return names

    def kill_all_pods(self) -> None:
        """Kills all processes of all pods, with their memory; the nodes live and report Failed pods."""
        for name in self._cluster.nodes:
            agent = self._cluster.agents[name]
            if agent.poll() is None:
                agent.send_signal(LOSE_EVERY_POD)
        markers.kill(markers.POD, self._cluster.id)

    # Nodes.

    def kill_rack(self, rack: str) -> list[str]:
        """Kills all nodes of a rack as `kill_node` does; returns their names. Raises TargetNotFound."""
        names = [name for name, node in self._cluster.nodes.items() if node.labels.get(RACK) == rack]
        if not names:
            raise TargetNotFound(f"no node has {RACK}={rack}")
        self.kill_node(*names)
        return names

    def kill_node(self, *names: str) -> None:
        """Simulates a power loss: each node's agent, processes and memory are gone at once, unreported."""
        for name in names:
            self._cluster.agents[name].kill()
        for name in names:
            markers.kill(markers.POD, markers.place(self._cluster.id, name))
        for name in names:
            self._cluster.agents[name].wait()
            self._cluster.settings(name).roots.remove_all()

    def revive_node(self, name: str) -> None:
        """Restores power after `kill_node`: the node is empty, and Ready again soon."""
        if self._cluster.agents[name].poll() is None:
            raise TargetNotFound(f"node {name} is not down")
        self._cluster.start_agent(name)

    def partition_node(self, name: str) -> None:
        """Stops a node's agent (a partition, or a dead kubelet); its pods go on and reach each other."""
        self._cluster.agents[name].send_signal(signal.SIGSTOP)

    def heal_node(self, name: str) -> None:
        """Ends `partition_node`."""
        self._cluster.agents[name].send_signal(signal.SIGCONT)

    def cordon_node(self, name: str, cordoned: bool = True) -> None:
        """Does what `kubectl cordon` / `uncordon` does."""
        self._cluster.api.patch(NODES, None, name, {"spec": {"unschedulable": cordoned or None}})

    # Links.

    def cut_links(self, pod: str, others: Iterable[str], *, operator: bool = False) -> None:
        """Cuts all links between the pod and each of `others` (pods), and with `operator` the operator.

        Kubernetes notices nothing: the node's agent has its own connection. Raises TargetNotFound if the
        cluster was not made `cuttable`."""
        here = self._pod(pod)["status"]["podIP"]
        there = {self._pod(other)["status"]["podIP"] for other in others}
        self._cut |= {
            frozenset((here, address))
            for address in (there | ({markers.OPERATOR} if operator else set())) - {here}
        }
        self._write_cuts()

    def restore_links(self) -> None:
        """Restores all links. Connections from before the cut stay dead until their owner gives them up."""
        self._cut.clear()
        if self._cluster.cuts is not None:
            self._write_cuts()

    def _write_cuts(self) -> None:
        if self._cluster.cuts is None:
            raise TargetNotFound("links can be cut in a cluster that was made with cuttable=True only")
        markers.write_cuts(self._cluster.cuts, self._cut)

    def taint_node(self, name: str, *keys: str) -> None:
        """Taints a node as an autoscaler does before its removal; without keys, removes all taints."""
        taints = [{"key": key, "effect": "NoSchedule"} for key in keys]
        self._cluster.api.patch(NODES, None, name, {"spec": {"taints": taints or None}})

    # The operator.

    def pause_operator(self) -> None:
        self._operator().send_signal(signal.SIGSTOP)

    def resume_operator(self) -> None:
        self._operator().send_signal(signal.SIGCONT)

    def kill_operator(self) -> None:
        """Sends SIGKILL; `cluster.start_operator` starts the operator again."""
        process = self._operator()
        process.kill()
        process.wait()

    def _operator(self) -> subprocess.Popen[bytes]:
        if self._cluster.operator is None:
            raise TargetNotFound("the operator was not started")
        return self._cluster.operator

    # Failpoints.

    def arm(self, whose: str, arming: Arming) -> None:
        """Arms a failpoint in a replica of the operator, or in all processes of <pod>.<container>.

        Earlier strikes there are deleted. Raises TargetNotFound if the cluster was not made with
        `failpoints`."""
        path = self._armed(whose)
        path.unlink(missing_ok=True)  # the earlier arming must not find its strikes deleted
        Path(f"{path}{STRUCK}").unlink(missing_ok=True)
        markers.replace_file(path, f"{arming}\n")

    def disarm(self, whose: str) -> None:
        self._armed(whose).unlink(missing_ok=True)

    def strikes(self, whose: str) -> list[FailpointHit]:
        """Returns the strikes since `arm` was last called."""
        try:
            lines = Path(f"{self._armed(whose)}{STRUCK}").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [FailpointHit(int(pid), float(at)) for _, _, pid, at in map(str.split, lines)]

    def _armed(self, whose: str) -> Path:
        if self._cluster.failpoints is None:
            raise TargetNotFound(
                "failpoints can be armed in a cluster that was made with failpoints=True only"
            )
        return self._cluster.failpoints / whose

    # Copies.

    def sealed_slots(self, pod: str, rank: int | None = None) -> dict[Path, SlotHeader]:
        """Returns sealed slots in the pod's memory (of one rank), newest first, hosted copies included."""
        found = self._pod(pod)
        memory = self._cluster.memory_folder(found["spec"]["nodeName"], found["metadata"]["uid"])
        slots: dict[Path, SlotHeader] = {}
        for seal in memory.rglob("*.seal"):
            slot = seal.with_suffix("")
            try:
                with slot.open("rb") as file:
                    header = read_header(file.read(_HEADER_ROOM), slot.stat().st_size)
            except (NotASlot, OSError):
                continue
            if rank is None or header.rank == rank:
                slots[slot] = header
        return dict(sorted(slots.items(), key=lambda entry: entry[1].version, reverse=True))

    def flip_bit(self, pod: str, rank: int) -> list[Path]:
        """Flips a data bit in every sealed slot of `rank` in the pod; returns them. Raises TargetNotFound."""
        slots = self.sealed_slots(pod, rank)
        if not slots:
            raise TargetNotFound(f"pod {pod} holds no sealed slot of rank {rank}")
        for slot, header in slots.items():
            with slot.open("r+b") as file:
                file.seek(header.size - 1)
                last = file.read(1)[0]
                file.seek(header.size - 1)
                file.write(bytes([last ^ 1]))
        return list(slots)

    def _pod(self, name: str) -> Object:
        return self._cluster.api.get(PODS, "default", name)

    def _place(self, pod: str, container: str) -> str:
        found = self._pod(pod)
        return markers.place(
            self._cluster.id, found["spec"].get("nodeName", ""), found["metadata"]["uid"], container
        )


def _parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def waits_warm(pid: int) -> bool:
    """Returns whether the process is an interpreter that the launcher keeps for the next attempt."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == IDLE_NAME
    except OSError:
        return False


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


class LocalCluster(RunningCluster):
    """A running cluster, and the faults that can be injected into it."""

    @cached_property
    def faults(self) -> Faults:
        return Faults(self)

    def apply(self, manifest: Object) -> Object:
        """Creates the object, or merges into it. Raises ApiFailure."""
        return self.api.apply(manifest)

    def apply_file(self, path: Path) -> list[Object]:
        """Applies every document of a YAML file."""
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # our definitions are long
        return [self.apply(document) for document in yaml.load_all(path.read_text(), loader) if document]

    def apply_crds(self, folder: Path) -> None:
        """Applies the definitions in this folder and waits until the server serves them."""
        for file in sorted(folder.glob("*.yaml")):
            for definition in self.apply_file(file):
                name, spec = definition["metadata"]["name"], definition["spec"]
                for version in spec["versions"]:
                    if version["served"]:
                        path = f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}"
                        self.wait_for(partial(self.answers, path), PATIENCE, f"{name} to be served")

    def answers(self, path: str) -> bool:
        """Returns whether the server serves that path, or has that object, at the moment."""
        try:
            self.api.request("GET", path)
        except ApiFailure as failure:
            if failure.status in {404, 429, 503}:
                return False
            raise
        return True
