"""Reads a range of an object into existing memory; the kernel's copy is the only one.

The connections are those of boto3's client, so that proxies, authorities and TLS are as for every other call.
If its connection breaks, a range continues at the byte where it broke.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError

from tiercheck_sidecar.remote.config import BACKOFF, STALL_SECONDS, TRIES
from tiercheck_sidecar.remote.errors import Reason, RemoteClosed, RemoteError
from tiercheck_sidecar.remote.objects import Arrived
from tiercheck_sidecar.remote.s3 import s3_errors

if TYPE_CHECKING:
    from obstore.store import S3Config

REQUEST_PAYER = "x-amz-request-payer"
STALLS = 2
"""The number of tries without a byte for STALL_SECONDS that end a read; TRIES counts all failures.

PROGRESS bytes in between reset both counts."""
PROGRESS = 8 * 1024 * 1024
_PIECE = 512 * 1024
"""Bytes that are read at once: still in a core's cache when they are verified."""


class RangeReader:
    """Reads ranges of the bucket's objects. Thread-safe."""

    def __init__(
        self, session: Any, config: S3Config, credentials: Any, location: str, closed: threading.Event
    ) -> None:
        """Takes botocore's HTTP session, obstore's `config`, and botocore's self-renewing credentials."""
        self._url, self._region = config["aws_endpoint_url_s3"], config["region"]
        self._headers = {REQUEST_PAYER: "requester"} if config.get("request_payer") else {}
        self._session, self._credentials = session, credentials
        self._location, self._closed = location, closed
        self._lock = threading.Lock()
        self._bodies: set[_Body] = set()

    def read_into(self, key: str, offset: int, into: memoryview, arrived: Arrived) -> int:
        body: _Body | None = None
        came = since = failed = silent = 0
        arrived(came)
        try:
            while came < len(into):
                try:
                    body = body or self._open(key, offset + came, len(into) - came)
                    got = body.read_into(into[came : came + _PIECE]) if body is not None else 0
                except (RemoteError, BotoCoreError, OSError, http.client.HTTPException) as error:
                    self._release(body)
                    body, failed = None, failed + 1
                    silent += s3_errors.is_timeout(error)
                    self._wait_or_raise(error, failed, silent)
                    continue
                if got == 0:
                    break
                came += got
                if came - since >= PROGRESS:
                    since, failed, silent = came, 0, 0
                arrived(came)
        finally:
            self._release(body)
        return came

    def close(self) -> None:
        """Ends reads in progress; `closed` is set already."""
        with self._lock:
            for body in self._bodies:
                body.cut()

    def _open(self, key: str, begin: int, size: int) -> _Body | None:
        """Opens a range; None if the object ends before it or is missing.

        Raises RemoteError and botocore's errors."""
        if self._closed.is_set():
            raise RemoteClosed
        wanted = {**self._headers, "Range": f"bytes={begin}-{begin + size - 1}"}
        url = f"{self._url}/{quote(key, safe='/~')}"
        request = AWSRequest("GET", url, headers=wanted, stream_output=True)
        request.context["read_timeout"] = STALL_SECONDS
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
        response = self._session.send(request.prepare())
        if response.status_code >= 300:
            answer = s3_errors.answer_of_page(response.status_code, response.content.decode(errors="replace"))
            if s3_errors.is_absent(answer):
                return None
            raise s3_errors.of_answer(answer, self._location)
        first, last = _read_content_range(response.headers.get("Content-Range", ""))
        if response.status_code != 206 or first != begin:
            response.raw.close()
            other = s3_errors.Answer(response.status_code, sentence="another range came than was asked for")
            raise s3_errors.of_answer(other, self._location)
        body = _Body(response.raw, last + 1 - begin)
        with self._lock:
            self._bodies.add(body)
        if self._closed.is_set():  # since the check above; `close` may not have seen this one
            self._release(body)
            raise RemoteClosed
        return body

    def _release(self, body: _Body | None) -> None:
        if body is not None:
            with self._lock:
                self._bodies.discard(body)
            body.close()

    def _wait_or_raise(self, error: Exception, failed: int, silent: int) -> None:
        """Pauses if another try may help. Raises RemoteError otherwise."""
        if self._closed.is_set():
            raise RemoteClosed from None
        found = s3_errors.from_read(error, self._location)
        passing = found.reason is Reason.UNREACHABLE and found.retriable
        if not passing or failed == TRIES or silent == STALLS:
            raise found from error
        # Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
        if self._closed.wait(random.uniform(0, min(BACKOFF[1], BACKOFF[0] * 2 ** (failed - 1)))):
            raise RemoteClosed from None


class _Body:
    """The body of an answer that holds a range."""

    def __init__(self, answer: Any, size: int) -> None:
        """Takes urllib3's unread `answer`, which holds `size` bytes."""
        self._answer, self._left = answer, size
        # urllib3's own `readinto` copies what it has read into a buffer of its own.
        self._plain = getattr(answer, "_fp", answer)

    def read_into(self, view: memoryview) -> int:
        """Returns the number of bytes read; 0 at the range's end. Raises OSError, HTTPException."""
        if self._left == 0:
            return 0
        got: int = self._plain.readinto(view[: self._left])
        if got == 0:
            raise ConnectionError("the connection broke")
        self._left -= got
        return got

    def close(self) -> None:
        """Returns the connection to the pool if all was read, else closes it."""
        if self._left == 0:
            self._answer.release_conn()
        else:
            self._answer.close()

    def cut(self) -> None:
        """Shuts the connection down from another thread than the one that reads."""
        with contextlib.suppress(OSError, AttributeError):  # it has ended
            # Not the shutdown of TLS, which removes what the reading thread uses.
            socket.socket.shutdown(self._answer.connection.sock, socket.SHUT_RDWR)


def _read_content_range(text: str) -> tuple[int, int]:
    """Returns the first and last byte (RFC 9110, section 14.4); (-1, -1) if the header has none."""
    found = re.match(r"bytes (\d+)-(\d+)/", text)
    return (int(found[1]), int(found[2])) if found is not None else (-1, -1)
