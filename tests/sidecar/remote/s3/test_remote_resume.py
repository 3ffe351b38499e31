"""An interrupted upload sends no part again that the store has, unless it is not ours.

A store in which nothing may be deleted is used as any other, and its refusal is told.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.remote.remote_places import BUCKET, S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import (
    CUT,
    EXPIRED,
    FORBIDDEN,
    Fault,
    Proxy,
    Seen,
    proxying,
    refusal,
)
from tests.sidecar.remote.test_remote_conformance import FOLDER, JOB, UPLOAD, fetched, manifest_of
from tests.sidecar.world import MakeWorld, until
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.version import Digests, Manifest, Version
from tiercheck_sidecar import coding
from tiercheck_sidecar.remote import Reason, RemoteClosed, RemoteCorrupt, RemoteError, keys, open_store
from tiercheck_sidecar.remote.directory import DirectoryObjects
from tiercheck_sidecar.remote.errors import digest_of
from tiercheck_sidecar.remote.s3 import s3, s3_transfers
from tiercheck_sidecar.remote.store import RemoteStore

VERSION = Version(100, 1)
PART = 5 * 1024 * 1024  # the least that S3 allows
PARTS = 5
SIZE = (PARTS - 1) * PART + 12345


def key_of(digests: Digests) -> str:
    return f"{FOLDER}/{keys.artifact_key(VERSION, 0, digest_of(digests))}"


@pytest.fixture
def proxy(s3_server: tuple[str, Any]) -> Iterator[Proxy]:
    with proxying(s3_server[0]) as proxy:
        yield proxy


@pytest.fixture
def place(proxy: Proxy, s3_server: tuple[str, Any]) -> S3Place:
    return S3Place(proxy.url, s3_server[1])


@pytest.fixture(autouse=True)
def small_parts_and_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(s3_transfers, "TRIES", 2)


def upload(place: S3Place, path: Path, digests: object) -> RemoteStore:
    """As a sidecar that was just started does."""
    store = open_store(place.settings(), JOB)
    try:
        store.put_artifact(0, VERSION, path, digests, None)
    finally:
        store.close()
    return store


def complete(place: S3Place, content: bytes, path: Path, digests: object) -> None:
    store = open_store(place.settings(), JOB)
    artifact = store.put_artifact(0, VERSION, path, digests, None)
    assert store.commit(manifest_of(VERSION, artifact))
    assert fetched(store, artifact) == content
    assert place.unfinished() == 0
    store.close()


def outage_from_part(number: int, proxy: Proxy) -> Callable[[Seen], Fault | None]:
    """The parts before it arrive; then nothing does, not even that the upload is given up."""

    def rule(seen: Seen) -> Fault | None:
        if seen.part >= number:
            until(lambda: proxy.stored == set(range(1, number)), "it reached the store")
        return CUT if seen.part >= number or seen.method == "DELETE" else None

    return rule


@pytest.mark.parametrize(
    ("answer", "told"),
    [(CUT, (Reason.UNREACHABLE, "")), (EXPIRED, (Reason.FORBIDDEN, "ExpiredToken"))],
    ids=["outage", "credentials"],
)
def test_upload_that_an_outage_or_the_end_of_its_credentials_ended_goes_on_from_there(
    place: S3Place, proxy: Proxy, slots: Path, answer: Any, told: tuple[Reason, str]
) -> None:
    content = os.urandom(SIZE)
    slot = sealed(slots, content)
    ends = outage_from_part(4, proxy)
    proxy.rule = lambda seen: answer if ends(seen) else None
    with pytest.raises(RemoteError, match=told[1]) as caught:
        upload(place, *slot)
    assert caught.value.reason is told[0]
    assert proxy.parts() == [1, 2, 3]
    proxy.rule = lambda seen: None
    complete(place, content, *slot)
    assert proxy.parts() == [1, 2, 3, 4, 5], "each part reached the store once"


def test_upload_that_the_store_refused_leaves_nothing(place: S3Place, proxy: Proxy, slots: Path) -> None:
    proxy.rule = lambda seen: FORBIDDEN if seen.part >= 4 else None
    with pytest.raises(RemoteError) as caught:
        upload(place, *sealed(slots, os.urandom(SIZE)))
    assert caught.value.reason is Reason.FORBIDDEN
    assert place.unfinished() == 0


def test_upload_of_a_killed_sidecar_goes_on_in_the_next_process(
    place: S3Place, proxy: Proxy, slots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = 16 * 1024 * 1024
    monkeypatch.setattr(s3, "PART", usual)  # as the process that is killed has it
    content = os.urandom(2 * usual + 5)
    path, digests = sealed(slots, content)
    uploader = subprocess.Popen([sys.executable, "-c", UPLOAD, place.settings(), JOB, path, to_json(digests)])
    try:
        until(lambda: proxy.parts() == [1] and proxy.stored == {1}, "it reached the store")
    finally:
        uploader.kill()
        uploader.wait()
    complete(place, content, path, digests)
    assert proxy.parts() == [1, 2, 3]


def test_store_that_is_closed_in_mid_upload_leaves_what_the_next_one_goes_on_from(
    place: S3Place, proxy: Proxy, slots: Path
) -> None:
    content = os.urandom(SIZE)
    path, digests = sealed(slots, content)
    store = open_store(place.settings(), JOB)

    def close_at_the_third(seen: Seen) -> None:
        if seen.part >= 3:
            until(lambda: proxy.stored >= {1, 2}, "it reached the store")
            store.close()

    proxy.rule = close_at_the_third
    with pytest.raises(RemoteClosed):
        store.put_artifact(0, VERSION, path, digests, None)
    proxy.rule = lambda seen: None
    assert open_store(place.settings(), JOB).versions() == []
    complete(place, content, path, digests)
    assert proxy.parts().count(1) == proxy.parts().count(2) == 1


@pytest.mark.parametrize("checksums", [True, False])
def test_parts_that_are_not_ours_are_sent_again(
    place: S3Place, proxy: Proxy, slots: Path, checksums: bool
) -> None:
    """Whoever wrote them: the server's checksum, or where it keeps none the ETag, tells."""
    content = os.urandom(SIZE)
    slot = sealed(slots, content)
    algorithm = {"ChecksumAlgorithm": "CRC64NVME"} if checksums else {}
    left = place.client.create_multipart_upload(Bucket=BUCKET, Key=key_of(slot[1]), **algorithm)["UploadId"]
    for number, body in ((1, content[:PART]), (2, os.urandom(PART)), (3, content[:1000])):
        more = {"ChecksumCRC64NVME": coding.library().crc64nvme(body)} if checksums else {}
        place.client.upload_part(
            Bucket=BUCKET, Key=key_of(slot[1]), UploadId=left, PartNumber=number, Body=body, **more
        )
    complete(place, content, *slot)
    assert proxy.parts() == [2, 3, 4, 5]


