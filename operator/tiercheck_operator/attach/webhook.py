"""Serves the mutating webhook, which attaches pods, and allows every pod even after errors.

Request and response are AdmissionReview v1. The response has a JSON patch (RFC 6902) to the attached pod.

kopf's webhook server is not used: it depends on the watches of one leading process, makes a certificate of
its own in each replica, and has to write the webhook configuration. This one has no state, so every replica
answers, leader or not.

Callers of a webhook are not authenticated. So connections are limited, in total and by address, from before
their TLS handshake; each request must arrive within seconds; and only few large ones are held in memory at a
time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import logging
import socket
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from tiercheck.connections import ConnectionAcceptor
from tiercheck.protocol import names
from tiercheck.protocol.plain_json import parse_json
from tiercheck.redaction import redacted
from tiercheck_operator.attach import injection
from tiercheck_operator.attach.owners import Owner, Unattachable, find_owner, find_worker_identity
from tiercheck_operator.attach.trust import CertificateManager
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes.api_server import JOBS, ApiFailure, ApiResource
from tiercheck_operator.kubernetes.certificates import KeyPair
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.kubernetes.owned_objects import ClusterIdentity

# Admission only reads from the API server.

POLICIES = ApiResource(JOBS.api_version, names.POLICY_PLURAL)
_REMEMBERED = 5.0
"""Seconds that an answer of the API server is cached: a workload's pods are created in one burst."""
_REVIEW_PATIENCE = 4.0
"""Seconds for all reads for a pod; less than the webhook's timeout, so that the answer has the reason."""


