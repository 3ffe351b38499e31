"""Wires kopf: watches keep the view of the cluster, and every event wakes the jobs it may concern.

No logic lives here.

Only event handlers are used. So kopf adds no finalizer and no annotation: a job can be deleted
while the operator is down, and its owner references leave nothing behind. Every replica watches; only the one
that leads has loops for the jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import secrets
import signal
from asyncio import sslproto
from collections.abc import Iterable, Mapping
from typing import Any

import kopf

from tiercheck.protocol import names
from tiercheck.redaction import known_secrets, log_redacted
from tiercheck_operator.attach.adoption import AttachService
from tiercheck_operator.config import Config
from tiercheck_operator.controller.reconciler import JobLoop, ReconcilerContext
from tiercheck_operator.kubernetes import watches
from tiercheck_operator.kubernetes.api_server import JOBS, NODES, PODS, ApiFailure
from tiercheck_operator.kubernetes.client import FencedServer, Kube
from tiercheck_operator.kubernetes.election import Elector, boot_clock
from tiercheck_operator.kubernetes.object_reader import Access, WatchSession
from tiercheck_operator.kubernetes.owned_objects import ClusterIdentity, NodeLeases
from tiercheck_operator.metrics import Metrics, Pages
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.parsing import identity_of, parse_node, parse_pod

log = logging.getLogger(__name__)

_KIND_EVERY = 2.0
"""Seconds between two checks for the job kind while it is not installed."""
_LAST_WRITES = 5.0
"""Seconds for the last writes to arrive, before the lease is given back."""
_LAST_WATCHES = 0.5
"""Seconds for closing the watches. No write is pending then; kopf may retry an unreachable server."""
_BEAT = 0.25
"""Seconds between two heartbeats of the event loop."""


_COLLECT_AFTER = 20_000
"""The number of objects made and not freed before garbage is collected.
Python's default of 700 cost half of a recovery's processor time: holdings are many objects, no garbage."""
_LISTED_AT_ONCE = 100
"""The number of objects per page of a first listing: a pod takes 100 KiB before it is reduced."""
_LIST_AGAIN = 1.0
"""Seconds before a kind is listed again: a server with invalid answers is not called all the time."""
_TRY_AGAIN = (1.0, 1.0, 2.0, *(3.0,) * 17)
"""Seconds between tries of a watch. A server that answers 403 or 5xx to the last one ends the process.
kopf's own pauses grow to 21 s, in which a leader that has its lease again would decide by pods as they were
before the outage. The sum is about that of kopf's."""
_RECEIVED_AT_ONCE = 2 * 1024
"""Bytes that asyncio buffers per connection, and TLS as many.
asyncio's own 256 KiB would be most of this process's memory, for connections that are mostly idle."""
_M_ARENA_MAX = -8
_REMEMBERED_FOR = 0.05
"""Seconds that kopf keeps an object after its last event, in case that another follows.
With half a second, a first listing of 2,000 pods took 50 MiB."""


