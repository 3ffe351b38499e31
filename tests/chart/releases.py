"""Renders the chart, and installs it on a real API server of which all calls are recorded.

There are no controllers for Deployments here, so the operator's process is started by the test, with the
environment of the Deployment and the token of the chart's service account.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from tests.access import REAL_SERVER, load
from tests.operator.kubernetes.proxy import JOBS, service_account_kubeconfig
from tiercheck_cli.api_server import RequestFailed
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.controlplane import write_kubeconfig

helm = pytest.importorskip(
    "helm_python", reason="the Helm SDK (helm-python-sdk) has no wheel for this machine"
)

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tiercheck"
RELEASE, NAMESPACE = "tiercheck", "tiercheck-system"
CASES = tuple(sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml")))
"""Values files: what is linted, rendered and compared with a snapshot."""


def values_of(case: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{case}-values.yaml").read_text())
    return loaded


def rendered(
    values: Mapping[str, Any] | None = None, release: str = RELEASE, namespace: str = NAMESPACE
) -> dict[str, str]:
    """Template -> text, NOTES.txt included. Raises helm.HelmValuesError, helm.HelmRenderError."""
    with helm.Chart.load(CHART) as chart:
        texts: dict[str, str] = chart.render(dict(values or {}), name=release, namespace=namespace)
    return {path.removeprefix("tiercheck/templates/"): text for path, text in texts.items()}


def objects(
    values: Mapping[str, Any] | None = None, release: str = RELEASE, namespace: str = NAMESPACE
) -> list[dict[str, Any]]:
    """Everything that an installation would create, the test pod included."""
    texts = rendered(values, release, namespace)
    return [
        document
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        # Ten times as fast as the other loader, with definitions as long as ours.
        for document in yaml.load_all(text, yaml.CSafeLoader)
        if document
    ]


def of_kind(kind: str, values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    return [entry for entry in objects(values) if entry["kind"] == kind]


def only(kind: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The one object of that kind."""
    (found,) = of_kind(kind, values)
    return found


def operators_environment(values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Of the operator's container; what the pod is told about itself is left out."""
    (container,) = only("Deployment", values)["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def granted(roles: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """(API group, resource, verb) for every right in these roles."""
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def strings(value: Any) -> Iterator[str]:
    """Every string in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)


real = [*REAL_SERVER, pytest.mark.cluster]

DEADLINE = 90.0
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{_CRDS}/tiercheckjobs.tiercheck.io"
DEFINITIONS = (CRD, f"{_CRDS}/tiercheckpolicies.tiercheck.io")
ACCOUNT = f"{RELEASE}-operator"


def install(
    config: Any, cluster: LocalCluster, values: dict[str, Any] | None = None, chart: Path = CHART
) -> dict[str, Any]:
    release: dict[str, Any] = config.install(chart, RELEASE, values or {}, create_namespace=True)
    cluster.wait_for(lambda: exists(cluster, JOBS.format("default")), DEADLINE, "jobs to be served")
    return release


def exists(cluster: LocalCluster, path: str) -> bool:
    try:
        cluster.api.request("GET", path)
    except RequestFailed as failure:
        if failure.code in (404, 429, 503):
            return False
        raise
    return True


def pods(cluster: LocalCluster, namespace: str) -> dict[str, str]:
    """Name -> UID of those that are not being deleted."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in cluster.pods(namespace=namespace)
        if not pod["metadata"].get("deletionTimestamp")
    }


@contextmanager
def operator(cluster: LocalCluster, folder: Path) -> Iterator[Recording]:
    """The operator as the installed Deployment would run it, with everything that it asks recorded."""
    deployment = cluster.api.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{ACCOUNT}")
    spec = deployment["spec"]["template"]["spec"]
    env = {entry["name"]: entry["value"] for entry in spec["containers"][0]["env"] if "value" in entry}
    del env["TIERCHECK_METRICS_ADDRESS"]  # has the pod's address in it
    own = service_account_kubeconfig(
        cluster.kubeconfig, NAMESPACE, spec["serviceAccountName"], folder / "own"
    )
    with recording(own, folder / "recorded") as record:
        process = cluster.start_operator({"KUBECONFIG": str(record.kubeconfig), **env})
        try:
            yield record
        except AssertionError as error:
            # What was waited for in vain is often what was refused.
            for refusal in record.refused[:5]:
                error.add_note(f"refused: {refusal}")
            raise
        finally:
            process.terminate()
            process.wait(30)


# A real API server's audit log would tell the same, but asking for it is not the laptop cluster's business.

_HOP_BY_HOP = {"transfer-encoding", "content-length", "content-encoding", "connection", "host"}
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass
class Recording:
    kubeconfig: Path
    """The same access as the one that was given, through the recorder."""
    used: set[tuple[str, str, str]] = field(default_factory=set)
    """(API group, resource, verb) of everything that was asked."""
    refused: list[str] = field(default_factory=list)
    """What was answered with 401 or 403."""


@contextmanager
def recording(kubeconfig: Path, target: Path) -> Iterator[Recording]:
    """Record what is asked through the kubeconfig that is written to `target`."""
    record = Recording(target)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        try:
            async with _serving(kubeconfig, record):
                started.set_result((asyncio.get_running_loop(), stop))
                await stop.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="recorder", daemon=True)
    thread.start()
    loop, stop = started.result(30)
    try:
        yield record
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@asynccontextmanager
async def _serving(kubeconfig: Path, record: Recording) -> AsyncIterator[None]:
    access = load(kubeconfig)
    async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(None)) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            headers = {
                name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP
            }
            headers["Accept-Encoding"] = "identity"
            async with session.request(
                request.method, access.server + str(request.rel_url), headers=headers,
                data=await request.read() or None,
                ssl=access.tls or False, allow_redirects=False,
            ) as answer:  # fmt: skip
                right = asked_for(request.method, request.path, request.query)
                if right is not None:
                    record.used.add(right)
                if answer.status in (401, 403):
                    record.refused.append(
                        f"{request.method} {request.rel_url}: {(await answer.text())[:300]}"
                    )
                passed = {
                    name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP
                }
                response = web.StreamResponse(status=answer.status, headers=passed)
                # Whoever ends a watch hangs up, at any moment.
                with contextlib.suppress(ConnectionResetError):
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                return response

        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        write_kubeconfig(
            record.kubeconfig, f"http://{host}:{port}", access.headers["Authorization"].split()[1]
        )
        try:
            yield
        finally:
            await runner.cleanup()


def asked_for(method: str, path: str, query: Mapping[str, str]) -> tuple[str, str, str] | None:
    """What RBAC calls this request; None for discovery and health, which every account may ask for."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    if parts[0] not in ("api", "apis") or not rest:
        return None
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    resource, named = "/".join(rest[::2]), len(rest) > 1
    if method == "GET":
        verb = "watch" if query.get("watch") in ("true", "1") else "get" if named else "list"
    else:
        verb = _VERBS[method] if named or method != "DELETE" else "deletecollection"
    return group, resource, verb