def test_slot_that_rotted_in_mid_upload_is_not_completed_and_nothing_stays(
    place: S3Place, proxy: Proxy, slots: Path
) -> None:
    content = bytearray(os.urandom(SIZE))
    path, digests = sealed(slots, bytes(content))
    proxy.rule = outage_from_part(5, proxy)
    with pytest.raises(RemoteError):
        upload(place, path, digests)
    content[-1] ^= 1
    path.write_bytes(content)
    proxy.rule = lambda seen: None
    with pytest.raises(RemoteCorrupt, match="does not match its digest"):
        upload(place, path, digests)
    assert place.unfinished() == 0
    assert key_of(digests) not in place.names()


def test_policy_that_forbids_listing_uploads_costs_only_the_resume(
    place: S3Place, proxy: Proxy, slots: Path
) -> None:
    content = os.urandom(SIZE)
    proxy.rule = lambda seen: FORBIDDEN if seen.method == "GET" and "uploads" in seen.path else None
    complete(place, content, *sealed(slots, content))
    assert proxy.parts() == [1, 2, 3, 4, 5]


def test_parts_carry_the_checksum_that_the_server_compares(place: S3Place, proxy: Proxy, slots: Path) -> None:
    content = os.urandom(SIZE)
    slot = sealed(slots, content)
    complete(place, content, *slot)
    assert all(each.headers.get("x-amz-checksum-crc64nvme") for each in proxy.seen if each.part)
    head = place.client.head_object(Bucket=BUCKET, Key=key_of(slot[1]))
    assert head["ContentLength"] == SIZE


