"""What is read from a bucket goes on where its connection broke, and what else may come is named."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from botocore.credentials import Credentials
from botocore.httpsession import URLLib3Session

from tests.sidecar.remote.s3.faulty_proxy import QuietHandler, listening
from tiercheck_sidecar.remote import Reason, RemoteClosed, RemoteError
from tiercheck_sidecar.remote.errors import ignore
from tiercheck_sidecar.remote.s3 import s3_ranges
from tiercheck_sidecar.remote.s3.s3_ranges import RangeReader

if TYPE_CHECKING:
    from obstore.store import S3Config

CONTENT = os.urandom(100_000)


@dataclass
class Bucket:
    """One object, whose answers break off, are others than asked, or wait."""

    url: str = ""
    breaks: list[int] = field(default_factory=list)
    """After how many bytes each answer in turn ends early."""
    whole: bool = False
    """Whether it does not know ranges."""
    waiting: threading.Event | None = None
    """What half of each answer waits for."""
    asked: list[int] = field(default_factory=list)
    """First bytes of the ranges that were asked for."""
    half_sent: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    found = Bucket()

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            last = min(last, len(CONTENT) - 1)
            found.asked.append(first)
            if first >= len(CONTENT):
                self.send_error(416)
                return
            body = CONTENT[first : last + 1]
            self.send_response(200 if found.whole else 206)
            if not found.whole:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if found.waiting is not None:
                self.wfile.write(body[: len(body) // 2])
                found.half_sent.release()
                found.waiting.wait(60)
                body = body[len(body) // 2 :]
            if found.breaks:
                body, self.close_connection = body[: found.breaks.pop(0)], True
            self.wfile.write(body)

    with listening(Handler) as found.url:
        yield found


def reader(bucket: Bucket, closed: threading.Event | None = None) -> RangeReader:
    credentials, closed = Credentials("key", "secret"), closed or threading.Event()
    config: S3Config = {"region": "us-east-1", "aws_endpoint_url_s3": bucket.url}
    return RangeReader(URLLib3Session(), config, credentials, "s3://here", closed)


def test_read_goes_on_at_the_byte_where_its_connection_broke(bucket: Bucket) -> None:
    bucket.breaks += [30_000, 0, 20_000]
    into, arrived = bytearray(len(CONTENT)), []
    assert reader(bucket).read_into("x", 0, memoryview(into), arrived.append) == len(CONTENT)
    assert bytes(into) == CONTENT
    assert bucket.asked == [0, 30_000, 30_000, 50_000]
    assert arrived == sorted(set(arrived)), "no byte is announced twice"


def test_object_that_ends_before_the_range_is_read_to_its_end(bucket: Bucket) -> None:
    into = bytearray(len(CONTENT))
    assert reader(bucket).read_into("x", 60_000, memoryview(into), ignore) == 40_000
    assert bytes(into[:40_000]) == CONTENT[60_000:]
    assert reader(bucket).read_into("x", len(CONTENT), memoryview(into), ignore) == 0


def test_tries_are_counted_anew_after_progress(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_ranges, "PROGRESS", 5000)
    bucket.breaks += [6000] * (2 * s3_ranges.TRIES)
    into = bytearray(len(CONTENT))
    assert reader(bucket).read_into("x", 0, memoryview(into), ignore) == len(CONTENT)
    bucket.asked.clear()
    bucket.breaks[:] = [100] * (2 * s3_ranges.TRIES)
    with pytest.raises(RemoteError) as caught:
        reader(bucket).read_into("x", 0, memoryview(into), ignore)
    assert caught.value.reason is Reason.UNREACHABLE
    assert len(bucket.asked) == s3_ranges.TRIES


def test_answer_of_a_server_that_knows_no_ranges_is_named_and_not_asked_for_again(bucket: Bucket) -> None:
    bucket.whole = True
    with pytest.raises(
        RemoteError, match=r"another range came than was asked for.*proxy in between"
    ) as caught:
        reader(bucket).read_into("x", 10, memoryview(bytearray(10)), ignore)
    assert not caught.value.retriable
    assert bucket.asked == [10]


def test_read_that_waits_for_more_ends_when_it_is_closed(bucket: Bucket) -> None:
    bucket.waiting, closed = threading.Event(), threading.Event()
    opened = reader(bucket, closed)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(opened.read_into, "x", 0, memoryview(bytearray(50_000)), ignore)
        try:
            assert bucket.half_sent.acquire(timeout=60)
            closed.set()
            opened.close()
            with pytest.raises(RemoteClosed):
                reading.result(timeout=5)
        finally:
            bucket.waiting.set()


def test_read_whose_answer_comes_in_the_moment_of_closing_ends_too(bucket: Bucket) -> None:
    bucket.waiting, closed = threading.Event(), threading.Event()
    opened = reader(bucket, closed)
    send = opened._session.send

    def send_and_close(request: object) -> object:
        answer = send(request)
        closed.set()
        opened.close()  # it does not know of this one yet
        return answer

    opened._session.send = send_and_close
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(opened.read_into, "x", 0, memoryview(bytearray(50_000)), ignore)
        try:
            with pytest.raises(RemoteClosed):
                reading.result(timeout=5)  # and not when it was silent for long enough
        finally:
            bucket.waiting.set()
