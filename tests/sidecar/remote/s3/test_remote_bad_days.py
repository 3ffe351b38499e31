"""A store that is slow, failing, full or forbidden is named, and loses nothing it had.

It is waited out where that helps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.remote.remote_places import S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import BUSY, CUT, FORBIDDEN, FULL, Fault, Proxy, Seen, proxying
from tests.sidecar.remote.test_remote_conformance import JOB, fetched, save
from tiercheck.protocol.version import Version
from tiercheck_sidecar.remote import Reason, RemoteClosed, RemoteError, open_store
from tiercheck_sidecar.remote.s3 import s3, s3_ranges, s3_transfers
from tiercheck_sidecar.remote.store import RemoteStore

PART = 5 * 1024 * 1024  # the least that S3 allows
OLD, NEW = Version(100, 1), Version(200, 1)


@pytest.fixture
def proxy(s3_server: tuple[str, Any]) -> Iterator[Proxy]:
    with proxying(s3_server[0]) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: Proxy, s3_server: tuple[str, Any]) -> Iterator[RemoteStore]:
    opened = open_store(S3Place(proxy.url, s3_server[1]).settings(), JOB)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def small_parts_and_short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART", PART)


class Now:
    """A fault for the first few of the requests that it is for."""

    def __init__(self, fault: Fault, times: int) -> None:
        self.left, self._fault, self._lock = times, fault, threading.Lock()

    def __call__(self, seen: Seen) -> Fault | None:
        with self._lock:
            if not seen.part and not (seen.method == "GET" and seen.key.endswith(".safetensors")):
                return None
            self.left -= 1
            return self._fault if self.left >= 0 else None


@pytest.mark.parametrize("fault", [BUSY, CUT], ids=["overloaded", "cut off in mid-part"])
def test_short_trouble_is_waited_out(store: RemoteStore, proxy: Proxy, slots: Path, fault: Fault) -> None:
    content = os.urandom(3 * PART + 5)
    proxy.rule = Now(fault, 3)
    manifest = save(store, slots, NEW, content)
    proxy.rule = Now(fault, 2)
    assert fetched(store, manifest.artifacts[0]) == content


@pytest.mark.parametrize(
    ("fault", "reason", "advice"),
    [
        (FULL, Reason.FULL, "free space"),
        (FORBIDDEN, Reason.FORBIDDEN, "allow these credentials"),
        (BUSY, Reason.UNREACHABLE, "when it recovers"),
        (CUT, Reason.UNREACHABLE, "does not answer"),
    ],
    ids=["full", "forbidden", "overloaded", "cut off"],
)
@pytest.mark.parametrize("size", [1000, 2 * PART], ids=["small", "large"])
def test_lasting_trouble_is_named_and_takes_nothing_away(
    store: RemoteStore, proxy: Proxy, slots: Path, *, size: int, fault: Fault, reason: Reason, advice: str
) -> None:
    old = save(store, slots, OLD, b"old")
    proxy.rule = lambda seen: fault if seen.method == "PUT" and seen.key.endswith(".safetensors") else None
    with pytest.raises(RemoteError, match=advice) as caught:
        store.put_artifact(0, NEW, *sealed(slots, os.urandom(size)), bandwidth=None)
    assert caught.value.reason is reason
    proxy.rule = lambda seen: None
    assert store.versions() == [OLD]
    assert fetched(store, old.artifacts[0]) == b"old"
    save(store, slots, NEW, b"new")
    assert store.versions() == [OLD, NEW]


def test_slow_store_delays_its_own_upload_and_no_other_call(
    store: RemoteStore, proxy: Proxy, slots: Path
) -> None:
    answer = threading.Event()
    proxy.rule = lambda seen: Fault(until=answer) if seen.key.endswith(".safetensors") else None
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(store.put_artifact, 0, NEW, *sealed(slots, b"slow"), None)
        assert store.versions() == []
        assert not upload.done()
        answer.set()
        assert upload.result(timeout=60).bytes == 4


@pytest.mark.parametrize("size", [1000, 2 * PART], ids=["small", "large"])
def test_upload_to_a_silent_store_ends_when_it_is_closed(
    store: RemoteStore, proxy: Proxy, slots: Path, size: int
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def silent(seen: Seen) -> Fault | None:
        if seen.method != "PUT" or not seen.key.endswith(".safetensors"):
            return None
        asked.set()
        return Fault(until=answer)

    proxy.rule = silent
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(store.put_artifact, 0, NEW, *sealed(slots, os.urandom(size)), None)
        try:
            assert asked.wait(60)
            store.close()
            with pytest.raises(RemoteClosed):
                upload.result(timeout=60)
            assert not answer.is_set()
        finally:
            answer.set()


@pytest.mark.parametrize("size", [1000, 2 * PART], ids=["small", "large"])
def test_store_that_falls_silent_in_mid_upload_is_named_and_its_upload_goes_on_later(
    proxy: Proxy, s3_server: tuple[str, Any], slots: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(s3_transfers, "STALL_SECONDS", 1)
    store = open_store(S3Place(proxy.url, s3_server[1]).settings(), JOB)
    store.check()
    content, silent, answer = os.urandom(size), threading.Event(), threading.Event()
    slot = sealed(slots, content)

    def falls_silent(seen: Seen) -> Fault | None:
        if seen.method == "PUT" and seen.key.endswith(".safetensors") and seen.part != 1:
            silent.set()
        return Fault(until=answer) if silent.is_set() else None

    proxy.rule = falls_silent
    try:
        with pytest.raises(RemoteError, match="said nothing for 2 s") as caught:
            store.put_artifact(0, NEW, *slot, None)
        assert caught.value.reason is Reason.UNREACHABLE
        assert caught.value.retriable
    finally:
        answer.set()
        store.close()
    proxy.rule = lambda seen: None
    monkeypatch.setattr(s3_transfers, "STALL_SECONDS", 60)
    store = open_store(S3Place(proxy.url, s3_server[1]).settings(), JOB)
    artifact = store.put_artifact(0, NEW, *slot, None)
    assert fetched(store, artifact) == content
    store.close()


def test_store_that_is_slow_and_answers_is_waited_for(
    proxy: Proxy, s3_server: tuple[str, Any], slots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Semaphore(0), threading.Event()

    def slow(seen: Seen) -> Fault | None:
        if seen.method == "HEAD":
            asked.release()
        return Fault(until=answer) if seen.part else None

    store = open_store(S3Place(proxy.url, s3_server[1]).settings(), JOB)
    store.check()
    content = os.urandom(2 * PART)
    proxy.rule = slow
    monkeypatch.setattr(s3_transfers, "STALL_SECONDS", 0.05)  # its answers are given the usual time
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(store.put_artifact, 0, NEW, *sealed(slots, content), None)
        try:
            for _ in range(3):
                assert asked.acquire(timeout=60)
            assert not upload.done()
        finally:
            answer.set()
        assert fetched(store, upload.result(timeout=60)) == content
    store.close()


def test_store_that_falls_silent_in_mid_restore_is_named_after_two_tries(
    proxy: Proxy, s3_server: tuple[str, Any], slots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_ranges, "STALL_SECONDS", 1)
    store = open_store(S3Place(proxy.url, s3_server[1]).settings(), JOB)
    manifest = save(store, slots, NEW, os.urandom(1000))
    answer, tries = threading.Event(), []

    def silent(seen: Seen) -> Fault | None:
        if not seen.key.endswith(".safetensors"):
            return None
        tries.append(seen)
        return Fault(until=answer)

    proxy.rule = silent
    try:
        with pytest.raises(RemoteError, match="no progress in time") as caught:
            fetched(store, manifest.artifacts[0])
        assert caught.value.reason is Reason.UNREACHABLE
        assert len(tries) == 2
    finally:
        answer.set()
        store.close()
