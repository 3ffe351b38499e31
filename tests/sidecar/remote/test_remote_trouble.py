"""What goes wrong with a remote tier is named, so that the condition says what to do."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.remote.remote_places import BUCKET, DirectoryPlace, S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import EMPTY_LIST, Answer, closed_port, refusal, serving
from tiercheck.protocol import names
from tiercheck.protocol.version import Manifest, Version
from tiercheck_sidecar.remote import Reason, RemoteError, examine_place, open_store
from tiercheck_sidecar.remote.directory import DirectoryObjects
from tiercheck_sidecar.remote.errors import RemoteCorrupt
from tiercheck_sidecar.remote.objects import Objects, Stored
from tiercheck_sidecar.remote.store import RemoteStore

JOB = "research/gpt"
VERSION = Version(100, 1)


@contextmanager
def opened(endpoint: str, bucket: str = BUCKET, **more: str) -> Iterator[RemoteStore]:
    store = open_store(json.dumps({"s3": {"bucket": bucket, "endpoint": endpoint, **more}}), JOB)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(autouse=True)
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where advice is about Secrets, and pauses are short."""
    monkeypatch.setenv(names.ENV_POD_UID, "pod-0")


def operations(store: RemoteStore, tmp_path: Path) -> list[Callable[[], object]]:
    """Every way in, because the two client libraries report the same trouble differently."""
    path, digests = sealed(tmp_path)
    return [
        store.check,
        store.versions,
        lambda: store.put_artifact(0, VERSION, path, digests, None),
        lambda: store._objects.upload("artifacts/x", memoryview(b"state"), 5, lambda *_: None),
        lambda: store._objects.read_into("artifacts/x", 0, memoryview(bytearray(5))),
    ]


def test_unreachable_endpoint_is_named_by_every_operation(tmp_path: Path) -> None:
    with opened(closed_port()) as store:
        for operation in operations(store, tmp_path):
            with pytest.raises(RemoteError, match=r"does not answer.*endpoint") as caught:
                operation()
            assert caught.value.reason is Reason.UNREACHABLE
            assert caught.value.retriable


def test_missing_bucket_is_named_by_every_operation(s3_endpoint: str, tmp_path: Path) -> None:
    with opened(s3_endpoint, bucket="no-such-bucket") as store:
        for operation in operations(store, tmp_path):
            with pytest.raises(RemoteError, match="create it or correct") as caught:
                operation()
            assert caught.value.reason is Reason.NO_SUCH_BUCKET


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("AccessDenied", "allow these credentials"),
        ("InvalidAccessKeyId", "correct the Secret"),
        ("SignatureDoesNotMatch", "correct the Secret"),
        ("RequestTimeTooSkewed", "clock"),
    ],
)
def test_refused_credentials_are_named_by_every_operation(tmp_path: Path, code: str, advice: str) -> None:
    with serving(lambda *_: refusal(code)) as endpoint, opened(endpoint) as store:
        for operation in operations(store, tmp_path):
            with pytest.raises(RemoteError, match=advice) as caught:
                operation()
            assert caught.value.reason is Reason.FORBIDDEN


def test_bucket_that_may_be_read_but_not_written_is_found_by_the_check() -> None:
    def read_only(method: str, path: str, headers: dict[str, str]) -> Answer:
        return (200, EMPTY_LIST) if method == "GET" else refusal("AccessDenied")

    with serving(read_only) as endpoint, opened(endpoint) as store:
        assert store.versions() == []
        with pytest.raises(RemoteError) as caught:
            store.check()
        assert caught.value.reason is Reason.FORBIDDEN


def test_overloaded_server_is_worth_another_try() -> None:
    with serving(lambda *_: refusal("SlowDown", 503)) as endpoint, opened(endpoint) as store:
        with pytest.raises(RemoteError, match="overloaded") as caught:
            store.check()
        assert caught.value.retriable


def test_short_overload_is_waited_out() -> None:
    answers = [refusal("SlowDown", 503), (200, EMPTY_LIST)]
    with (
        serving(lambda *_: answers.pop(0) if len(answers) > 1 else answers[0]) as endpoint,
        opened(endpoint) as store,
    ):
        assert store.versions() == []


