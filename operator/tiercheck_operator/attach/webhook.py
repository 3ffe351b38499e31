"""The mutating webhook's HTTPS server. It allows every pod, whatever happens.

AdmissionReview v1 in, AdmissionReview v1 out. The answer is a JSON patch (RFC 6902) that turns what was sent
into what is wanted.

Not kopf's: that one lives and dies with the watches of one leading process, makes a certificate of its own in
each replica, and wants to write the webhook configuration. This one has no state, so every replica answers,
leader or not.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import logging
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from tiercheck.protocol.plain_json import parse_json
from tiercheck_operator.attach.admission import Admission
from tiercheck_operator.attach.doors import LARGEST, Doors
from tiercheck_operator.attach.trust import Bundle, Trust
from tiercheck_operator.kubernetes.client import ApiFailure


def difference(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """Operations that turn `old` into `new`. Lists are replaced as a whole."""
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
"""Seconds between two looks at certificate and configuration, and the same while they could not be looked at.
"""
_LONGEST_WARNING = 256
_MOST_VALUES = 50_000
"""Of a review, each of which takes up to 200 bytes. A pod has some hundreds."""


class Webhook:
    """Serves once there is a certificate. `start`, then `stop`."""

    def __init__(self, host: str, port: int, trust: Trust, admission: Admission) -> None:
        self._address = host, port
        self._trust, self._admission = trust, admission
        self._shown: Bundle | None = None
        """The certificate that new connections get."""
        self.serving = asyncio.Event()
        """Set once it answers."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._doors: Doors | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_trusted(), name="webhook")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._doors is not None:
            await self._doors.stop()

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

    async def _show(self, bundle: Bundle) -> None:
        """New connections get this certificate; the context takes files only."""
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
            certificate.write_bytes(bundle.certificate)
            key.touch(mode=0o600)
            key.write_bytes(bundle.key)
            self._context.load_cert_chain(certificate, key)
        if self._doors is None:
            doors = Doors(self._context, self._answer)
            await doors.start(*self._address)
            self._doors = doors
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
            # A pod is never refused for a fault of ours: it runs as it would without us.
            log.exception("a pod could not be looked at")
            operations, warning = (
                [],
                "TierCheck does not look after this pod: its operator has a fault; see its log.",
            )
        if operations:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(operations).encode()).decode()
        if warning:
            response["warnings"] = [warning[:_LONGEST_WARNING]]
        answer = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        return web.json_response(answer)
