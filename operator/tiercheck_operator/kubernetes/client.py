"""Calls the API server with plain dictionaries, off the event loop.

Names come from objects that anybody may write, so none of
them becomes more than the one segment of a path that it stands for.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec.json import Decoder

from tiercheck.protocol import names
from tiercheck_operator.kubernetes.api_server import TOO_LARGE, ApiFailure, ApiServer, ServerAccess
from tiercheck_operator.kubernetes.object_reader import MOST_ANSWER, most_of, read_object, without_depth
from tiercheck_operator.model.parsing import UNREADABLE


def fill(path: str, **names: str) -> str:
    """The path with its segments filled in. Raises ValueError for what is no name."""
    for key, name in names.items():
        if name in ("", ".", ".."):  # which clients resolve, quoted or not
            raise ValueError(f"{name!r} is no {key}")
    return path.format(**{key: quote(name, safe="") for key, name in names.items()})


JOBS = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{{namespace}}/{names.PLURAL}"
CORE = "/api/v1/namespaces/{namespace}"
_NAMESPACE = re.compile(r"/namespaces/([^/?]+)")

METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

_THREADS = 8
"""Calls at once, of all jobs together; the others wait their turn, first come, first served."""
_OF_ONE_NAMESPACE, _TURNS = 4, 1024
"""Calls of a namespace that have a thread or wait for one, so that they do not wait for all of another's; and
how many such counts there are, which few namespaces share."""
_LISTED_AT_ONCE = 200
"""Objects of one page: the metadata of each takes some KiB."""
_BUSY_TRIES = 4
"""Times that one call is sent if the server is too busy for it."""
BACKOFF = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds until the next try, after the first failure and later ones."""


