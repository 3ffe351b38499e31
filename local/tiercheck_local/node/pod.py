"""Runs one pod on a node, from its binding until nothing of it is left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tiercheck.failpoints import ENV_FAILPOINTS
from tiercheck_local import markers
from tiercheck_local.client import Client
from tiercheck_local.node import environment
from tiercheck_local.node.container import (
    HOLD,
    NO_IMAGE,
    OUT_OF_MEMORY,
    Container,
    ContainerKind,
    ContainerRecipe,
)
from tiercheck_local.node.environment import BadReference, PathTranslation, PodFacts, Roots
from tiercheck_local.node.process import FIRST_BACK_OFF, BackOff, base_environment
from tiercheck_local.node.status import PodSituation, Publisher, pod_status
from tiercheck_local.nodespec import NodeSpec
from tiercheck_operator.kubernetes.api_server import PODS
from tiercheck_operator.model.status import rfc3339

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """The settings of a node's agent, passed as JSON on its command line."""

    node: NodeSpec
    cluster: str
    kubeconfig: str
    directory: str
    """Logs go to `directory`/logs/<pod>/<container>.log."""
    address_prefix: str
    """Three octets; the node is .1, its pods follow."""
    back_off: float = FIRST_BACK_OFF
    """Seconds for which a container that ended twice is held back; all further waits follow from it."""
    cuts: str | None = None
    """The file that lists the cut links; None: none can be cut."""
    failpoints: str | None = None
    """Folder with a file per container, <pod>.<container>, that arms its failpoints; None: there is none."""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def address(self) -> str:
        return f"{self.address_prefix}.1"

    @cached_property
    def roots(self) -> Roots:
        memory, scratch = (folder / self.name for folder in markers.folders(self.cluster))
        return Roots(memory, scratch, claims=Path(self.directory) / "claims")


log = logging.getLogger(__name__)

_LAST_GRACE = 2.0  # seconds for sidecars even if the main containers used up the pod's grace period


