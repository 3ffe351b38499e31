"""The laptop cluster, and all that can be made to go wrong in it, from one process to everything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
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
class Strike:
    """Of a failpoint."""

    pid: int
    at: float
    """Unix seconds."""


class NothingToHit(LookupError):
    """The target of the fault is not there; the message names it."""


class Faults:
    """Of one cluster. Each returns when the harm is done; the caller awaits that the cluster notices."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._cut: set[frozenset[str]] = set()

    # Processes of a pod.

    def kill_container_process(
        self, pod: str, container: str = "trainer", number: int = signal.SIGKILL
    ) -> int:
        """Signal one process of the user's command: a leaf of the container's process tree, not its first
        process (the launcher), unless that is alone, nor the interpreter that waits for the next attempt.
        Returns its PID. Raises NothingToHit."""
        found = self.container_processes(pod, container)
        if not found:
            raise NothingToHit(f"no process runs in container {container} of pod {pod}")
        parents = {_parent(pid) for pid in found}
        leaves = [pid for pid in found if pid not in parents and not waits_warm(pid)] or found[:1]
        target = max(leaves, key=_resident)  # the training process, not a helper that it started
        os.kill(target, number)
        return target

    def container_processes(self, pod: str, container: str) -> list[int]:
        """Host PIDs of everything in the container, oldest first."""
        return sorted(markers.pids(markers.POD, self._place(pod, container)))

    def processes_of(self, node: str, pod_uid: str, container: str) -> list[int]:
        """As `container_processes`, for a pod that the API may know no more, as after a partition."""
        return sorted(markers.pids(markers.POD, markers.place(self._cluster.id, node, pod_uid, container)))

    def kill_container(self, pod: str, container: str) -> None:
        """SIGKILL everything in one container at once. Raises NothingToHit."""
        if not markers.send(markers.POD, self._place(pod, container), signal.SIGKILL):
            raise NothingToHit(f"no process runs in container {container} of pod {pod}")

    def oom_kill_container(self, pod: str, container: str = "trainer") -> None:
        """As the kernel does with a container that outgrows its memory limit: everything in it is killed at
        once, and its end has the reason OOMKilled. Raises NothingToHit."""
        mark = (self._cluster.logs / pod / container).with_suffix(OUT_OF_MEMORY)
        mark.touch()
        try:
            self.kill_container(pod, container)
        except NothingToHit:
            mark.unlink()
            raise

    def hold_starts(self, container: str, held: bool = True) -> None:
        """While held, containers of that name run without their process: a busy node on which it takes long
        to listen."""
        mark = self._cluster.directory / f"{HOLD}{container}"
        mark.touch() if held else mark.unlink(missing_ok=True)

    # Pods.

    def evict_pod(self, pod: str) -> None:
        """Through the Eviction API, once. Raises ApiFailure 429 if a disruption budget forbids it."""
        self._cluster.api.evict("default", pod)

    def drain_pod(self, pod: str) -> None:
        """As `kubectl drain`: evict it, again and again while a budget forbids it. Raises GaveUp."""

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
        """Delete the selected pods (by default at once, without grace); their names."""
        names = [pod["metadata"]["name"] for pod in self._cluster.pods(labels)]
        for name in names:
            self._cluster.api.delete(PODS, "default", name, grace=grace)
        return names

    def kill_all_pods(self) -> None:
        """All processes of all pods die at once, with their memory; the nodes live and report Failed pods."""
        for name in self._cluster.nodes:
            agent = self._cluster.agent(name)
            if agent.poll() is None:
                agent.send_signal(LOSE_EVERY_POD)
        markers.kill(markers.POD, self._cluster.id)

    # Nodes.

    def kill_rack(self, rack: str) -> list[str]:
        """As `kill_node`, for all nodes of the rack at once; their names. Raises NothingToHit."""
        names = [name for name, node in self._cluster.nodes.items() if node.labels.get(RACK) == rack]
        if not names:
            raise NothingToHit(f"no node has {RACK}={rack}")
        self.kill_node(*names)
        return names

    def kill_node(self, *names: str) -> None:
        """Power loss: agent and every process of each die at once, its memory is gone, unreported."""
        for name in names:
            self._cluster.agent(name).kill()
        for name in names:
            markers.kill(markers.POD, markers.place(self._cluster.id, name))
        for name in names:
            self._cluster.agent(name).wait()
            shutil.rmtree(self._cluster.memory_folder(name), ignore_errors=True)
            shutil.rmtree(self._cluster.scratch_folder(name), ignore_errors=True)

    def revive_node(self, name: str) -> None:
        """Power back on after `kill_node`: empty, and Ready again soon."""
        if self._cluster.agent(name).poll() is None:
            raise NothingToHit(f"node {name} is not down")
        self._cluster.start_agent(name)

    def partition_node(self, name: str) -> None:
        """Cut the node off from the API server, or stop its kubelet: its agent is silent, its pods go on
        (and reach each other still)."""
        self._cluster.agent(name).send_signal(signal.SIGSTOP)

    def heal_node(self, name: str) -> None:
        """End of `partition_node`."""
        self._cluster.agent(name).send_signal(signal.SIGCONT)

    def cordon_node(self, name: str, cordoned: bool = True) -> None:
        """As `kubectl cordon` / `uncordon`."""
        self._cluster.api.patch(NODES, None, name, {"spec": {"unschedulable": cordoned or None}})

    # Links.

    def cut_links(self, pod: str, others: Iterable[str], *, operator: bool = False) -> None:
        """Nothing gets through any more between the pod and each of `others` (pods), and the operator if so
        wished. Kubernetes notices nothing: the node's agent has its own line. Raises NothingToHit if the
        cluster was not made `cuttable`."""
        here = self._pod(pod)["status"]["podIP"]
        there = {self._pod(other)["status"]["podIP"] for other in others}
        self._cut |= {
            frozenset((here, address))
            for address in (there | ({markers.OPERATOR} if operator else set())) - {here}
        }
        self._write_cuts()

    def mend_links(self) -> None:
        """All of them. What was connected before the cut stays dead until its owner gives it up."""
        self._cut.clear()
        if self._cluster.cuts is not None:
            self._write_cuts()

    def _write_cuts(self) -> None:
        if self._cluster.cuts is None:
            raise NothingToHit("links can be cut in a cluster that was made with cuttable=True only")
        markers.write_cuts(self._cluster.cuts, self._cut)

    def taint_node(self, name: str, *keys: str) -> None:
        """As an autoscaler announces the end of a node; without a key all taints go."""
        taints = [{"key": key, "effect": "NoSchedule"} for key in keys]
        self._cluster.api.patch(NODES, None, name, {"spec": {"taints": taints or None}})

    # The operator.

    def pause_operator(self) -> None:
        self._operator().send_signal(signal.SIGSTOP)

    def resume_operator(self) -> None:
        self._operator().send_signal(signal.SIGCONT)

    def kill_operator(self) -> None:
        """SIGKILL; start it again with `cluster.start_operator`."""
        process = self._operator()
        process.kill()
        process.wait()

    def _operator(self) -> subprocess.Popen[bytes]:
        if self._cluster.operator is None:
            raise NothingToHit("the operator was not started")
        return self._cluster.operator

    # Failpoints.

    def arm(self, whose: str, arming: Arming) -> None:
        """From now on this strikes the process, or all those of a container. `whose`: a replica of the
        operator, or <pod>.<container>. What had struck there before is forgotten. Raises NothingToHit if the
        cluster was not made with `failpoints`."""
        path = self._armed(whose)
        path.unlink(missing_ok=True)  # what was armed before must not find its strikes forgotten
        Path(f"{path}{STRUCK}").unlink(missing_ok=True)
        markers.replace_file(path, f"{arming}\n")

    def disarm(self, whose: str) -> None:
        self._armed(whose).unlink(missing_ok=True)

    def strikes(self, whose: str) -> list[Strike]:
        """Of what `arm` was called with last."""
        try:
            lines = Path(f"{self._armed(whose)}{STRUCK}").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [Strike(int(pid), float(at)) for _, _, pid, at in map(str.split, lines)]

    def _armed(self, whose: str) -> Path:
        if self._cluster.failpoints is None:
            raise NothingToHit("failpoints can be armed in a cluster that was made with failpoints=True only")
        return self._cluster.failpoints / whose

    # Copies.

    def sealed_slots(self, pod: str, rank: int | None = None) -> dict[Path, SlotHeader]:
        """Sealed slots in the pod's memory (of one rank), newest first: own ones and hosted copies alike."""
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
        """Flip a bit of data in every sealed slot of `rank` in the pod; the slots. Raises NothingToHit."""
        slots = self.sealed_slots(pod, rank)
        if not slots:
            raise NothingToHit(f"pod {pod} holds no sealed slot of rank {rank}")
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
    """Whether it is an interpreter that the launcher keeps for the next attempt."""
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
    """A running cluster, and the faults that may strike it."""

    @cached_property
    def faults(self) -> Faults:
        return Faults(self)

    def apply(self, manifest: Object) -> Object:
        """Create or merge. Raises ApiFailure."""
        return self.api.apply(manifest)

    def apply_file(self, path: Path) -> list[Object]:
        """Apply every document of a YAML file."""
        return [self.apply(document) for document in yaml.safe_load_all(path.read_text()) if document]

    def apply_crds(self, folder: Path) -> None:
        """Apply the definitions in this folder and wait until the server serves them."""
        for file in sorted(folder.glob("*.yaml")):
            for definition in self.apply_file(file):
                self._await_served(definition)

    def _await_served(self, definition: Object) -> None:
        name, spec = definition["metadata"]["name"], definition["spec"]
        versions = [version["name"] for version in spec["versions"] if version["served"]]
        paths = [f"/apis/{spec['group']}/{version}/{spec['names']['plural']}" for version in versions]
        self.wait_for(lambda: all(map(self.answers, paths)), PATIENCE, f"{name} to be served")

    def answers(self, path: str) -> bool:
        """Whether the server knows that path, or object, already, or still."""
        try:
            self.api.request("GET", path)
        except ApiFailure as failure:
            if failure.status in {404, 429, 503}:
                return False
            raise
        return True
