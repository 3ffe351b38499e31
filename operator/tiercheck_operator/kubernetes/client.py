"""Calls the API server for the operator: writes only while it leads, and bounds the answers' size."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec.json import Decoder

from tiercheck_operator.kubernetes import object_reader
from tiercheck_operator.kubernetes.api_server import (
    TOO_LARGE,
    ApiClient,
    ApiFailure,
    ApiResource,
    ApiServer,
    Object,
    ServerAccess,
)
from tiercheck_operator.model.parsing import UNREADABLE

R = TypeVar("R")

METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

_THREADS = 8
"""The number of concurrent calls of all jobs together; further calls are queued in order."""
_OF_ONE_NAMESPACE, _TURNS = 4, 1024
"""The number of concurrent calls per namespace, and the number of semaphores that bound them.
So one namespace cannot occupy all threads. Few namespaces share a semaphore, by hash."""
_LISTED_AT_ONCE = 200
"""The number of objects per page: the metadata of each takes some KiB."""
_BUSY_TRIES = 4
"""The number of times that a call is sent if the server is too busy."""
_BACKOFF = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds until the next try, by the number of failures so far."""


def backoff(failures: int) -> float:
    """Returns the seconds until the next try after so many failures in a row, at least one."""
    return _BACKOFF[min(failures, len(_BACKOFF)) - 1]


class NameTaken(ApiFailure):
    """Raised if an object that is not this job's has the name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(409, message)
        self.name = name


class NotLeading(ApiFailure):
    """Raised instead of sending a write, because another replica may lead by now."""

    def __init__(self) -> None:
        super().__init__(0, "this replica does not lead")


class FencedServer(ApiServer):
    """Checks `may_write` in the sending thread before each write, and bounds the memory of each object."""

    def __init__(
        self,
        access: ServerAccess,
        timeout: float = 15.0,
        *,
        may_write: Callable[[], bool] = lambda: True,
        called: Callable[[str, int, float], None] = lambda verb, status, seconds: None,
    ) -> None:
        super().__init__(access, timeout, "tiercheck-operator")
        self.may_write, self._called = may_write, called
        self._lock = threading.Lock()
        self._writing = 0
        self.idle = threading.Event()
        """Set while no write is in flight."""
        self.idle.set()

    def get(self, resource: ApiResource, namespace: str | None, name: str) -> Object:
        """Returns an object. Raises ApiFailure also if it is too large to be read."""
        found = super().get(resource, namespace, name)
        if UNREADABLE in found:
            raise ApiFailure(TOO_LARGE, f"{found.get('kind')} {name}: {found[UNREADABLE]}")
        return found

    def _decode(self, path: str, data: bytes) -> Object:
        return object_reader.read_object(data, object_reader.max_object_memory(path)) if data else {}

    def list_page(self, path: str) -> Page:
        """Returns a page of objects' metadata."""
        data = self.read("GET", path, accept=METADATA_ONLY)
        try:
            # Cut first, because managedFields are as deep as the object.
            return _PAGE.decode(object_reader.cut_too_deep(data))
        except (ValueError, msgspec.MsgspecError) as error:
            raise self._unreadable(error) from error

    def read(self, method: str, path: str, body: object = None, **options: Any) -> bytes:
        with self._about_to_write() if method != "GET" else contextlib.nullcontext():
            began, status = time.monotonic(), 200
            try:
                return super().read(method, path, body, most=object_reader.MOST_ANSWER, **options)
            except ApiFailure as error:
                status = error.status
                raise
            finally:
                self._called(method, status, time.monotonic() - began)

    @contextlib.contextmanager
    def _about_to_write(self) -> Iterator[None]:
        """Counts a write before it checks `may_write`, so that `drain` waits for it. Raises NotLeading."""
        with self._lock:
            self._writing += 1
            self.idle.clear()
        try:
            if not self.may_write():
                raise NotLeading
            yield
        finally:
            with self._lock:
                self._writing -= 1
                if not self._writing:
                    self.idle.set()


class Kube(ApiClient):
    """The asynchronous client of the operator. If the server is busy, all calls pause as it requests."""

    server: FencedServer

    def __init__(self, server: FencedServer) -> None:
        super().__init__(server, _THREADS)
        self._turns = [asyncio.Semaphore(_OF_ONE_NAMESPACE) for _ in range(_TURNS)]
        self._hold_until = 0.0
        """Monotonic time until which calls pause."""

    @property
    def may_write(self) -> bool:
        """Returns whether this replica leads at this moment and may write."""
        return self.server.may_write()

    async def drain(self, seconds: float) -> bool:
        """Waits until no write is in flight. Returns False if that took longer than `seconds`."""
        return await asyncio.get_running_loop().run_in_executor(None, self.server.idle.wait, seconds)

    async def list_versions(self, path: str, query: str = "", page: int = _LISTED_AT_ONCE) -> ListedState:
        """Returns a listing from one consistent read of the storage. Raises ApiFailure."""
        versions, objects = set[int](), dict[str, int]()
        async for found in self.list_pages(path, query, page):
            versions.add(version_of(found.metadata.version))
            objects |= {each.uid: version_of(each.version) for each in found.objects}
        return ListedState(min(versions), objects)

    async def list_pages(
        self, path: str, query: str = "", page: int = _LISTED_AT_ONCE
    ) -> AsyncIterator[Page]:
        """Yields pages of metadata, with fewer objects in each if some are large. Raises ApiFailure."""
        more = ""
        while True:
            asked = (query, f"limit={page}", f"continue={more}" if more else "")
            try:
                address = f"{path}?{'&'.join(filter(None, asked))}"
                found = await self.run(functools.partial(self.server.list_page, address))
            except ApiFailure as error:
                if error.status != TOO_LARGE or page == 1:
                    raise
                page = max(1, page // 8)
                continue
            yield found
            more = found.metadata.more
            if not more:
                return

    async def run(self, call: functools.partial[R]) -> R:
        """Runs a call within its namespace's limit, and repeats it while the server is busy."""
        # The first string is the namespace, or the path of a list. Cluster-scoped objects have none.
        named = next((each for each in call.args[:3] if isinstance(each, str)), None)
        async with self._turns[hash(named) % _TURNS] if named else contextlib.nullcontext():
            for left in reversed(range(_BUSY_TRIES)):
                await asyncio.sleep(max(0.0, self._hold_until - time.monotonic()))
                try:
                    return await super().run(call)
                except ApiFailure as error:
                    if not error.busy:
                        raise
                    hold = 1.0 if error.retry_after is None else error.retry_after
                    self._hold_until = max(self._hold_until, time.monotonic() + hold)
                    if not left:
                        raise
        raise AssertionError("unreachable")


class ObjectMetadata(msgspec.Struct):
    """The metadata of an object in a list."""

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


class _ListMetadata(msgspec.Struct):
    more: str = msgspec.field(default="", name="continue")
    version: str = msgspec.field(default="", name="resourceVersion")


class Page(msgspec.Struct):
    """A page of a list."""

    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)
    items: list[_Entry] | None = None

    @property
    def objects(self) -> Sequence[ObjectMetadata]:
        return [each.metadata for each in self.items or ()]


_PAGE = Decoder(Page)


@dataclass(frozen=True)
class ListedState:
    """The objects of a kind in one state of the storage."""

    version: int
    """The state's resourceVersion; 0: unknown."""
    objects: Mapping[str, int]
    """UID to resourceVersion."""


def version_of(text: object) -> int:
    """Returns a resourceVersion as an integer. They are comparable in every API server (KEP-5504)."""
    return int(str(text)) if str(text or "").isdigit() else 0