class Admission:
    """Decides about pods at admission; `admit` is its only method for callers."""

    def __init__(self, kube: Kube, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._config, self._clock = kube, config, clock
        self._cluster = ClusterIdentity(kube)
        self._known: dict[tuple[ApiResource, str, str], tuple[float, Mapping[str, Any] | None]] = {}

    async def admit(self, namespace: str, pod: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """Returns the pod to use, and a warning if it could not be attached; accepts malformed pods."""
        policy = ((pod.get("metadata") or {}).get("labels") or {}).get(names.LABEL_INJECT)
        if not policy:
            return pod, ""
        try:
            if injection.is_injected(pod):
                return injection.with_labels(pod), ""
            async with asyncio.timeout(_REVIEW_PATIENCE):
                return await self._attached(namespace, pod, policy), ""
        except Unattachable as error:
            why = str(error)
        except TimeoutError:
            why = "the API server did not answer in time"
        except ApiFailure as error:
            why = f"what is needed could not be read: {error}"
        sentence = redacted(f"TierCheck does not look after this pod: {why}.")
        log.warning("%s/%s: %s", namespace, _named(pod), sentence)
        return injection.mark_refused(pod, sentence), sentence

    async def _attached(self, namespace: str, pod: Mapping[str, Any], policy: str) -> dict[str, Any]:
        owner = find_owner(pod)
        raw_owner = await self._read(owner.resource(namespace), namespace, owner.name)
        if raw_owner is None:
            raise Unattachable(f"there is no {owner.kind} {owner.name}")
        seat = find_worker_identity(pod, owner, raw_owner)
        job = await self._job(namespace, owner)
        if job is None:
            found = await self._policy(namespace, policy)
            if found is None:
                raise Unattachable(f"there is no TierCheckPolicy {policy} in namespace {namespace}")
            spec = found.get("spec") or {}
            attachment = injection.attachment_of(pod, owner, seat, policy, spec.get("procsPerWorker"))
            job = injection.attached_job(namespace, attachment, spec)
        else:
            # The job defines them: what its pods share must not depend on when a pod is created.
            attach = job["spec"]["attach"]
            procs, workers = int(job["spec"]["procsPerWorker"]), int(job["spec"]["workers"])
            attachment = injection.Attachment(
                owner, attach.get("policy") or policy, attach["container"], workers, procs
            )
        remote = (job["spec"].get("tiers") or {}).get("remote") is not None
        cluster = await self._cluster.uid() if remote else ""
        return injection.inject(pod, attachment, seat, job, self._config, cluster=cluster)

    async def _job(self, namespace: str, owner: Owner) -> Mapping[str, Any] | None:
        """Returns the owner's job; None if there is none, or only an earlier owner's of the same name."""
        found = await self._read(JOBS, namespace, injection.job_name(owner))
        return found if found is not None and injection.is_job_of(owner, found) else None

    async def _policy(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        try:
            POLICIES.path(namespace, name)
        except ApiFailure as error:
            why = f"the label {names.LABEL_INJECT} names no TierCheckPolicy: {error.message}"
            raise Unattachable(why) from error
        return await self._read(POLICIES, namespace, name)

    async def _read(self, *place: *tuple[ApiResource, str, str]) -> Mapping[str, Any] | None:
        now = self._clock()
        known = self._known.get(place)
        if known is not None and known[0] > now and known[1] is not None:
            return known[1]
        self._known = {key: entry for key, entry in self._known.items() if entry[0] > now}
        found = await self._kube.find(*place)
        self._known[place] = (now + _REMEMBERED, found)
        return found


def _named(pod: Mapping[str, Any]) -> str:
    metadata = pod.get("metadata") or {}
    return str(metadata.get("name") or metadata.get("generateName") or "?")


PATIENCE = 10.0
"""Seconds each for the TLS handshake, the headers and the body, and for an idle connection."""
LARGEST = 3 * 2**20
"""Bytes of a body: twice the API server's limit for an object."""
_SMALL = 128 * 2**10
"""Bytes of a body up to which many are held at once. Decoded JSON may take thirty times the memory."""
_SMALL_AT_ONCE, _LARGE_AT_ONCE = 64, 2
_CONNECTIONS, _OF_ONE_ADDRESS = 256, 128
"""The limits of connections, in total and per address.
An API server may use one address only, and opens a connection for each concurrent review."""

Handler = Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]


class WebhookListener(ConnectionAcceptor[web.ServerRunner]):
    """Accepts a bounded number of connections, and passes each POST with its whole body to `handler`."""

    def __init__(self, context: ssl.SSLContext, handler: Handler, patience: float = PATIENCE) -> None:
        self._context, self._handler, self._patience = context, handler, patience
        self._small, self._large = asyncio.Semaphore(_SMALL_AT_ONCE), asyncio.Semaphore(_LARGE_AT_ONCE)
        runner = web.ServerRunner(
            web.Server(
                self._answer,
                access_log=None,
                keepalive_timeout=patience,
                lingering_time=0.0,
                auto_decompress=False,
            ),
            shutdown_timeout=5.0,
        )
        super().__init__(runner, self._serve_connection)
        self._arriving: Counter[str] = Counter()
        """The number of connections in their TLS handshake, by address."""

    def _connection_counts(self) -> Counter[str]:
        """Returns the number of connections by address."""
        server = self._runner.server
        peers = [guest.peername for guest in server.connections] if server is not None else []
        return self._arriving + Counter(str(peer[0]) for peer in peers if peer)

    async def _serve_connection(self, connection: socket.socket, address: str) -> None:
        guests = self._connection_counts()
        if guests.total() >= _CONNECTIONS or guests[address] >= _OF_ONE_ADDRESS:
            connection.close()
            return
        self._arriving[address] += 1
        server, seconds = self._runner.server, self._patience
        assert server is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                server,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
        except OSError:  # ssl.SSLError and TimeoutError are some
            connection.close()
        finally:
            self._arriving[address] -= 1

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._patience):
                    body = await self._body(request, stack)
            except TimeoutError:  # the caller is slow, or other requests occupy the memory
                return _closing(503)
            except ValueError:
                return _closing(413)
            return await self._handler(request, body)

    async def _body(self, request: web.BaseRequest, stack: contextlib.AsyncExitStack) -> bytes:
        """Reads a body and holds a memory slot until `stack` closes. Raises ValueError if it is too large."""
        if (request.content_length or 0) > LARGEST:
            raise ValueError
        parts, size, large = [], 0, False
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > LARGEST:
                raise ValueError
            if size > _SMALL and not large:
                large = True
                await stack.enter_async_context(self._large)
        if not large:
            await stack.enter_async_context(self._small)
        return b"".join(parts)


def _closing(status: int) -> web.Response:
    response = web.Response(status=status)
    response.force_close()
    return response


def difference(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """Returns the operations that turn `old` into `new`. Lists are replaced as a whole."""
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        return list(_members(old, new, path))
    return [{"op": "replace", "path": path, "value": new}]


def _members(old: dict[str, Any], new: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    for key in old:
        if key not in new:
            yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in new.items():
        at = f"{path}/{_escaped(key)}"
        if key not in old:
            yield {"op": "add", "path": at, "value": value}
        else:
            yield from difference(old[key], value, at)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


log = logging.getLogger(__name__)

PATH = "/mutate-pods"
_LOOK_EVERY, _RETRY = 60.0, 2.0
"""Seconds between two checks of certificate and configuration, and after a failed check."""
_LONGEST_WARNING = 256
_MOST_VALUES = 50_000
"""The number of JSON values of a review, each of up to 200 bytes of memory. A pod has some hundreds."""


class Webhook:
    """Serves the webhook once there is a certificate. Call `start`, then `stop`."""

    def __init__(self, host: str, port: int, trust: CertificateManager, admission: Admission) -> None:
        self._address = host, port
        self._trust, self._admission = trust, admission
        self._shown: KeyPair | None = None
        """The certificate for new connections; None: not serving yet."""
        self.serving = asyncio.Event()
        """Set once the webhook answers."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._webhook_listener: WebhookListener | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_trusted(), name="webhook")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._webhook_listener is not None:
            await self._webhook_listener.stop()

    async def _keep_trusted(self) -> None:
        while True:
            pause = _LOOK_EVERY
            try:
                bundle, announced = await self._trust.establish(datetime.datetime.now(datetime.UTC))
                if self._shown is None or (announced and bundle != self._shown):
                    await self._show(bundle)
            except ApiFailure as error:
                level = logging.DEBUG if error.conflict else logging.WARNING
                log.log(level, "the webhook's certificate could not be looked after: %s", error)
                pause = _RETRY
            await asyncio.sleep(pause)

    async def _show(self, bundle: KeyPair) -> None:
        """Uses this certificate for new connections. The context reads only files."""
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
            certificate.write_bytes(bundle.certificate)
            key.touch(mode=0o600)
            key.write_bytes(bundle.key)
            self._context.load_cert_chain(certificate, key)
        if self._webhook_listener is None:
            doors = WebhookListener(self._context, self._answer)
            await doors.start(*self._address)
            self._webhook_listener = doors
            log.info("the webhook answers at %s:%s", *self._address)
        self._shown = bundle
        self.serving.set()

    async def _answer(self, request: web.BaseRequest, body: bytes) -> web.Response:
        if request.path != PATH:
            return web.Response(status=404)
        try:
            review = parse_json(body, LARGEST, _MOST_VALUES)
            asked: Mapping[str, Any] = review["request"]
            uid = str(asked["uid"])
        except (ValueError, KeyError, TypeError):
            return web.Response(status=400, text="not an AdmissionReview\n")
        response: dict[str, Any] = {"uid": uid, "allowed": True}
        try:
            pod = asked.get("object") or {}
            wanted, warning = await self._admission.admit(str(asked.get("namespace") or ""), pod)
            operations = difference(pod, wanted)
        except Exception:
            # An error of the operator never rejects a pod: it runs as it would without TierCheck.
            log.exception("a pod could not be looked at")
            operations = []
            warning = "TierCheck does not look after this pod: its operator has a fault; see its log."
        if operations:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(operations).encode()).decode()
        if warning:
            response["warnings"] = [warning[:_LONGEST_WARNING]]
        answer = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        return web.json_response(answer)