class Operator:
    """Runs the watches, the leader election and the loops of all jobs in this process."""

    def __init__(self, config: Config, access: Access) -> None:
        self._config, self._access = config, access
        self._metrics = Metrics()
        self._elector: Elector | None = None
        self._kube = Kube(FencedServer(access, may_write=self._may_act, called=self._metrics.called))
        self._loops: dict[str, JobLoop] = {}
        self._known_as: dict[tuple[str, str], str] = {}
        """The UID of each job, by its namespace and the UID that its pods carry for it."""
        self._parser = watches.ObjectParser()
        self._jobs: watches.Watched[Mapping[str, Any]] = watches.Watched()
        self._view = watches.ClusterView()
        self._leading = config.lease is None
        self._closing = False
        self._watching = asyncio.Event()
        self._beaten = boot_clock()
        self._attach = AttachService(
            self._kube,
            Kube(FencedServer(access, called=self._metrics.called)),
            config,
            lambda namespace, uid: (namespace, uid) in self._known_as,
            self._view.pods_of,
        )
        self._context = ReconcilerContext(
            self._view.pods_of,
            self._view.all_nodes,
            self._kube,
            config,
            self._metrics,
            found=self._pod_changed,
            gone=self._forget,
            cluster=ClusterIdentity(self._kube),
            leases=NodeLeases(self._kube),
            owner_size=self._attach.owner_size,
        )
        of_jobs = f"labelSelector={names.LABEL_JOB_UID}"
        self._kinds = {
            "Pod": watches.WatchedKind(PODS, of_jobs, self._view.pods, self._pod_changed, self._pod_gone),
            "Node": watches.WatchedKind(NODES, "", self._view.nodes, self._node_changed, self._node_gone),
            names.KIND: watches.WatchedKind(JOBS, "", self._jobs, self._job_changed, self._job_gone),
        }
        self._resync = watches.Resync(
            self._kube,
            self._kinds,
            namespaces=config.namespaces,
            every=config.watch_check_seconds,
            grace=config.watch_grace_seconds,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set, as by a signal, or a watch is lost for good and a restart is needed."""
        pages = Pages(self._metrics.text, self._trouble, self._ready, tls=self._config.metrics_tls)
        await pages.start(self._config.metrics_host, self._config.metrics_port)
        self._attach.start()
        quiet = asyncio.Event()
        background = [
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._resync.run(self._watching)),
            asyncio.create_task(self._start_when_all_is_seen()),
        ]
        try:
            if self._config.namespaces and not await self._served(stop):
                return
            background.append(asyncio.create_task(self._elected()))
            watching = asyncio.create_task(self._watch(quiet, stop))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            # Hand over first, so that another replica goes on while our watches are being closed.
            await self._hand_over()
            quiet.set()
            background.append(watching)
            done, _ = await asyncio.wait({watching}, timeout=_LAST_WATCHES)
            for task in done:
                task.result()
        finally:
            await self._hand_over()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._context.lines.close()
            await self._attach.stop()
            await pages.stop()
            self._kube.close()

    async def _watch(self, quiet: asyncio.Event, stop: asyncio.Event) -> None:
        """Runs kopf until `quiet` is set, or a watch is lost for good."""
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=self._settings(),
            # Without it kopf asks for the user's name, and ours has none. Its type is not public.
            identity=self._config.identity,  # type: ignore[arg-type]
            standalone=True,
            clusterwide=not self._config.namespaces,
            namespaces=list(self._config.namespaces),
            stop_flag=quiet,
            ready_flag=self._watching,
        )
        # kopf's signal handlers would close the watches, for five seconds, before the hand-over.
        end_by_signal(stop)
        await kopf.run_tasks(tasks, ignored=others)

    async def _served(self, stop: asyncio.Event) -> bool:
        """Waits until the server has the job kind, which kopf looks up only once; False if stopped before."""
        is_logged = False
        while not stop.is_set():
            try:
                if await self._kube.find_resource(JOBS.api_version, names.KIND) is not None:
                    return True
            except ApiFailure as error:
                log.warning("the kinds of the API server cannot be listed: %s", error)
            if not is_logged:
                log.warning("the API server has no %s yet; install its definition (crds/)", names.KIND)
                is_logged = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KIND_EVERY):
                    await stop.wait()
        return False

    # Leadership.

    def _may_act(self) -> bool:
        """Returns whether this replica may write. Called from any thread, right before a write."""
        return self._elector.leads() if self._elector is not None else self._config.lease is None

    async def _elected(self) -> None:
        """Runs loops for the jobs exactly while this replica leads."""
        self._metrics.leads(self._leading)
        if self._config.lease is None:
            self._attach.lead()
            return
        loop, changes = asyncio.get_running_loop(), asyncio.Queue[bool]()

        def report(leads: bool) -> None:
            loop.call_soon_threadsafe(changes.put_nowait, leads)

        api = FencedServer(self._access, self._config.terms.call, called=self._metrics.called)
        self._elector = Elector(
            api,
            self._config.lease,
            f"{self._config.identity}_{secrets.token_hex(4)}",
            self._config.terms,
            changed=report,
            alive=lambda: boot_clock() - self._beaten < self._config.terms.renew_within,
        )
        self._elector.start()
        while True:
            leads = await changes.get()
            if leads:
                self._begin()
            else:
                await self._cease()

    def _begin(self) -> None:
        if self._closing:
            return
        self._leading = True
        self._metrics.leads(True)
        if self._resync.seen_all.is_set():
            self._start_all()
        self._attach.lead()
        for pod in self._view.pods.views():
            self._attach.pod_seen(pod)

    async def _cease(self) -> None:
        self._leading = False
        self._metrics.leads(False)
        loops, self._loops = self._loops, {}
        await self._attach.stop_leading()
        await asyncio.gather(*(loop.stop() for loop in loops.values()))

    async def _hand_over(self) -> None:
        """Stops acting and releases the lease. May be called twice."""
        self._closing = True
        await self._cease()
        elector = self._elector
        if elector is not None:
            if not await self._kube.drain(_LAST_WRITES):
                log.warning("something that was sent is still on its way; the lease is left to run out")
                elector.retire()
            await asyncio.to_thread(elector.release)

    async def _beat(self) -> None:
        while True:
            self._beaten = boot_clock()
            await asyncio.sleep(_BEAT)

    def _ready(self) -> bool:
        """Returns whether this replica could take over at once: it has seen every existing object."""
        return self._watching.is_set() and self._resync.complete

    def _trouble(self) -> str:
        """Returns everything that is wrong, one line each; empty if nothing is."""
        now = asyncio.get_running_loop().time()
        begun = {loop.named: loop.began for loop in self._loops.values() if loop.began is not None}
        dead = [loop.named for loop in self._loops.values() if loop.dead]
        sentences = [
            *self._resync.troubles(),
            watches.stuck(begun, now, self._config.stuck_seconds),
            f"the loops of {', '.join(dead[:5])} have ended" if dead else "",
            "the leader election has ended" if self._elector is not None and self._elector.died else "",
        ]
        return "\n".join(filter(None, sentences))

    # Watches.

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.peering.standalone = True
        settings.networking.request_timeout = 30
        settings.networking.error_backoffs = _TRY_AGAIN
        settings.watching.chunk_size = _LISTED_AT_ONCE
        settings.watching.reconnect_backoff = _LIST_AGAIN
        settings.queueing.idle_timeout = _REMEMBERED_FOR
        settings.watching.label_selectors["v1", "pods"] = names.LABEL_JOB_UID
        settings.process.ultimate_exiting_timeout = 10
        # An operator limited to some namespaces may not list namespaces and kinds, and kopf would retry that
        # for a minute.
        settings.scanning.disabled = bool(self._config.namespaces)
        settings.persistence.finalizer = f"{names.API_GROUP}/finalizer"
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.API_GROUP)
        settings.persistence.diffbase_storage = _NoDifferences()
        return settings

    def _registry(self) -> kopf.OperatorRegistry:
        """Builds the registry without kopf's indexes.
        With them kopf keeps each object whole until all are listed, and wakes them all for each new one."""
        registry = kopf.OperatorRegistry()

        session = WatchSession(self._access)

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return await session.log_in()

        for name, kind in self._kinds.items():
            self._follow(registry, name, kind)
        return registry

    def _follow(self, registry: kopf.OperatorRegistry, name: str, kind: watches.WatchedKind) -> None:
        where = (*kind.resource.api_version.split("/"), kind.resource.plural)
        labels = {names.LABEL_JOB_UID: kopf.PRESENT} if kind.query else None

        @kopf.on.event(*where, labels=labels, registry=registry)
        async def on_event(type: str | None, body: kopf.Body, **_: Any) -> None:
            uid, version = _identity(body)
            try:
                if type != "DELETED":
                    kind.changed(body)
            finally:
                self._metrics.watched(name)
                self._resync.note_event(name, uid, version, listed=type is None)
            if type == "DELETED":
                await kind.gone(uid)

    def _pod_changed(self, body: Mapping[str, Any]) -> None:
        uid, version = _identity(body)
        pod = self._parser.parse_or_none("Pod", body, parse_pod)
        if pod is not None:
            pod = watches.date_pod(pod, self._view.pods.get(uid), self._context.clock())
        self._view.put_pod(uid, pod, version)
        if pod is not None:
            self._wake(pod)
        if self._leading:
            self._attach.pod_seen(pod)

    def _node_changed(self, body: Mapping[str, Any]) -> None:
        uid, version = _identity(body)
        node = self._parser.parse_or_none("Node", body, lambda raw: parse_node(raw, self._config.signs))
        if self._view.put_node(uid, node, version):
            self._wake_all()

    def _job_changed(self, body: Mapping[str, Any]) -> None:
        raw = watches.copy_of_job(body)
        uid, version = _identity(raw)
        self._jobs.put(uid, version, raw)
        known_as = self._parser.parse_or_none(names.KIND, raw, identity_of) or uid
        identity = str(raw["metadata"]["namespace"]), known_as
        # A job's own UID is certain. The workload that it claims to be attached to is not, so the first claim
        # counts.
        if known_as == uid or self._known_as.get(identity, uid) == uid:
            self._known_as[identity] = uid
        if uid in self._loops:
            self._loops[uid].changed(raw)
        elif self._leading and self._resync.seen_all.is_set():
            self._start(raw)

    async def _start_when_all_is_seen(self) -> None:
        """Starts the loops once all objects are seen: a loop that misses pods would create them again."""
        await self._resync.seen_all.wait()
        if self._leading:
            self._start_all()

    def _start_all(self) -> None:
        for job in self._jobs.views():
            if job["metadata"]["uid"] not in self._loops:
                self._start(job)

    def _start(self, raw: Mapping[str, Any]) -> None:
        loop = self._loops[raw["metadata"]["uid"]] = JobLoop(raw, self._context)
        loop.start()

    def _forget(self, uid: str) -> JobLoop | None:
        """Drops the job and returns its loop, which the caller has to stop."""
        self._jobs.drop(uid)
        self._known_as = {identity: job for identity, job in self._known_as.items() if job != uid}
        return self._loops.pop(uid, None)

    async def _job_gone(self, uid: str) -> None:
        loop = self._forget(uid)
        if loop is not None:
            await loop.stop()

    async def _pod_gone(self, uid: str) -> None:
        pod = self._view.drop_pod(uid)
        if pod is not None:
            self._wake(pod)

    async def _node_gone(self, uid: str) -> None:
        if self._view.drop_node(uid) is not None:
            self._wake_all()

    def _wake(self, pod: PodView) -> None:
        """Wakes the loop of the pod's job."""
        loop = self._loops.get(self._known_as.get((pod.namespace, pod.job_uid), ""))
        if loop is not None:
            loop.wake()

    def _wake_all(self) -> None:
        for loop in self._loops.values():
            loop.wake()


class _NoDifferences(kopf.DiffBaseStorage):
    """Keeps kopf from reading its last view of an object from an annotation.
    Any user may have written something there that ends kopf's handling of the object. Diffs are not used."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Stores nothing."""


def _identity(body: Mapping[str, Any]) -> tuple[str, int]:
    return str(body["metadata"]["uid"]), watches.version_in(body)


def end_by_signal(stop: asyncio.Event) -> None:
    """Makes SIGTERM and SIGINT set `stop`."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def prepare_process() -> None:
    """Tunes the process for thousands of sidecars, each with 1-2 connections and hundreds of objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 20)
    with contextlib.suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)  # threads wait for the API server; each had some MiB
    sslproto.SSLProtocol.max_size = _RECEIVED_AT_ONCE
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def main() -> None:
    """Runs until SIGTERM or SIGINT. Raises ValueError on a setting that cannot be understood."""
    config = Config.from_env(os.environ)
    log_redacted(config.log_level, known_secrets(os.environ))
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(config.log_level)))
    prepare_process()
    stop = asyncio.Event()
    end_by_signal(stop)
    await Operator(config, Access()).run(stop)
