"""Uploads the bytes of artifacts with obstore, from the mapped slot into a bucket.

Each upload is an asyncio task: cancelling it ends it at once, wherever it waits, and leaves the parts that
are stored. obstore reports no progress within a part, so a store that accepts none for a while gets a small
request: with an answer it is only slow; without one, the upload fails with an error that names it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tiercheck_sidecar.remote.config import BACKOFF, PARALLEL_PARTS, STALL_SECONDS, TRIES
from tiercheck_sidecar.remote.errors import RemoteClosed, RemoteCorrupt
from tiercheck_sidecar.remote.objects import Gate
from tiercheck_sidecar.remote.s3 import s3_errors

if TYPE_CHECKING:
    from obstore import Attributes
    from obstore.store import ClientConfig, S3Config, S3Credential

SEND_SECONDS = 120
"""Seconds for a responsive server to accept and store a part."""


@dataclass
class _Upload:
    """The state of an upload while it runs."""

    taken: int = 0
    """The number of pieces that obstore requested; after the first few, each means one more stored part."""
    stopped: Exception | None = None
    """The reason why the upload was ended; obstore may report a failed abort instead."""


class Transfers:
    """Uploads objects to a bucket. Thread-safe. All methods raise RemoteError."""

    def __init__(
        self,
        config: S3Config,
        client: ClientConfig,
        credentials: Any,
        location: str,
        closed: threading.Event,
        *,
        storage_class: str | None = None,
    ) -> None:
        self._attributes: Attributes = {"Storage-Class": storage_class} if storage_class else {}
        self._config, self._client, self._credentials = config, client, _CredentialProvider(credentials)
        self._location, self._closed = location, closed
        self._lock = threading.Lock()
        self._running: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()
        self._asking = self._store(config, {"timeout": timedelta(seconds=STALL_SECONDS)}, retries=0)
        self.use_checksum("CRC64NVME")

    def use_checksum(self, algorithm: str) -> None:
        """Sets the checksum that uploads carry and the server compares on arrival; empty: none.
        obstore has no MD5, so that boto3 uploads then."""
        self.checksum = algorithm
        ours: S3Config = {"checksum_algorithm": algorithm} if algorithm not in ("", "MD5") else {}
        config: S3Config = {**self._config, **ours}
        patience = timedelta(seconds=SEND_SECONDS)
        self._sending = self._store(config, {"timeout": patience}, retries=TRIES - 1)

    def send(self, key: str, body: memoryview | bytes) -> None:
        """Stores `body` by one request."""

        async def upload() -> None:
            await obstore.put_async(
                self._sending, key, body, use_multipart=False, attributes=self._attributes
            )

        self._finish(key, upload(), _Upload())

    def send_parts(self, key: str, source: memoryview, part: int, gate: Gate) -> None:
        """Stores `source` in parts; aborts it if `gate` finds it corrupt or the server refuses it."""
        known = _Upload()

        async def upload() -> None:
            mine = asyncio.current_task()
            assert mine is not None

            async def pieces() -> AsyncIterator[memoryview]:
                for begin in range(0, len(source), part):
                    piece = source[begin : begin + part]
                    try:
                        gate(begin, piece)  # this loop runs only the upload and its watch
                    except Exception as error:
                        known.stopped = error
                        if isinstance(error, RemoteCorrupt):
                            raise  # obstore aborts the upload
                        mine.cancel()
                        await asyncio.Event().wait()
                    known.taken += 1
                    yield piece

            store, most, more = self._sending, PARALLEL_PARTS, self._attributes
            await obstore.put_async(
                store, key, pieces(), chunk_size=part, max_concurrency=most, attributes=more
            )

        self._finish(key, upload(), known)

    def close(self) -> None:
        """Ends uploads in progress; stored parts stay. `closed` is set already."""
        with self._lock:
            for loop, task in self._running:
                loop.call_soon_threadsafe(task.cancel)

    def _finish(self, key: str, upload: Coroutine[Any, Any, None], known: _Upload) -> None:
        try:
            self._run(self._run_with_watchdog(key, upload, known))
        except (BaseError, OSError, RemoteClosed) as error:
            if known.stopped is not None:
                raise known.stopped from None
            if isinstance(error, RemoteClosed):
                raise
            raise s3_errors.from_obstore(error, self._location) from error

    async def _run_with_watchdog(self, key: str, upload: Coroutine[Any, Any, None], known: _Upload) -> None:
        """Runs an upload to its end; ends it, keeping its parts, if the store neither takes nor answers."""
        task, before = asyncio.ensure_future(upload), 0
        try:
            while not (await asyncio.wait((task,), timeout=STALL_SECONDS))[0]:
                if known.taken == before and not await self._answers(key):
                    raise s3_errors.unresponsive(self._location, 2 * STALL_SECONDS)
                before = known.taken
            await task
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _answers(self, key: str) -> bool:
        try:
            await obstore.head_async(self._asking, key)
        except (BaseError, OSError) as error:
            return not s3_errors.is_timeout(error)
        return True

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result of `work`. Raises RemoteClosed, and what `work` raises."""
        try:
            return asyncio.run(self._until_closed(work))
        except asyncio.CancelledError:
            raise RemoteClosed from None

    async def _until_closed(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(work)
        mine = asyncio.get_running_loop(), task
        with self._lock:
            self._running.add(mine)
        try:
            if self._closed.is_set():
                task.cancel()
            return await task
        finally:
            with self._lock:
                self._running.discard(mine)

    def _store(self, config: S3Config, client: ClientConfig, retries: int) -> S3Store:
        first, longest = (timedelta(seconds=each) for each in BACKOFF)
        return S3Store(
            config=config,
            client_options={**self._client, **client},
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=SEND_SECONDS),
                "backoff": {"init_backoff": first, "max_backoff": longest},
            },
            credential_provider=self._credentials,
        )


class _CredentialProvider:
    """Supplies boto3's credentials at every request, since boto3 decides when they need renewal."""

    refresh_threshold = timedelta()

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> S3Credential:
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC),
        }
