"""What every durable place must do to serve as remote tier; run over all of them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sidecar.remote.remote_places import CHUNK, Place, sealed
from tests.sidecar.world import until
from tiercheck.protocol.encoding import to_builtins, to_json
from tiercheck.protocol.version import Manifest, RankArtifact, Version
from tiercheck_sidecar.remote import (
    Reason,
    RemoteClosed,
    RemoteCorrupt,
    RemoteError,
    RemoteMissing,
    open_store,
)
from tiercheck_sidecar.remote.s3 import s3
from tiercheck_sidecar.remote.store import RemoteStore

JOB = "research/gpt"
FOLDER = "team/research/gpt"
FIRST, SECOND, THIRD = Version(100, 1), Version(200, 1), Version(300, 2)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART", 5 * CHUNK)  # the least that S3 allows


@pytest.fixture
def store(place: Place) -> Iterator[RemoteStore]:
    opened = open_store(place.settings(), JOB)
    yield opened
    opened.close()


def manifest_of(version: Version, *artifacts: RankArtifact, job_uid: str = "uid-1") -> Manifest:
    return Manifest(JOB, job_uid, version, len(artifacts), artifacts, created=1.0)


def save(store: RemoteStore, slots: Path, version: Version, content: bytes = b"state") -> Manifest:
    """Upload and commit a version of one rank."""
    manifest = manifest_of(version, store.put_artifact(0, version, *sealed(slots, content), bandwidth=None))
    assert store.commit(manifest)
    return manifest


def fetched(store: RemoteStore, artifact: RankArtifact) -> bytes:
    into = bytearray(artifact.bytes)
    store.fetch(artifact, memoryview(into))
    return bytes(into)


def uploaded(place: Place, version: Version) -> list[str]:
    """Keys of whole artifacts of a version, whether or not a manifest names them."""
    folder = f"/artifacts/{version.step:012d}-{version.attempt}/"
    return sorted(name for name in place.names() if folder in name and name.endswith(".safetensors"))


def test_fresh_place_is_healthy_and_empty(store: RemoteStore) -> None:
    store.check()
    assert store.versions() == []
    with pytest.raises(RemoteMissing):
        store.read_manifest(FIRST)


# 6 and 11 MiB: more than one part; the odd sizes end in a short chunk.
@pytest.mark.parametrize("size", [0, 1, 3 * CHUNK, 3 * CHUNK + 17, 6 * CHUNK, 11 * CHUNK + 1])
def test_what_was_saved_comes_back_bit_by_bit(store: RemoteStore, slots: Path, size: int) -> None:
    content = os.urandom(size)
    manifest = save(store, slots, FIRST, content)

    assert store.versions() == [FIRST]
    assert store.read_manifest(FIRST) == manifest
    assert fetched(store, manifest.artifacts[0]) == content


def test_chunk_size_that_divides_no_part_is_fine(store: RemoteStore, slots: Path) -> None:
    content = os.urandom(11 * CHUNK)
    artifact = store.put_artifact(0, FIRST, *sealed(slots, content, chunk=3 * CHUNK + 5), bandwidth=None)
    assert fetched(store, artifact) == content


def test_slot_larger_than_the_artifact_keeps_its_rest(store: RemoteStore, slots: Path) -> None:
    manifest = save(store, slots, FIRST, b"state")
    into = bytearray(b"x" * 8)
    store.fetch(manifest.artifacts[0], memoryview(into))
    assert bytes(into) == b"statexxx"
    with pytest.raises(ValueError, match="do not fit"):
        store.fetch(manifest.artifacts[0], memoryview(bytearray(4)))


def test_version_exists_only_with_its_manifest(store: RemoteStore, slots: Path) -> None:
    first = store.put_artifact(0, FIRST, *sealed(slots, b"rank 0"), bandwidth=None)
    second = store.put_artifact(1, FIRST, *sealed(slots, b"rank 1"), bandwidth=None)
    assert store.versions() == []

    assert store.commit(manifest_of(FIRST, first, second))
    assert store.versions() == [FIRST]


def test_versions_come_oldest_first(store: RemoteStore, slots: Path) -> None:
    for version in (SECOND, THIRD, FIRST):
        save(store, slots, version)
    assert store.versions() == [FIRST, SECOND, THIRD]


def test_manifest_is_refused_while_an_artifact_is_missing_or_short(
    store: RemoteStore, slots: Path, place: Place
) -> None:
    first = store.put_artifact(0, FIRST, *sealed(slots, b"rank 0"), bandwidth=None)
    never = dataclasses.replace(first, rank=1, key=first.key.replace("rank-0", "rank-1"))
    with pytest.raises(RemoteCorrupt, match="rank-1") as caught:
        store.commit(manifest_of(FIRST, first, never))
    assert "tiers.remote was changed while the job runs" in str(caught.value)

    place.put(f"{FOLDER}/{first.key}", b"ran")
    with pytest.raises(RemoteCorrupt, match="3 of 6 bytes"):
        store.commit(manifest_of(FIRST, first))
    assert store.versions() == []


def test_of_eight_writers_exactly_one_commits(store: RemoteStore, slots: Path) -> None:
    for round_ in range(1, 4):
        version = Version(round_, 1)
        artifact = store.put_artifact(0, version, *sealed(slots, b"state"), bandwidth=None)
        together = threading.Barrier(8)

        def commit(writer: int, version=version, artifact=artifact, together=together) -> bool:
            together.wait()
            return store.commit(manifest_of(version, artifact, job_uid=f"uid-{writer}"))

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(commit, range(8)))
        assert won.count(True) == 1
        assert store.read_manifest(version).job_uid == f"uid-{won.index(True)}"


def test_committing_the_same_again_is_success(store: RemoteStore, slots: Path) -> None:
    manifest = save(store, slots, FIRST)
    assert store.commit(manifest)
    restarted_coordinator = dataclasses.replace(manifest, created=2.0)
    assert store.commit(restarted_coordinator)
    assert store.read_manifest(FIRST).created == manifest.created


def test_complete_version_is_never_overwritten(store: RemoteStore, slots: Path) -> None:
    manifest = save(store, slots, FIRST, b"first")
    assert store.put_artifact(0, FIRST, *sealed(slots, b"first"), bandwidth=None) == manifest.artifacts[0]
    with pytest.raises(RemoteError, match="already exists") as caught:
        store.put_artifact(0, FIRST, *sealed(slots, b"other"), bandwidth=None)
    assert not caught.value.retriable
    assert fetched(store, manifest.artifacts[0]) == b"first"


def test_slot_that_changed_after_sealing_is_not_uploaded(
    store: RemoteStore, slots: Path, place: Place
) -> None:
    content = bytearray(os.urandom(11 * CHUNK))
    path, digests = sealed(slots, bytes(content))
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RemoteCorrupt, match="chunk 10 of 11"):
        store.put_artifact(0, FIRST, path, digests, bandwidth=None)
    assert not any("artifacts" in key for key in place.names())
    assert place.unfinished() == 0

    path.write_bytes(content[:5])
    with pytest.raises(RemoteCorrupt, match="has 5 of"):
        store.put_artifact(0, FIRST, path, digests, bandwidth=None)


def test_flipped_bit_in_the_store_is_detected(store: RemoteStore, slots: Path, place: Place) -> None:
    artifact = save(store, slots, FIRST, os.urandom(11 * CHUNK)).artifacts[0]
    key = f"{FOLDER}/{artifact.key}"
    damaged = bytearray(place.get(key))
    damaged[9 * CHUNK + 3] ^= 4
    place.put(key, bytes(damaged))
    with pytest.raises(RemoteCorrupt, match="chunk 9"):
        fetched(store, artifact)


@pytest.mark.parametrize("remaining", [0, 5 * CHUNK, 8 * CHUNK, 11 * CHUNK - 1])
def test_truncated_object_is_detected(store: RemoteStore, slots: Path, place: Place, remaining: int) -> None:
    artifact = save(store, slots, FIRST, os.urandom(11 * CHUNK)).artifacts[0]
    key = f"{FOLDER}/{artifact.key}"
    place.put(key, place.get(key)[:remaining])
    with pytest.raises(RemoteCorrupt, match="missing or ends"):
        fetched(store, artifact)


def test_missing_object_and_unreadable_manifest_are_corruption(
    store: RemoteStore, slots: Path, place: Place
) -> None:
    artifact = save(store, slots, FIRST).artifacts[0]
    with pytest.raises(RemoteCorrupt, match="rank-9"):
        fetched(store, dataclasses.replace(artifact, rank=9))
    with pytest.raises(RemoteCorrupt, match="not what the manifest"):
        fetched(store, dataclasses.replace(artifact, digest="0" * 32))
    place.put(f"{FOLDER}/{artifact.key.replace('.safetensors', '.json')}", b"{")
    with pytest.raises(RemoteCorrupt, match="cannot be read"):
        fetched(store, artifact)
    whole = store.put_artifact(0, SECOND, *sealed(slots, b"state"), bandwidth=None)
    store._objects.delete([whole.key])
    with pytest.raises(RemoteCorrupt, match="missing or ends"):
        fetched(store, whole)

    place.put(f"{FOLDER}/manifests/{100:012d}-1.json", b'{"job": "research/gpt"')
    with pytest.raises(RemoteCorrupt, match="cannot be read") as caught:
        store.read_manifest(FIRST)
    assert caught.value.reason is Reason.CORRUPT


def test_a_manifest_under_another_versions_name_is_refused(
    store: RemoteStore, slots: Path, place: Place
) -> None:
    save(store, slots, FIRST)
    body = place.get(f"{FOLDER}/manifests/{100:012d}-1.json")
    place.put(f"{FOLDER}/manifests/{200:012d}-1.json", body)
    with pytest.raises(RemoteCorrupt, match="says that it is of step 100"):
        store.read_manifest(SECOND)
    assert store.read_manifest(FIRST).version == FIRST


@pytest.mark.parametrize(
    "digests",
    [{"size": 9, "chunk": 0, "values": []}, {"size": -1, "chunk": 4, "values": []},
        {"size": 9, "chunk": 4, "values": []}, None]
)  # fmt: skip
def test_senseless_digests_are_corruption_and_not_a_crash(
    store: RemoteStore, slots: Path, place: Place, digests: object
) -> None:
    artifact = save(store, slots, FIRST).artifacts[0]
    key = f"{FOLDER}/{artifact.key.replace('.safetensors', '.json')}"
    place.put(key, json.dumps({**to_builtins(artifact), "digests": digests}).encode())
    with pytest.raises(RemoteCorrupt):
        store.artifact(0, FIRST)


def test_manifest_grows_with_ranks_and_not_with_their_size(
    store: RemoteStore, slots: Path, place: Place
) -> None:
    save(store, slots, FIRST, bytes(64 * 1024))
    save(store, slots, SECOND, bytes(11 * CHUNK))
    small, large = (len(place.get(f"{FOLDER}/manifests/{step:012d}-1.json")) for step in (100, 200))
    assert large - small < 16  # a few digits more


def test_foreign_files_are_no_versions(store: RemoteStore, slots: Path, place: Place) -> None:
    save(store, slots, FIRST)
    for name in ("manifests/README", "manifests/latest.json", "notes.txt"):
        place.put(f"{FOLDER}/{name}", b"hello")
    assert store.versions() == [FIRST]
    store.retain(1)
    assert f"{FOLDER}/manifests/README" in place.names()


def test_only_the_newest_are_retained(store: RemoteStore, slots: Path, place: Place) -> None:
    for step in (10, 20, 30, 40):
        save(store, slots, Version(step, 1))
    store.retain(2)
    assert store.versions() == [Version(30, 1), Version(40, 1)]
    assert {key.split("/")[4] for key in place.names() if "artifacts" in key} == {
        f"{30:012d}-1",
        f"{40:012d}-1",
    }


def test_unreadable_old_manifest_does_not_stop_retention(
    store: RemoteStore, slots: Path, place: Place
) -> None:
    save(store, slots, Version(10, 1))
    place.put(f"{FOLDER}/manifests/{10:012d}-1.json", b"{")
    save(store, slots, Version(20, 1))
    store.retain(1)
    assert store.versions() == [Version(20, 1)]


def test_protected_and_newest_versions_survive_any_retention(store: RemoteStore, slots: Path) -> None:
    manifests = [save(store, slots, Version(step, 1), b"%d" % step) for step in (10, 20, 30)]
    store.retain(0, {Version(10, 1)})
    assert store.versions() == [Version(10, 1), Version(30, 1)]
    assert fetched(store, manifests[0].artifacts[0]) == b"10"
    assert fetched(store, manifests[2].artifacts[0]) == b"30"


def test_retention_sweeps_what_killed_uploads_left(store: RemoteStore, slots: Path, place: Place) -> None:
    store.put_artifact(0, Version(5, 1), *sealed(slots, b"never completed"), bandwidth=None)
    store.put_artifact(0, Version(6, 1), *sealed(slots, b"still wanted"), bandwidth=None)
    place.leave_unfinished(f"{FOLDER}/artifacts/{7:012d}-1/rank-0.safetensors")
    save(store, slots, Version(10, 1))
    store.retain(1, {Version(6, 1)})
    assert uploaded(place, Version(5, 1)) == []
    assert place.unfinished() == 0
    assert len(uploaded(place, Version(6, 1))) == 1


def test_newer_unfinished_upload_is_not_swept(store: RemoteStore, slots: Path, place: Place) -> None:
    save(store, slots, FIRST)
    store.put_artifact(0, SECOND, *sealed(slots, b"being uploaded"), bandwidth=None)
    place.leave_unfinished(f"{FOLDER}/artifacts/{200:012d}-1/rank-1.safetensors")
    store.retain(1)
    assert len(uploaded(place, SECOND)) == 1
    assert place.unfinished() == 1


def test_interrupted_upload_leaves_no_version(store: RemoteStore, slots: Path, place: Place) -> None:
    path, digests = sealed(slots, bytes(11 * CHUNK))
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(store.put_artifact, 0, FIRST, path, digests, bandwidth=1)
        store.close()
        with pytest.raises(RemoteClosed):
            upload.result(timeout=60)
    again = open_store(place.settings(), JOB)
    assert again.versions() == []
    assert uploaded(place, FIRST) == []
    again.close()


UPLOAD = """
import sys, json
from pathlib import Path
from tiercheck.protocol.encoding import from_json
from tiercheck.protocol.version import Digests
from tiercheck.protocol.version import Version
from tiercheck_sidecar.remote import open_store
settings, job, path, digests = sys.argv[1:]
# One byte per second: the first piece goes at once, the second one never.
open_store(settings, job).put_artifact(0, Version(100, 1), Path(path), from_json(digests, Digests), 1)
"""


def test_sidecar_killed_in_mid_upload_leaves_no_version_and_can_upload_again(
    store: RemoteStore, slots: Path, place: Place
) -> None:
    content = os.urandom(33 * CHUNK)
    path, digests = sealed(slots, content)
    uploader = subprocess.Popen([sys.executable, "-c", UPLOAD, place.settings(), JOB, path, to_json(digests)])
    try:
        until(lambda: place.unfinished() == 1, "it has begun")
    finally:
        uploader.kill()
        uploader.wait()
    assert store.versions() == []
    assert uploaded(place, FIRST) == []

    artifact = store.put_artifact(0, FIRST, path, digests, bandwidth=None)
    assert store.commit(manifest_of(FIRST, artifact))
    assert fetched(store, artifact) == content


@pytest.mark.parametrize(
    "prefix", ["", "/", "a/b//c/", "équipe/模型", "with space/50%20+&#?", "dots.and_under-~(1)"]
)
def test_any_reasonable_prefix_works(place: Place, slots: Path, prefix: str) -> None:
    store = open_store(place.settings(prefix), JOB)
    store.check()
    manifest = save(store, slots, FIRST, b"state")
    assert store.versions() == [FIRST]
    assert fetched(store, manifest.artifacts[0]) == b"state"
    parts = [part for part in prefix.split("/") if part]
    assert "/".join([*parts, "research/gpt", manifest.artifacts[0].key]) in place.names()
    store.retain(1)
    store.close()


def test_two_jobs_under_one_prefix_do_not_see_each_other(place: Place, slots: Path) -> None:
    ours, theirs = open_store(place.settings(), JOB), open_store(place.settings(), "research/gpt-2")
    save(ours, slots, FIRST)
    assert theirs.versions() == []
    theirs.retain(1)
    assert ours.versions() == [FIRST]
    ours.close()
    theirs.close()


def test_jobs_whose_names_run_together_keep_apart(place: Place, slots: Path) -> None:
    one = open_store(place.settings(), "research-gpt/x")
    other = open_store(place.settings(), "research/gpt-x")
    assert one.location != other.location
    manifest = Manifest(
        "research-gpt/x",
        "uid",
        FIRST,
        1,
        (one.put_artifact(0, FIRST, *sealed(slots, b"state"), bandwidth=None),),
        created=1.0,
    )
    assert one.commit(manifest)
    assert other.versions() == []
    for opened in (one, other):
        opened.close()


def test_closed_store_refuses(store: RemoteStore, slots: Path) -> None:
    manifest = save(store, slots, FIRST)
    store.close()
    with pytest.raises(RemoteClosed):
        store.put_artifact(0, SECOND, *sealed(slots, b"late"), bandwidth=None)
    with pytest.raises(RemoteClosed):
        fetched(store, manifest.artifacts[0])
    store.close()


def test_attempts_are_announced_once_and_only_the_newest_stays(store: RemoteStore, place: Place) -> None:
    assert store.newest_attempts("uid") == []
    for attempt in (3, 12, 12, 7):
        store.begin_attempt("uid", attempt, f"of {attempt}")
    assert store.newest_attempts("uid")[0] == (12, "of 12"), (
        "one that was cut off and announces itself late changes nothing"
    )
    assert store.newest_attempts("uid", above=12) == []
    store.begin_attempt("uid", 13, "of 13")
    assert store.newest_attempts("uid") == [(13, "of 13")]
    assert store.newest_attempts("other") == []
    store.begin_attempt("other", 1)
    assert [len(store.newest_attempts(job)) for job in ("uid", "other")] == [0, 1]
    assert store.versions() == []
