"""An S3 server that can have a bad time, and tells the history what it stored and what it deleted."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.sidecar.remote.s3.faulty_proxy import BUSY, CUT, Fault, Proxy, Seen, proxying
from tiercheck_local.demo.job import ObjectStore

BUCKET = "checkpoints"
_SLOW = 1.5
_KEY = re.compile(rb"<Key>([^<]+)</Key>")

Record = Callable[..., None]


class Store:
    """`mood`: "", "store down", "store trouble" or "store slow"."""

    def __init__(self, proxy: Proxy, record: Record, seed: int) -> None:
        self.mood = ""
        self._record, self._rng = record, random.Random(f"store {seed}")
        self.endpoint = proxy.url
        proxy.rule, proxy.answered = self._rule, self._answered
        self._proxy = proxy

    def _rule(self, seen: Seen) -> Fault | None:
        if self.mood == "store down":
            return BUSY
        if self.mood == "store trouble" and self._rng.random() < 0.4:
            return BUSY if self._rng.random() < 0.7 else CUT
        if self.mood == "store slow":
            time.sleep(_SLOW * self._rng.random())
        return None

    def _answered(self, seen: Seen, body: bytes, status: int) -> None:
        self._proxy.seen.clear()
        if status >= 300:
            return
        path, query = urlsplit(seen.path).path, urlsplit(seen.path).query
        if seen.method == "PUT" and not query:
            body = _decoded(seen, body)
            key = _within_job(path)
            self._record("put", key=key, bytes=len(body), body=body if key.startswith("manifests/") else None)
        elif seen.method == "DELETE" and "uploadId" not in query:
            self._record("removed", key=_within_job(path))
        elif seen.method == "POST" and query.startswith("delete"):
            for key in _KEY.findall(body):
                self._record("removed", key=_within_job(f"/{BUCKET}/{key.decode()}"))


def _within_job(path: str) -> str:
    """/bucket/prefix/namespace/job/REST"""
    return "/".join(unquote(path).split("/")[5:])


def _decoded(seen: Seen, body: bytes) -> bytes:
    """What is stored of a body that came in signed pieces."""
    if "x-amz-decoded-content-length" not in seen.headers:
        return body
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        if not length:
            break
        whole, body = whole + rest[:length], rest[length + 2 :]
    return whole


@contextlib.contextmanager
def serving(log: Path, record: Record, seed: int) -> Iterator[Store]:
    with ObjectStore(log, BUCKET) as server, proxying(server.endpoint) as proxy:
        yield Store(proxy, record, seed)