LOCKED = "Deletes are denied by the records policy."


class Keeps(DirectoryObjects):
    """Deletes nothing whose key has one of these words in it, and lists no unfinished upload."""

    locked: tuple[str, ...] = ("",)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if any(word in key for word in self.locked):
                raise RemoteError(Reason.FORBIDDEN, LOCKED, retriable=False)
            super().delete([key])

    def forget_unfinished(self, dead: Callable[[str], bool]) -> None:
        raise RemoteError(Reason.UNREACHABLE, "busy", retriable=True)


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    (tmp_path / "shared").mkdir()
    return RemoteStore(Keeps(str(tmp_path / "shared"), "job"), JOB)


def save(store: RemoteStore, step: int, tmp_path: Path) -> None:
    version = Version(step, 1)
    artifact = store.put_artifact(0, version, *sealed(tmp_path), None)
    assert store.commit(Manifest(JOB, "uid", version, 1, (artifact,), created=1.0))


def test_attempt_begins_and_versions_stay_where_nothing_may_be_deleted(
    store: RemoteStore, tmp_path: Path
) -> None:
    for attempt in (1, 2, 3):
        store.begin_attempt("uid", attempt)
    assert store.newest_attempts("uid")[0].attempt == 3
    assert LOCKED in store.cleanup_error
    for step in range(1, 7):
        save(store, step, tmp_path)
    left = store.retain(2, frozenset())
    assert [version.step for version in left] == [1, 2, 3, 4, 5, 6]


def test_version_that_cannot_be_deleted_keeps_no_other_there(
    store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 7):
        save(store, step, tmp_path)
    monkeypatch.setattr(Keeps, "locked", ("manifests/000000000002",))
    assert [version.step for version in store.retain(2, frozenset())] == [2, 5, 6]
    assert store.artifact(0, Version(2, 1)), "what has a manifest is complete"
    monkeypatch.setattr(Keeps, "locked", ())
    monkeypatch.setattr(Keeps, "forget_unfinished", lambda *_: None)
    assert [version.step for version in store.retain(2, frozenset())] == [5, 6]
    assert store.cleanup_error == ""


def test_directory_where_nothing_may_be_deleted_takes_manifests(
    store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    save(store, 1, tmp_path)
    assert store.versions() == [Version(1, 1)]


def test_uploads_go_on_after_a_recovery_where_nothing_may_be_deleted(
    proxy: Proxy, s3_client: Any, make_world: MakeWorld
) -> None:
    denied = refusal("AccessDenied", 403, LOCKED)
    proxy.rule = lambda seen: Fault(answer=denied) if seen.method == "DELETE" else None
    world = make_world()
    world.remote = S3Place(proxy.url, s3_client).settings()
    world.policy = world.policy.__class__(snapshot_every=1, remote_every=1, remote_keep=1)
    world.start()
    for attempt, steps in ((1, (1, 2)), (2, (3, 4))):
        world.begin(*([Version(2, 1)] if attempt == 2 else []))
        with world.ranks() as (rank,):
            for step in steps:
                rank.save(step)
                world.reach("remote", Version(step, attempt))
    (problem,) = world.report(0).problems
    assert problem.reason == "RemoteNotSafe"
    assert LOCKED[:-1] in problem.message
