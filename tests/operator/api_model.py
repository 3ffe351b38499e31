"""Plays an API server to the operator's own client: objects by path, versions, refusals."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.json import Decoder

from tiercheck_local.apiserver.http.requests import merge
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.kubernetes.client import FencedServer, Kube, Page

Object = dict[str, Any]
R = TypeVar("R")


@dataclass(frozen=True)
class Call:
    method: str
    """HTTP's, or EVICT."""
    path: str
    """Of the object, also of one that is created or evicted."""
    query: str
    body: Object

    @property
    def name(self) -> str:
        return self.path.removesuffix("/status").rpartition("/")[2]


class AnsweringServer(FencedServer):
    """Every request is `answer`'s, in the thread that asks."""

    def __init__(self, answer: Callable[[str, str, Any], Object]) -> None:
        self.answer, self.may_write, self._known = answer, lambda: True, {}

    def request(self, method: str, path: str, body: object = None) -> Object:
        return self.answer(method, path, body)

    def list_page(self, path: str) -> Page:
        return Decoder(Page).decode(json.dumps(self.answer("GET", path, None)))


class ApiModel(Kube):
    """`refused`: by method, what is answered instead."""

    def __init__(self, objects: Mapping[str, Object] | None = None, **refused: ApiFailure) -> None:
        self.server = AnsweringServer(self.call)
        self.objects = dict(objects or {})
        self.refused = refused
        self.calls: list[Call] = []
        self.written = asyncio.Event()
        """Set when anything but a GET comes."""
        self.version = 1

    def did(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    def names(self, method: str) -> list[str]:
        return [call.name for call in self.did(method)]

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Method and name of each call."""
        return [(call.method, call.name) for call in self.calls]

    @property
    def events(self) -> list[Object]:
        """What was told by new Events."""
        return [call.body for call in self.did("POST") if "/events/" in call.path]

    def put(self, path: str, body: Mapping[str, Any]) -> Object:
        self.version += 1
        made = copy.deepcopy(dict(body))
        made["metadata"] = {**made["metadata"], "resourceVersion": str(self.version)}
        self.objects[path] = made
        return copy.deepcopy(made)

    async def run(self, call: Callable[[], R]) -> R:
        return call()

    def call(self, method: str, path: str, body: Any = None) -> Object:
        path, _, query = path.partition("?")
        sent: Object = dict(body or {})
        metadata: Object = sent.get("metadata") or {}
        if path.endswith("/eviction"):
            method, path = "EVICT", path.removesuffix("/eviction")
        elif method == "POST":
            path += "/" + (metadata.get("name") or f"{metadata['generateName']}{len(self.calls)}")
        self.calls.append(Call(method, path, query, sent))
        if method != "GET":
            self.written.set()
        if method in self.refused:
            raise self.refused[method]
        return self._answer(method, path.removesuffix("/status"), sent)

    def _answer(self, method: str, path: str, sent: Object) -> Object:
        known, given = self.objects.get(path), sent.get("metadata") or {}
        if method in ("POST", "EVICT"):
            if method == "POST" and known is not None:
                raise ApiFailure(409, "exists")
            return self.put(path, sent) if method == "POST" else {}
        if known is None:
            raise ApiFailure(404, "not found")
        if method == "GET":
            return copy.deepcopy(known)
        if method == "DELETE":
            return self.objects.pop(path)
        must = {"resourceVersion"} if method == "PUT" else {"resourceVersion", "uid"} & set(given)
        if any(given.get(key) != known["metadata"].get(key) for key in must):
            raise ApiFailure(409, "conflict")
        return self.put(path, sent if method == "PUT" else merge(known, sent))