class NameTaken(ApiFailure):
    """Another object, which is not this job's, has the name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(409, message)
        self.name = name


class NotLeading(ApiFailure):
    """Nothing was sent: another replica may lead by now."""

    def __init__(self) -> None:
        super().__init__(0, "this replica does not lead")


class Kube:
    """One connection pool to the API server.

    `may_write` is asked right before anything but a GET is sent, in the sending thread. When the server says
    that it is busy, all calls hold back for as long as it wants, and the call is sent again.
    """

    def __init__(
        self,
        access: ServerAccess,
        timeout: float = 15.0,
        *,
        may_write: Callable[[], bool] = lambda: True,
        called: Callable[[str, int, float], None] = lambda verb, status, seconds: None,
    ) -> None:
        self._server = ApiServer(access, timeout, "tiercheck-operator")
        self._may_write, self._called = may_write, called
        self._turns = [asyncio.Semaphore(_OF_ONE_NAMESPACE) for _ in range(_TURNS)]
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kube")
        self._hold_until = 0.0
        """Monotonic time."""
        self._lock = threading.Lock()
        self._writing = 0
        self._idle = threading.Event()
        self._idle.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def may_write(self) -> bool:
        """Whether this replica may act at this very moment."""
        return self._may_write()

    async def drain(self, seconds: float) -> bool:
        """Wait until nothing that was sent to be written is still on its way; False: that took too long."""
        return await asyncio.get_running_loop().run_in_executor(None, self._idle.wait, seconds)

    async def get(self, path: str, **names: str) -> dict[str, Any] | None:
        """None if there is no such object. Raises ApiFailure, also for one that is too large to be read."""
        try:
            found = await self._call("GET", _filled(path, names))
        except ApiFailure as error:
            if error.not_found:
                return None
            raise
        if UNREADABLE in found:
            raise ApiFailure(TOO_LARGE, f"{found.get('kind')} {names.get('name')}: {found[UNREADABLE]}")
        return found

    async def create(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        """Raises ApiFailure; `conflict` if it exists already."""
        return await self._call("POST", _filled(path, names), body)

    async def replace(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        """Raises ApiFailure."""
        return await self._call("PUT", _filled(path, names), body)

    async def merge(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        """JSON merge patch; a resourceVersion in `body` is a precondition. Raises ApiFailure."""
        return await self._call("PATCH", _filled(path, names), body)

    async def delete(self, path: str, options: Mapping[str, Any], **names: str) -> bool:
        """With DeleteOptions. Whether there was such an object; it may be gone already. Raises ApiFailure."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        try:
            await self._call("DELETE", _filled(path, names), body)
        except ApiFailure as error:
            if not error.not_found:
                raise
            return False
        return True

    async def list_versions(self, path: str, query: str = "", page: int = _LISTED_AT_ONCE) -> dict[str, int]:
        """UID to resourceVersion of every object, as of one moment, from the storage. Raises ApiFailure."""
        pages = self.list_metadata(path, query, page)
        return {each.uid: version_of(each.version) async for page in pages for each in page}

    async def list_metadata(
        self, path: str, query: str = "", page: int = _LISTED_AT_ONCE
    ) -> AsyncIterator[Sequence[ObjectMetadata]]:
        """Page by page, with fewer objects in each where some are large. Raises ApiFailure."""
        more = ""
        while True:
            asked = (query, f"limit={page}", f"continue={more}" if more else "")
            try:
                address = f"{path}?{'&'.join(filter(None, asked))}"
                found = await self._call("GET", address, accept=METADATA_ONLY)
            except ApiFailure as error:
                if error.status != TOO_LARGE or page == 1:
                    raise
                page = max(1, page // 8)
                continue
            yield found["items"]
            more = found["more"]
            if not more:
                return

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, accept: str = "application/json"
    ) -> dict[str, Any]:
        loop, named = asyncio.get_running_loop(), _NAMESPACE.search(path)
        async with self._turns[hash(named[1]) % _TURNS] if named else contextlib.nullcontext():
            for left in reversed(range(_BUSY_TRIES)):
                await asyncio.sleep(max(0.0, self._hold_until - time.monotonic()))
                try:
                    return await loop.run_in_executor(self._threads, self.call, method, path, body, accept)
                except ApiFailure as error:
                    if not error.busy:
                        raise
                    hold = 1.0 if error.retry_after is None else error.retry_after
                    self._hold_until = max(self._hold_until, time.monotonic() + hold)
                    if not left:
                        raise
        raise AssertionError("unreachable")

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, accept: str = "application/json"
    ) -> dict[str, Any]:
        """One request, in the calling thread. Raises ApiFailure."""
        with self._about_to_write() if method != "GET" else contextlib.nullcontext():
            began, status = time.monotonic(), 200
            try:
                return self._send(method, path, body, accept)
            except ApiFailure as error:
                status = error.status
                raise
            finally:
                self._called(method, status, time.monotonic() - began)

    @contextlib.contextmanager
    def _about_to_write(self) -> Iterator[None]:
        """Noted before it is asked whether we may, so that `drain` waits for it. Raises NotLeading."""
        with self._lock:
            self._writing += 1
            self._idle.clear()
        try:
            if not self._may_write():
                raise NotLeading
            yield
        finally:
            with self._lock:
                self._writing -= 1
                if not self._writing:
                    self._idle.set()

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None, accept: str) -> dict[str, Any]:
        data = self._server.read(method, path, body, accept=accept, most=MOST_ANSWER)
        try:
            if accept == METADATA_ONLY:
                # Nothing else is made of it: who wrote which field of an object is as deep as the object.
                page = _PAGE.decode(without_depth(data))
                return {"items": [each.metadata for each in page.items or ()], "more": page.metadata.more}
            return read_object(data, most_of(path)) if data else {}
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ApiFailure(0, f"the API server's answer cannot be read: {error}") from error


async def evict(kube: Kube, options: Mapping[str, Any], **names: str) -> None:
    """A pod, with DeleteOptions. Raises ApiFailure; `considered` if a disruption budget keeps it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names, "deleteOptions": options}
    await kube.create(CORE + "/pods/{name}/eviction", body, **names)


class ObjectMetadata(msgspec.Struct):
    """What lists say of each object."""

    uid: str
    version: str = msgspec.field(default="", name="resourceVersion")
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    owners: list[dict[str, Any]] = msgspec.field(default_factory=list, name="ownerReferences")
    deleted: str = msgspec.field(default="", name="deletionTimestamp")


class _Entry(msgspec.Struct):
    metadata: ObjectMetadata


class _Rest(msgspec.Struct):
    more: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _Rest = msgspec.field(default_factory=_Rest)
    items: list[_Entry] | None = None


_PAGE = Decoder(_Page)


def version_of(text: object) -> int:
    """Of a resourceVersion. They may be compared: integers in every API server (KEP-5504)."""
    return int(str(text)) if str(text or "").isdigit() else 0


def _filled(path: str, names: Mapping[str, str]) -> str:
    try:
        return fill(path, **names)
    except ValueError as error:
        raise ApiFailure(400, str(error)) from error