class Pod:
    """Runs the containers of a pod that is bound to this node, and keeps the pod's status up to date."""

    def __init__(
        self, manifest: Object, ip: str, client: Client, settings: Settings, allocatable: Mapping[str, str]
    ) -> None:
        self.manifest, self.ip = manifest, ip
        self.uid: str = manifest["metadata"]["uid"]
        self.namespace: str = manifest["metadata"]["namespace"]
        self.name: str = manifest["metadata"]["name"]
        self._client, self._settings = client, settings
        self._facts = PodFacts(manifest, settings.name, ip, settings.address, allocatable)
        self._publisher = Publisher(client, manifest, self._status)
        spec = manifest["spec"]
        self._inits = [
            self._container(
                entry, ContainerKind.SIDECAR if entry.get("restartPolicy") == "Always" else ContainerKind.INIT
            )
            for entry in spec.get("initContainers") or []
        ]
        self._mains = [self._container(entry, ContainerKind.MAIN) for entry in spec["containers"]]
        self._situation = PodSituation(self._inits, self._mains, ip, settings.address, rfc3339(time.time()))
        self._supervision: list[asyncio.Task[Any]] = []
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the pod; everything else happens in the background."""
        self._count_earlier_lives()
        self._publisher.start()
        self._spawn(self._live())

    def seen(self, manifest: Object) -> None:
        """Takes a newer version of the API object."""
        self._publisher.seen(manifest)

    def terminate(self, grace: float) -> None:
        """Deletes the pod gracefully: main containers, then sidecars, then the API object."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._terminate(grace))
            _report_death(self._ending, f"end of pod {self.namespace}/{self.name}")

    def vanish(self) -> None:
        """Ends everything of the pod, as its API object is gone."""
        if self._ending is not None and self._ending is not asyncio.current_task():
            self._ending.cancel()
        self._kill()
        self._publisher.stop()

    def lose(self, reason: str, message: str) -> None:
        """Kills everything of the pod at once, memory included; the pod has failed."""
        self._kill()
        if not self._situation.over:
            self._situation.over, self._situation.failure = True, (reason, message)
        self._publisher.changed()

    def _kill(self) -> None:
        self._abandon()
        markers.kill(markers.POD, self._place())
        for container in self._containers:
            container.lose()
        self._settings.roots.remove(self.uid)

    def _container(self, spec: Object, kind: ContainerKind) -> Container:
        whose = f"{self.name}_{self.namespace}({self.uid})"
        return Container(
            spec, kind, self.ip, self._publisher.changed, pod=whose, back_off=BackOff(self._settings.back_off)
        )

    @property
    def _containers(self) -> Sequence[Container]:
        return [*self._inits, *self._mains]

    def _place(self, container: str = "") -> str:
        return markers.place(self._settings.cluster, self._settings.name, self.uid, container)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        _report_death(task, f"pod {self.namespace}/{self.name}")
        self._supervision.append(task)
        return task

    def _abandon(self) -> None:
        for task in self._supervision:
            task.cancel()

    def _status(self, previous: Object) -> dict[str, Any]:
        return pod_status(self._situation, previous, rfc3339(time.time()))

    def _count_earlier_lives(self) -> None:
        """Counts earlier runs as restarts: after a restart of the node the containers begin anew."""
        status = self.manifest.get("status") or {}
        counts = {
            entry["name"]: entry["restartCount"] + 1
            for kind in ("containerStatuses", "initContainerStatuses")
            for entry in status.get(kind) or []
            if entry.get("containerID")
        }
        for container in self._containers:
            container.restarts = counts.get(container.name, 0)

    async def _live(self) -> None:
        recipes = await self._recipes()
        policy = self.manifest["spec"].get("restartPolicy", "Always")
        for container in self._inits:
            if container.is_sidecar:
                self._spawn(container.run(recipes[container.name], "Always"))
                await container.started.wait()
                continue
            once = "Never" if policy == "Never" else "OnFailure"
            if await container.run(recipes[container.name], once) != 0:
                await self._finish()
                return
        self._situation.initialized = True
        self._publisher.changed()
        runs = [self._spawn(container.run(recipes[container.name], policy)) for container in self._mains]
        await asyncio.gather(*runs)
        await self._finish()

    async def _finish(self) -> None:
        """Completes the pod: stops the sidecars, in reverse order, and makes the phase final."""
        grace = float(self.manifest["spec"].get("terminationGracePeriodSeconds", 30))
        await self._stop_sidecars(time.monotonic() + grace)
        self._situation.over = True
        self._publisher.changed()

    async def _terminate(self, grace: float) -> None:
        self._abandon()
        deadline = time.monotonic() + grace
        active = [each for each in self._containers if not each.is_sidecar]
        await asyncio.gather(*(container.stop(grace) for container in active))
        await self._stop_sidecars(deadline)
        self._situation.over = True
        self._publisher.changed()
        await self._publisher.drained()
        self._settings.roots.remove(self.uid)
        await self._client.delete(PODS, self.namespace, self.name, uid=self.uid, grace=0)

    async def _stop_sidecars(self, deadline: float) -> None:
        for container in reversed(self._inits):
            if container.is_sidecar:
                await container.stop(max(_LAST_GRACE, deadline - time.monotonic()))

    async def _recipes(self) -> dict[str, ContainerRecipe]:
        """Resolves all that the manifest refers to; reports and awaits what is missing, as a kubelet does."""
        for each in self._containers:
            if NO_IMAGE in (image := each.spec.get("image", "")):
                each.wait_with("ErrImagePull", f'failed to pull image "{image}": not found')
                await asyncio.Event().wait()
        pause = 0.2
        while True:
            try:
                lookup = await environment.fetch_references(self._client, self.manifest)
                folders = environment.prepare(self._facts, self._settings.roots, lookup)
                return {
                    container.name: self._recipe(container, folders, lookup) for container in self._containers
                }
            except BadReference as error:
                self._containers[0].wait_with("CreateContainerConfigError", str(error))
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)

    def _recipe(
        self, container: Container, folders: Mapping[str, Path], lookup: environment.Lookup
    ) -> ContainerRecipe:
        scratch = self._settings.roots.of_pod(self.uid)[1]
        home = scratch / f"-{container.name}"
        home.mkdir(parents=True, exist_ok=True)
        last_words = home / "termination-log"
        path_of_last_words = container.spec.get("terminationMessagePath") or "/dev/termination-log"
        mounts = environment.mounts(container.spec, folders)
        translate = PathTranslation({path_of_last_words: str(last_words), **mounts})
        wanted = environment.environment(container.spec, self._facts, lookup)
        argv = environment.command_line(container.spec, wanted)
        env = {
            **base_environment(),
            "HOSTNAME": self.name,
            **({"TMPDIR": translate("/tmp")} if translate("/tmp") != "/tmp" else {}),
            **{name: translate(value) for name, value in wanted.items()},
            markers.CLUSTER: self._settings.cluster,
            markers.POD: self._place(container.name),
        }
        cwd = translate(container.spec.get("workingDir") or "")
        if cwd and not Path(cwd).is_dir():
            raise BadReference(
                f"workingDir {container.spec['workingDir']!r} is in no volume and not a folder of this "
                "machine"
            )
        directory = Path(self._settings.directory)
        logs = directory / "logs" / self.name / f"{container.name}.log"
        env = markers.hooked_environment(env, self._settings.cuts)
        if self._settings.failpoints is not None:
            env[ENV_FAILPOINTS] = f"{self._settings.failpoints}/{self.name}.{container.name}"
        oom = logs.with_suffix(OUT_OF_MEMORY)
        hold = directory / f"{HOLD}{container.name}"
        return ContainerRecipe(
            [translate(word) for word in argv], env, cwd or str(home), logs, last_words, oom, hold, translate
        )


def _report_death(task: asyncio.Task[Any], what: str) -> None:
    """Logs the error that ends a background task, as no other code awaits it."""

    def report(done: asyncio.Task[Any]) -> None:
        if not done.cancelled() and done.exception() is not None:
            log.error("%s: %s", what, done.exception(), exc_info=done.exception())

    task.add_done_callback(report)
