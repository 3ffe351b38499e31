"""kopf wiring: watches keep two indexes, and every event wakes the jobs it may concern. No logic lives here.

Only event handlers and indexes are used. So kopf adds no finalizer and no annotation: a job can be deleted while the operator
is down, and its owner references leave nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import signal
from collections.abc import Iterable, Mapping
from typing import Any

import kopf
import kubernetes
from aiohttp import web

from tiercheck.protocol import names
from tiercheck_operator.config import Config
from tiercheck_operator.controller.loop import JobLoop, Surroundings
from tiercheck_operator.controller.observation import NodeView, PodView
from tiercheck_operator.controller.parsing import parse_node, parse_pod
from tiercheck_operator.kube import ApiFailure, Kube, load_configuration
from tiercheck_operator.metrics import Metrics

log = logging.getLogger(__name__)

_KIND_EVERY = 2.0
"""Seconds between two looks for our kind while it is not installed."""


class Operator:
    """All jobs of this process."""

    def __init__(self, config: Config, configuration: kubernetes.client.Configuration) -> None:
        self._config, self._configuration = config, configuration
        self._metrics = Metrics()
        self._kube = Kube(configuration)
        self._loops: dict[str, JobLoop] = {}
        self._pods: kopf.Index[str, PodView] | None = None
        self._nodes: kopf.Index[str, NodeView] | None = None
        self._seen_nodes: dict[str, NodeView] = {}
        self._ready = asyncio.Event()
        self._around = Surroundings(self._pods_of, self._all_nodes, self._kube, config, self._metrics)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, or a watch is lost for good (then the process ends, to be started again)."""
        server = await self._serve()
        try:
            if self._config.namespaces and not await self._served(stop):
                return
            await kopf.operator(
                registry=self._registry(),
                settings=self._settings(),
                standalone=True,
                clusterwide=not self._config.namespaces,
                namespaces=list(self._config.namespaces),
                stop_flag=stop,
                ready_flag=self._ready,
            )
        finally:
            await asyncio.gather(*(loop.stop() for loop in self._loops.values()))
            await server.cleanup()
            self._kube.close()

    async def _served(self, stop: asyncio.Event) -> bool:
        """Wait until the server knows our kind, which kopf looks for only once then; False: told to stop before."""
        told = False
        while not stop.is_set():
            try:
                known = await self._kube.get(f"/apis/{names.API_GROUP}/{names.API_VERSION}")
            except ApiFailure as error:
                log.warning("the kinds of the API server cannot be listed: %s", error)
                known = None
            if any(entry.get("name") == names.PLURAL for entry in (known or {}).get("resources") or []):
                return True
            if not told:
                log.warning("the API server has no %s yet; install its definition (crds/)", names.KIND)
                told = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _KIND_EVERY)
        return False

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.peering.standalone = True
        settings.networking.request_timeout = 30
        settings.watching.chunk_size = 500
        settings.watching.label_selectors["v1", "pods"] = names.LABEL_JOB_UID
        settings.process.ultimate_exiting_timeout = 10
        # An operator of some namespaces has no right to look for namespaces and kinds, and kopf asks for a minute in vain.
        settings.scanning.disabled = bool(self._config.namespaces)
        settings.persistence.finalizer = f"{names.API_GROUP}/finalizer"
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.API_GROUP)
        settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=names.API_GROUP)
        return settings

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        def login(**_: Any) -> kopf.ConnectionInfo:
            return _connection(self._configuration)

        @kopf.index("v1", "pods", id="pods_by_job", labels={names.LABEL_JOB_UID: kopf.PRESENT}, registry=registry)
        def pods_by_job(body: kopf.Body, **_: Any) -> dict[str, PodView] | None:
            pod = parse_pod(body)
            return None if pod is None else {pod.job_uid: pod}

        @kopf.index("v1", "nodes", id="nodes_by_name", registry=registry)
        def nodes_by_name(body: kopf.Body, **_: Any) -> dict[str, NodeView]:
            node = parse_node(body)
            return {node.name: node}

        @kopf.on.event("v1", "pods", labels={names.LABEL_JOB_UID: kopf.PRESENT}, registry=registry)
        async def pod_event(labels: Mapping[str, str], **_: Any) -> None:
            self._metrics.watched("Pod")
            loop = self._loops.get(labels.get(names.LABEL_JOB_UID, ""))
            if loop is not None:
                loop.wake()

        @kopf.on.event("v1", "nodes", registry=registry)
        async def node_event(type: str | None, body: kopf.Body, **_: Any) -> None:
            self._metrics.watched("Node")
            self._node_changed(parse_node(body), gone=type == "DELETED")

        @kopf.on.event(names.API_GROUP, names.API_VERSION, names.PLURAL, registry=registry)
        async def job_event(type: str | None, body: kopf.Body, **indexes: Any) -> None:
            self._metrics.watched(names.KIND)
            self._pods, self._nodes = indexes["pods_by_job"], indexes["nodes_by_name"]
            raw = copy.deepcopy(dict(body))
            if type == "DELETED":
                await self._job_gone(raw)
            else:
                self._job_changed(raw)

        return registry

    def _job_changed(self, raw: Mapping[str, Any]) -> None:
        uid = raw["metadata"]["uid"]
        if uid in self._loops:
            self._loops[uid].changed(raw)
            return
        loop = self._loops[uid] = JobLoop(raw, self._around)
        loop.start()

    async def _job_gone(self, raw: Mapping[str, Any]) -> None:
        metadata = raw["metadata"]
        loop = self._loops.pop(metadata["uid"], None)
        if loop is not None:
            await loop.stop()
            self._metrics.job_gone(metadata["namespace"], metadata["name"])

    def _node_changed(self, node: NodeView, *, gone: bool) -> None:
        # Heartbeats change a node every few seconds; only what decisions look at may wake the jobs.
        before = self._seen_nodes.pop(node.name, None)
        if not gone:
            self._seen_nodes[node.name] = node
        if gone or before != node:
            for loop in self._loops.values():
                loop.wake()

    def _pods_of(self, job_uid: str) -> Iterable[PodView]:
        return list(self._pods.get(job_uid, ())) if self._pods is not None else []

    def _all_nodes(self) -> Mapping[str, NodeView]:
        if self._nodes is None:
            return {}
        return {name: node for name, nodes in self._nodes.items() for node in nodes}

    async def _serve(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics_page),
                web.get("/healthz", self._health_page),
                web.get("/readyz", self._ready_page),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self._config.metrics_host, self._config.metrics_port).start()
        return runner

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    async def _health_page(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready_page(self, _: web.Request) -> web.Response:
        ready = self._ready.is_set()
        return web.Response(text="ready\n" if ready else "starting\n", status=200 if ready else 503)


def _connection(configuration: kubernetes.client.Configuration) -> kopf.ConnectionInfo:
    """What kopf needs to log in, from what the client library worked out."""
    header = configuration.get_api_key_with_prefix("BearerToken") or ""
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


async def main() -> None:
    """Run until SIGTERM or SIGINT. Raises ValueError on a setting that cannot be understood."""
    config = Config.from_env(os.environ)
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(config.log_level)))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Operator(config, load_configuration()).run(stop)
