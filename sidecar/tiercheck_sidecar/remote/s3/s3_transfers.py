"""obstore carries the bytes of artifacts: out of the mapped slot into a bucket, and back into memory.

An upload is an asyncio task: cancelling it ends it at once, wherever it waits, and leaves what has arrived.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tiercheck_sidecar.remote.config import PARALLEL_PARTS
from tiercheck_sidecar.remote.errors import Reason, RemoteClosed, RemoteCorrupt
from tiercheck_sidecar.remote.objects import Arrived, Gate
from tiercheck_sidecar.remote.s3 import s3_errors

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

STALL_SECONDS = 20
"""Without a byte of what is read."""
SEND_SECONDS = 120
"""For a server to take and store a part."""
TRIES = 5
_BACKOFF = (0.2, 5.0)
_ARRIVAL = 512 * 1024
"""Small enough to be still in a core's cache when it is verified."""


class Transfers:
    """Thread-safe. All methods raise RemoteError."""

    def __init__(
        self, config: S3Config, client: ClientConfig, credentials: Any, location: str, closed: threading.Event
    ) -> None:
        """`credentials` are botocore's."""
        self._config, self._client, self._credentials = config, client, _Renewed(credentials)
        self._location, self._closed = location, closed
        self._lock = threading.Lock()
        self._uploads: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()
        # Tries of our own, between which closing is noticed.
        longest, stall = timedelta(days=1), timedelta(seconds=STALL_SECONDS)
        self._receiving = self._store(config, {"timeout": longest, "read_timeout": stall}, retries=0)
        self.send_checksums(True)

    def send_checksums(self, wanted: bool) -> None:
        """Whether what is sent carries a CRC64NVME, which the server compares on arrival."""
        self.checksums = wanted
        config: S3Config = {**self._config, "checksum_algorithm": "CRC64NVME"} if wanted else self._config
        patience = timedelta(seconds=SEND_SECONDS)
        self._sending = self._store(config, {"timeout": patience}, retries=TRIES - 1)

    def send(self, key: str, body: memoryview | bytes) -> None:
        """Store `body` by one request."""

        async def upload() -> None:
            await obstore.put_async(self._sending, key, body, use_multipart=False)

        self._finish(upload(), [])

    def send_parts(self, key: str, source: memoryview, part: int, gate: Gate) -> None:
        """Store `source` in parts. What `gate` finds corrupt, and what the server refuses, is aborted."""
        stopped: list[Exception] = []

        async def upload() -> None:
            mine = asyncio.current_task()
            assert mine is not None

            async def pieces() -> AsyncIterator[memoryview]:
                for begin in range(0, len(source), part):
                    piece = source[begin : begin + part]
                    try:
                        await asyncio.to_thread(gate, begin, piece)
                    except Exception as error:
                        stopped.append(error)
                        if isinstance(error, RemoteCorrupt):
                            raise  # obstore aborts the upload
                        mine.cancel()
                        await asyncio.Event().wait()
                    yield piece

            store, most = self._sending, PARALLEL_PARTS
            await obstore.put_async(store, key, pieces(), chunk_size=part, max_concurrency=most)

        self._finish(upload(), stopped)

    def receive(self, key: str, offset: int, into: memoryview, arrived: Arrived) -> int:
        """As `Objects.read_into`."""
        for number in range(TRIES):
            try:
                return self._receive(key, offset, into, arrived)
            except (BaseError, FileNotFoundError) as error:
                if s3_errors.is_absent(error):
                    return 0
                found = s3_errors.from_obstore(error, self._location)
                passing = found.reason is Reason.UNREACHABLE and found.retriable
                if not passing or number == TRIES - 1:
                    raise found from error
            # Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
            if self._closed.wait(random.uniform(0, min(_BACKOFF[1], _BACKOFF[0] * 2**number))):
                raise RemoteClosed
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End uploads that are under way; their parts stay. `closed` is set already."""
        with self._lock:
            for loop, upload in self._uploads:
                loop.call_soon_threadsafe(upload.cancel)

    def _receive(self, key: str, offset: int, into: memoryview, arrived: Arrived) -> int:
        found = obstore.get(self._receiving, key, options={"range": (offset, offset + len(into))})
        done = 0
        arrived(done)
        for piece in found.stream(_ARRIVAL):
            if self._closed.is_set():
                raise RemoteClosed
            with memoryview(piece) as view:
                end = min(len(into), done + len(view))
                into[done:end] = view[: end - done]
            done = end
            arrived(done)
        return done

    def _finish(self, upload: Coroutine[Any, Any, None], stopped: list[Exception]) -> None:
        """To its end. `stopped` has what its source raised: obstore may report a failed abort instead."""
        try:
            asyncio.run(self._until_closed(upload))
        except (BaseError, OSError, asyncio.CancelledError) as error:
            if stopped:
                raise stopped[0] from None
            if isinstance(error, asyncio.CancelledError):
                raise RemoteClosed from None
            raise s3_errors.from_obstore(error, self._location) from error

    async def _until_closed(self, upload: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(upload)
        mine = asyncio.get_running_loop(), task
        with self._lock:
            self._uploads.add(mine)
        try:
            if self._closed.is_set():
                task.cancel()
            await task
        finally:
            with self._lock:
                self._uploads.discard(mine)

    def _store(self, config: S3Config, client: ClientConfig, retries: int) -> S3Store:
        first, longest = (timedelta(seconds=each) for each in _BACKOFF)
        return S3Store(
            config=config,
            client_options={**self._client, **client},
            retry_config={
                "max_retries": retries,
                "backoff": {"init_backoff": first, "max_backoff": longest},
            },
            credential_provider=self._credentials,
        )


class _Renewed:
    """boto3's credentials, asked for at every request, since boto3 knows when they need renewal."""

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