def test_no_credentials_anywhere_is_named_and_noticed_when_they_appear(
    s3_endpoint: str, s3_client: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv(names.ENV_POD_UID)
    with opened(s3_endpoint) as store:
        with pytest.raises(
            RemoteError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        ) as caught:
            store.check()
        assert caught.value.reason is Reason.CREDENTIALS_MISSING
        assert "credentialsSecretName" not in str(caught.value), "there is none at a command line"
        monkeypatch.setenv(names.ENV_POD_UID, "pod-0")
        with pytest.raises(RemoteError, match="credentialsSecretName"):
            store.check()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        store.check()


@pytest.mark.parametrize("refuses", [True, False])
def test_server_that_takes_checksums_gets_them_and_one_that_refuses_is_used_without(
    tmp_path: Path, refuses: bool
) -> None:
    checksums: dict[str, str] = {}

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        if refuses and any(name.startswith("x-amz-checksum") for name in headers):
            return refusal("InvalidRequest", 400)
        if method == "PUT":
            checksums[path.rpartition("/")[2]] = headers.get("x-amz-checksum-crc64nvme", "")
            return 200, b""
        return (200, EMPTY_LIST) if "list-type" in path else refusal("NoSuchKey", 404)

    with serving(answer) as endpoint, opened(endpoint, prefix="p") as store:
        path, digests = sealed(tmp_path)
        store.check()
        store.put_artifact(0, VERSION, path, digests, None)
    assert bool(checksums["rank-0.safetensors"]) is not refuses


def test_conflicting_manifest_requests_are_repeated_until_one_is_decided() -> None:
    answers = [
        refusal("ConditionalRequestConflict", 409),
        refusal("ConditionalRequestConflict", 409),
        (200, b""),
    ]

    def busy(method: str, path: str, headers: dict[str, str]) -> Answer:
        if path.endswith("/probe"):
            return refusal("PreconditionFailed", 412) if "if-none-match" in headers else (200, b"")
        assert headers.get("if-none-match") == "*"
        return answers.pop(0)

    with serving(busy) as endpoint, opened(endpoint) as store:
        assert store._objects.create("manifests/x.json", b"{}")
    assert answers == []


def test_authority_file_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    bundle = tmp_path / "missing.pem"
    with (
        opened("https://127.0.0.1:1", caBundle=str(bundle)) as store,
        pytest.raises(RemoteError, match="caBundle") as caught,
    ):
        store.check()
    assert caught.value.reason is Reason.OTHER


class LosesAnswers(DirectoryObjects):
    """Carries out the creation of the manifest, and lets the caller believe that it timed out."""

    def create(self, key: str, body: bytes) -> bool:
        super().create(key, body)
        raise RemoteError(Reason.UNREACHABLE, "timed out", retriable=True)


class LosesRequests(DirectoryObjects):
    def create(self, key: str, body: bytes) -> bool:
        raise RemoteError(Reason.UNREACHABLE, "timed out", retriable=True)


def committed_through(objects: Objects, tmp_path: Path, job_uid: str = "uid-1") -> bool:
    store = RemoteStore(objects, JOB)
    artifact = store.put_artifact(0, VERSION, *sealed(tmp_path), None)
    return store.commit(Manifest(JOB, job_uid, VERSION, 1, (artifact,), created=1.0))


def test_commit_whose_answer_was_lost_is_recognised_as_done(tmp_path: Path) -> None:
    assert committed_through(LosesAnswers(str(tmp_path), "job"), tmp_path)
    assert not committed_through(LosesAnswers(str(tmp_path), "job"), tmp_path, job_uid="uid-2")


def test_commit_whose_request_was_lost_is_not_taken_for_done(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="timed out"):
        committed_through(LosesRequests(str(tmp_path), "job"), tmp_path)


def directory(path: Path) -> RemoteStore:
    return open_store(json.dumps({"directory": {"path": str(path)}}), JOB)


def test_directory_that_is_not_mounted_is_not_created(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    store = directory(missing)
    for operation in (store.check, lambda: store.put_artifact(0, VERSION, *sealed(tmp_path), None)):
        with pytest.raises(RemoteError, match="mount the shared volume") as caught:
            operation()
        assert caught.value.reason is Reason.NO_SUCH_BUCKET
    assert not missing.exists()


def test_directory_that_may_not_be_written_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Not by mode bits: tests may run as root, whom those do not stop.
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(RemoteError, match="fsGroup") as caught:
        directory(tmp_path).check()
    assert caught.value.reason is Reason.FORBIDDEN


@pytest.mark.parametrize(
    ("call", "number"), [("link", errno.EPERM), ("link", errno.EOPNOTSUPP), ("rename", errno.ENOSYS)]
)
def test_file_system_without_links_or_renames_is_named_and_no_server_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """As FUSE mounts of buckets and some file shares are."""

    def unable(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, unable)
    found = list(examine_place(DirectoryPlace(tmp_path / "shared").settings()))
    failed = [each for each in found if not each.ok]
    assert failed
    for each in failed:
        assert "is on a file system that cannot do what is needed" in each.message
        assert not each.passing


def test_full_directory_keeps_nothing_of_the_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    shared = tmp_path / "shared"
    shared.mkdir()
    slot = sealed(tmp_path)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RemoteError, match="is full") as caught:
        directory(shared).put_artifact(0, VERSION, *slot, None)
    assert caught.value.retriable
    assert [path for path in shared.rglob("*") if path.is_file()] == []


def test_manifest_cannot_lead_outside_the_directory(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"state")
    shared = tmp_path / "shared"
    shared.mkdir()
    objects = DirectoryObjects(str(shared), "job")
    with pytest.raises(RemoteError, match="no key of"):
        objects.read_into("../../secret", 0, memoryview(bytearray(5)))
    with pytest.raises(RemoteError, match="no key of"):
        objects.read("/etc/hostname")


def test_error_in_one_range_stops_the_whole_fetch(
    s3_endpoint: str, s3_client: object, tmp_path: Path
) -> None:
    store = open_store(S3Place(s3_endpoint, s3_client).settings(), JOB)
    artifact = store.put_artifact(0, VERSION, *sealed(tmp_path, bytes(1024)), None)
    s3_client.delete_object(Bucket=BUCKET, Key=f"team/research/gpt/{artifact.key}")  # type: ignore[attr-defined]
    with pytest.raises(RemoteCorrupt):
        store.fetch(artifact, memoryview(bytearray(1024)))
    store.close()


def listing(entry: str) -> bytes:
    return EMPTY_LIST.replace(
        b"</ListBucketResult>", f"<Contents>{entry}</Contents></ListBucketResult>".encode()
    )


KEY = f"<Key>{JOB}/manifests/000000000001-1.json</Key>"
DATE, SIZE = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>", "<Size>1</Size>"


@pytest.mark.parametrize(
    "body",
    [
        listing(KEY + DATE),
        listing(KEY + SIZE),
        listing(DATE + SIZE),
        listing(KEY + SIZE + "<LastModified>yesterday</LastModified>"),
        listing(KEY + DATE + "<Size>much</Size>"),
        b"<html><body><h1>Welcome</h1><br></body>",
    ],
)
def test_senseless_listing_is_trouble_of_the_remote_tier_and_nothing_else(body: bytes) -> None:
    with (
        serving(lambda *_: (200, body)) as url,
        opened(url) as store,
        pytest.raises(RemoteError, match="s3://"),
    ):
        store.versions()


def test_endpoint_that_is_no_url_is_named_by_every_operation(tmp_path: Path) -> None:
    with opened("http://my_minio:9000") as store:
        for operation in operations(store, tmp_path):
            with pytest.raises(RemoteError, match=r"my_minio:9000.*correct tiers.remote.s3.endpoint"):
                operation()


def test_endpoint_of_the_secret_that_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "nonsense")
    store = open_store(json.dumps({"s3": {"bucket": BUCKET}}), JOB)
    with pytest.raises(RemoteError, match=r"AWS_ENDPOINT_URL_S3.*correct the Secret"):
        store.versions()


class Unforeseen(Objects):
    """Every verb fails with what is declared nowhere, and says a secret."""

    location = "tape://robot"
    error: type[Exception] = ValueError
    words = "Invalid header value b'the-token-itself'"

    def _fail(self) -> None:
        raise self.error(self.words)

    def check(self) -> None:
        self._fail()

    def upload(self, key: str, source: memoryview, chunk: int, gate: object) -> None:
        self._fail()

    def write(self, key: str, body: bytes) -> None:
        self._fail()

    def create(self, key: str, body: bytes) -> bool:
        return bool(self._fail())

    def read(self, key: str) -> bytes | None:
        return self._fail()  # type: ignore[func-returns-value]

    def read_into(self, key: str, offset: int, into: memoryview, arrived: object = None) -> int:
        return int(bool(self._fail()))

    def list(self, prefix: str) -> list[Stored]:
        return list(self._fail() or ())  # type: ignore[func-returns-value]

    def delete(self, keys: Iterable[str]) -> None:
        self._fail()

    def forget_unfinished(self, dead: Callable[[str, float], bool]) -> None:
        self._fail()


@pytest.mark.parametrize(
    "error", [ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError, StopIteration]
)
def test_what_no_place_declares_is_an_error_of_the_remote_tier_without_its_own_words(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    place = Unforeseen()
    place.error = error
    calls: list[Callable[[], object]] = [
        place.check,
        lambda: place.upload("k", memoryview(b""), 1, lambda *_: None),
        lambda: place.write("k", b""),
        lambda: place.create("k", b""),
        lambda: place.read("k"),
        lambda: place.read_into("k", 0, memoryview(b"")),
        lambda: place.list("k"),
        lambda: place.delete(["k"]),
        lambda: place.forget_unfinished(lambda *_: True),
    ]
    assert len(calls) == len(Objects.__abstractmethods__), "every verb"
    for call in calls:
        with pytest.raises(
            RemoteError, match=rf"tape://robot .*\({error.__name__} in test_remote_trouble.py, line"
        ) as caught:
            call()
        assert "token" not in str(caught.value)
    assert "token" not in caplog.text


@pytest.mark.parametrize("name", ["check", "list", "remains_of_deleted"])
def test_every_operation_of_a_store_fails_with_an_error_that_names_the_store(name: str) -> None:
    class Broken(Objects):
        location = "s3://bucket"

        def fail(self, *_: object) -> Any:
            raise KeyError("secret")

        check = upload = write = create = read = read_into = list = delete = forget_unfinished = fail
        remains_of_deleted = fail

    with pytest.raises(RemoteError, match="s3://bucket failed unexpectedly") as caught:
        getattr(Broken(), name)()
    assert "secret" not in str(caught.value)
