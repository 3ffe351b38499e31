"""An answer of a store is taken for what it says, takes no more memory than its limit, and is quoted."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.sidecar.remote.remote_places import BUCKET, DirectoryPlace, S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import (
    EMPTY_LIST,
    Answer,
    Fault,
    Proxy,
    QuietHandler,
    Seen,
    listening,
    refusal,
    serving,
)
from tests.sidecar.remote.test_remote_conformance import JOB, fetched, save
from tests.sidecar.remote.test_remote_preflight import ALL
from tests.sidecar.remote.test_remote_trouble import VERSION, opened, operations
from tiercheck.protocol.version import Manifest, Version
from tiercheck_sidecar.remote import (
    Reason,
    RemoteCorrupt,
    RemoteError,
    examine_place,
    objects,
    open_store,
    preflight,
)
from tiercheck_sidecar.remote.preflight import CHUNK
from tiercheck_sidecar.remote.s3 import s3, s3_clients, s3_errors
from tiercheck_sidecar.remote.store import RemoteStore

SENTENCE = "The department of records says no."


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_clients, "BUSY_PAUSE", 0.001)
    monkeypatch.setattr(s3, "PART", 5 * CHUNK)
    monkeypatch.setattr(objects, "LONGEST", LIMIT)
    monkeypatch.setattr(preflight, "SIZE", 6 * CHUNK)


OTHER, FORBIDDEN, FULL, BUSY = Reason.OTHER, Reason.FORBIDDEN, Reason.FULL, Reason.UNREACHABLE
PAGE = f"<html><title>{SENTENCE}</title><style>a{{}}</style><body><b>nginx</b></body></html>".encode()


@pytest.mark.parametrize(
    ("answer", "reason", "advice"),
    [
        (refusal("AccessDenied", 403, SENTENCE), FORBIDDEN, "allow these credentials to list"),
        (refusal("AccessDenied", 403, f"not authorized to perform: s3:PutObject. {SENTENCE}"), FORBIDDEN,
         "allow these credentials s3:PutObject,"),
        (refusal("AccessDenied", 403, f"with an explicit deny in a policy. {SENTENCE}"), FORBIDDEN,
         "change that policy"),
        (refusal("SecondLevelDomainForbidden", 403, SENTENCE), FORBIDDEN, "tiers.remote.s3.addressing"),
        (refusal("NobodyKnowsThis", 403, SENTENCE), FORBIDDEN, ""),
        (refusal("InvalidStorageClass", 400, SENTENCE), OTHER, "tiers.remote.s3.storageClass"),
        (refusal("KMS.DisabledException", 400, SENTENCE), OTHER, "key"),
        (refusal("NotImplemented", 501, SENTENCE), OTHER, ""),
        (refusal("PermanentRedirect", 301, SENTENCE), OTHER, "tiers.remote.s3.region"),
        (refusal("QuotaExceeded", 403, SENTENCE), FULL, "raise its quota"),
        (refusal("XMinioStorageFull", 507, SENTENCE), FULL, "raise its quota"),
        (refusal("ServiceUnavailable", 503, SENTENCE), BUSY, "uploads go on"),
        (refusal("KMS.ThrottlingException", 400, SENTENCE), BUSY, "uploads go on"),
        (refusal("RequestLimitExceeded", 403, SENTENCE), BUSY, "uploads go on"),
        (refusal("InvalidObjectState", 403, SENTENCE), Reason.ARCHIVED, "lifecycle rule"),
        ((403, PAGE), FORBIDDEN, "a proxy in between"),
        ((403, b"<Error><Code>Odd</Code><Message>Denied.</Message><Details>" + SENTENCE.encode() +
          b"</Details></Error>"), FORBIDDEN, ""),
        (refusal("ProvisionedThroughputExceededException", 400, SENTENCE), BUSY, "uploads go on"),
        ((413, PAGE), OTHER, "requests of 16 MiB"),
        ((502, PAGE), BUSY, "uploads go on"),
        ((403, f"RBAC: {SENTENCE}\n".encode()), FORBIDDEN, "a proxy in between"),
    ],
)  # fmt: skip
def test_server_is_quoted_by_every_operation_with_advice_where_its_code_is_known(
    tmp_path: Path, answer: Answer, reason: Reason, advice: str
) -> None:
    with serving(lambda *_: answer) as endpoint, opened(endpoint) as store:
        for operation in operations(store, tmp_path):
            with pytest.raises(RemoteError) as caught:
                operation()
            said = str(caught.value)
            assert (caught.value.reason, caught.value.retriable) == (reason, reason in (FULL, BUSY)), said
            if not (answer[0] == 301 and "HTTP 301" in said):  # obstore reads no body of a redirect
                assert SENTENCE[:-1] in said
            assert advice in said
            assert ("allow these" in said) == ("allow these" in advice)
            assert "\n" not in said


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("body", [PAGE, refusal("TemporaryRedirect", message=SENTENCE)[1]])
def test_redirect_to_another_host_is_named_with_it(status: int, body: bytes) -> None:
    """As of a proxy that wants HTTPS: it says nothing of a region."""
    answer = s3_errors.Answer(status, *s3_errors.read_page(body.decode()), elsewhere="https://s3.test")
    assert "sends requests on to https://s3.test" in str(s3_errors.of_answer(answer, "s3://b"))


class Elsewhere(QuietHandler):
    """Sends every request to another host."""

    asked = 0

    def redirect(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(302)
        self.send_header("Location", "https://s3.test/secret?token=1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = redirect  # noqa: N815


def test_redirects_are_not_followed_for_ever() -> None:
    """botocore looks for the bucket's region, by a request that is redirected as well."""
    with listening(Elsewhere) as endpoint, opened(endpoint) as store:
        with pytest.raises(RemoteError, match=r"sends requests on to https://s3\.test \(") as caught:
            store.check()
        assert not caught.value.retriable
    assert Elsewhere.asked < 9


@pytest.mark.parametrize(
    ("headers", "body", "said"),
    [
        ({"Content-Encoding": "gzip"}, gzip.compress(EMPTY_LIST), "Content-Encoding: gzip"),
        ({"Content-Type": "text/html"}, PAGE, SENTENCE),
    ],
    ids=["encoded", "a page of a login"],
)
def test_success_that_is_no_answer_of_s3_is_none(headers: dict[str, str], body: bytes, said: str) -> None:
    class Odd(QuietHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = answer  # noqa: N815

    with listening(Odd) as endpoint, opened(endpoint) as store:
        for operation in (store.check, store.versions):
            with pytest.raises(RemoteError, match="a proxy in between") as caught:
                operation()
            assert said.rstrip(".") in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"", b"<Error><Code>Odd</Code></Error>", b"<Error></Error>", b"\xff" * 99999]
)
def test_answer_without_a_sentence_is_named_by_what_it_has(tmp_path: Path, body: bytes) -> None:
    with serving(lambda *_: (400, body)) as endpoint, opened(endpoint) as store:
        for operation in operations(store, tmp_path):
            with pytest.raises(RemoteError, match="Odd" if b"Odd" in body else "HTTP 400|no text") as caught:
                operation()
            assert len(str(caught.value)) < 600


def test_credentials_in_a_servers_sentence_are_told_to_nobody() -> None:
    said = refusal("SignatureDoesNotMatch", 403, "signed with password=hunter2hunter2")
    with (
        serving(lambda *_: said) as endpoint,
        opened(endpoint) as store,
        pytest.raises(RemoteError) as caught,
    ):
        store.versions()
    assert "signed with" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def of_key(seen: Seen, word: str) -> bool:
    return word in seen.key


@pytest.mark.parametrize("code", ["KMS.ThrottlingException", "RequestThrottled", "BandwidthLimitExceeded"])
def test_moment_of_throttling_is_waited_out_by_reads_and_costs_no_checksums(
    proxy: Proxy, s3_client: Any, tmp_path: Path, code: str
) -> None:
    with opened(proxy.url) as store:
        throttled = Fault(answer=refusal(code, 400))
        first = [True]
        proxy.rule = lambda seen: throttled if of_key(seen, "/probe") and first and first.pop() else None
        with pytest.raises(RemoteError) as caught:
            store.check()
        assert caught.value.reason is Reason.UNREACHABLE
        store.check()
        artifact = store.put_artifact(0, VERSION, *sealed(tmp_path), None)
        assert [
            each.headers.get("x-amz-checksum-crc64nvme") for each in proxy.seen if of_key(each, "rank-0.s")
        ]
        often = [True] * 4
        proxy.rule = lambda seen: throttled if seen.method == "GET" and often and often.pop() else None
        into = bytearray(5)
        store.fetch(store._detailed(artifact), memoryview(into))
        assert bytes(into) == b"state"
        often += [True] * 4
        store.fetch(artifact, memoryview(into))


@pytest.mark.parametrize(
    ("answer", "conditional"),
    [
        (refusal("InvalidRequest", 400, SENTENCE), None),
        (refusal("NotImplemented", 501, SENTENCE), False),
        (refusal("InvalidArgument", 400, "Unsupported header If-None-Match"), False),
    ],
)
def test_only_who_says_so_is_taken_to_ignore_conditions(
    proxy: Proxy, s3_client: Any, answer: Answer, conditional: bool | None
) -> None:
    proxy.rule = lambda seen: Fault(answer=answer) if "if-none-match" in seen.headers else None
    with opened(proxy.url) as store:
        if conditional is None:
            with pytest.raises(RemoteError, match=SENTENCE[:-1]):
                store.check()
            assert not store.shortcomings["conditional create"]
        else:
            store.check()
            assert "If-None-Match" in store.shortcomings["conditional create"]


BROKEN = {
    "requests of 1 MiB at most": (
        lambda seen: (413, PAGE) if int(seen.headers.get("content-length", 0)) > 1024 * 1024 else None,
        {"upload in parts"},
        {"ranged reads"},
    ),
    "no parts": (
        lambda seen: refusal("NotImplemented", 501, SENTENCE) if "uploads" in seen.path else None,
        {"upload in parts"},
        {"ranged reads"},
    ),
    "no reads": (
        lambda seen: (
            refusal("AccessDenied") if seen.method == "GET" and "list-type" not in seen.path else None
        ),
        {"ranged reads"},
        set(),
    ),
    "reads that are not served": (
        lambda seen: (
            refusal("MethodNotAllowed", 405)
            if seen.method == "GET" and "list-type" not in seen.path
            else None
        ),
        {"ranged reads"},
        {"delete"},
    ),
    "no new objects": (
        lambda seen: refusal("AccessDenied") if seen.method == "PUT" and "/check/" in seen.path else None,
        {"conditional create", "upload in parts"},
        {"ranged reads", "listing after write", "clock", "delete"},
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_check_that_fails_blames_no_later_one(proxy: Proxy, s3_client: Any, fault: str) -> None:
    rule, failed, skipped = BROKEN[fault]
    proxy.rule = lambda seen: Fault(answer=found) if (found := rule(seen)) else None
    findings = list(examine_place(S3Place(proxy.url, s3_client).settings()))
    assert [each.name for each in findings] == ALL
    assert {each.name for each in findings if not each.ok} == failed
    assert {each.name for each in findings if not each.tried} == skipped
    assert all("not tried" in each.message for each in findings if not each.tried)


def test_refusal_of_what_does_not_exist_counts_as_absence_where_the_prefix_may_be_listed(
    proxy: Proxy, s3_client: Any, tmp_path: Path
) -> None:
    """As radosgw and others answer where a policy allows to list one prefix only."""

    def hides_absence(seen: Seen) -> Fault | None:
        if seen.method != "GET" or "?" in seen.path:
            return None
        found = s3_client.list_objects_v2(Bucket=BUCKET, Prefix=unquote(seen.key).split("/", 2)[2])
        return None if found["KeyCount"] else Fault(answer=refusal("AccessDenied"))

    proxy.rule = hides_absence
    with opened(proxy.url) as store:
        store.check()
        artifact = save(store, tmp_path, VERSION).artifacts[0]
        assert fetched(store, artifact) == b"state"
        assert all(each.ok and each.tried for each in store.examine())
        s3_client.delete_object(Bucket=BUCKET, Key=f"{store.job}/{artifact.key}")
        with pytest.raises(RemoteCorrupt, match="is missing"):
            fetched(store, artifact)
        proxy.rule = lambda seen: Fault(answer=refusal("AccessDenied")) if seen.method == "GET" else None
        with pytest.raises(RemoteError, match="allow these credentials") as caught:
            store.read_manifest(VERSION)
        assert caught.value.reason is FORBIDDEN


def test_answer_that_ends_in_mid_body_is_asked_for_again_and_is_no_weakness_of_the_store(
    proxy: Proxy, s3_client: Any, tmp_path: Path
) -> None:
    asked: Counter[str] = Counter()

    def breaks(seen: Seen) -> Fault | None:
        asked[seen.key] += seen.method == "GET"
        broken = seen.method == "GET" and seen.key.endswith(".json") and (lasting or asked[seen.key] % 2)
        return Fault(half=True) if broken else None

    lasting, proxy.rule = False, breaks
    with opened(proxy.url) as store:
        artifact = save(store, tmp_path, VERSION).artifacts[0]
        assert fetched(store, artifact) == b"state"
        lasting = True
        with pytest.raises(RemoteError, match="does not answer") as caught:
            store.read_manifest(VERSION)
        assert (caught.value.reason, caught.value.retriable) == (BUSY, True)


def test_version_in_an_archive_is_named_and_ends_no_upload(
    proxy: Proxy, s3_client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    archived = Fault(answer=refusal("InvalidObjectState", 403, SENTENCE))
    with opened(proxy.url) as store:
        artifact = store.put_artifact(0, VERSION, *sealed(tmp_path), None)
        proxy.rule = lambda seen: archived if seen.method == "GET" and "list-type" not in seen.path else None
        store.check()
        for operation in (
            lambda: store.fetch(artifact, memoryview(bytearray(5))),
            lambda: store.read_manifest(VERSION),
        ):
            with pytest.raises(RemoteError, match="archive") as caught:
                operation()
            assert caught.value.reason is Reason.ARCHIVED


def test_version_that_is_listed_in_an_archive_is_told_until_it_is_brought_back(
    s3_endpoint: str, s3_client: Any, tmp_path: Path
) -> None:
    with opened(s3_endpoint) as store:
        artifact = store.put_artifact(0, VERSION, *sealed(tmp_path), None)
        store.commit(Manifest(store.job, "uid", VERSION, 1, (artifact,), 1.0))
        place = {"Bucket": BUCKET, "Key": f"{store.job}/{artifact.key}"}
        s3_client.copy_object(**place, CopySource=place, StorageClass="GLACIER")
        for look in (lambda: list(store.examine()), lambda: store.retain(1, frozenset())):
            look()
            assert f"{VERSION}; bring it back" in store.shortcomings["archive"]
        s3_client.restore_object(**place, RestoreRequest={"Days": 1})
        store.retain(1, frozenset())
        assert store.shortcomings["archive"] == ""


RULE = {"ID": "a", "Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}


@pytest.mark.parametrize("prefix", [None, "", "tea", "other"])
def test_bucket_that_keeps_old_versions_needs_a_rule_that_ends_them(
    proxy: Proxy, s3_client: Any, prefix: str | None
) -> None:
    s3_client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    if prefix is not None:
        rules = [{**RULE, "Filter": {"Prefix": prefix}}]
        s3_client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": rules})
    settings = S3Place(proxy.url, s3_client).settings()
    broken = {each.name: each.message for each in examine_place(settings) if not each.ok}
    assert broken.keys() == (set() if prefix in ("", "tea") else {"delete"})
    assert all("NoncurrentVersionExpiration" in message for message in broken.values())
    denied = Fault(answer=refusal("AccessDenied", 403, SENTENCE))
    proxy.rule = lambda seen: denied if "lifecycle" in seen.path else None
    (last,) = [each for each in examine_place(settings) if each.name == "delete"]
    assert last.ok, "nobody knows"
    assert "NoncurrentVersionExpiration" in last.message
    for kind in ("Versions", "DeleteMarkers"):
        for entry in s3_client.list_object_versions(Bucket=BUCKET).get(kind, ()):
            s3_client.delete_object(Bucket=BUCKET, Key=entry["Key"], VersionId=entry["VersionId"])


def test_empty_bucket_of_another_region_is_named_with_its_region() -> None:
    def elsewhere(method: str, path: str, headers: dict[str, str]) -> Answer:
        if "list-type" in path:
            return 200, EMPTY_LIST
        said = "<Code>AuthorizationHeaderMalformed</Code><Message>wrong</Message><Region>eu-west-3</Region>"
        return 400, f"<Error>{said}</Error>".encode()

    with (
        serving(elsewhere) as endpoint,
        opened(endpoint) as store,
        pytest.raises(RemoteError, match=r"set tiers\.remote\.s3\.region: eu-west-3"),
    ):
        store.check()


GIB = 2**30
LIMIT = 2**20
V = Version(100, 1)


class Zeros:
    """A store whose every answer is 10 GiB of zeros, and that counts what it got rid of."""

    def __init__(self, claims_length: bool, status: int) -> None:
        self.claims_length, self.status, self.sent = claims_length, status, 0


@contextlib.contextmanager
def pouring(zeros: Zeros) -> Iterator[str]:
    class Handler(QuietHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(zeros.status)
            self.send_header(
                *(("Content-Length", str(10 * GIB)) if zeros.claims_length else ("Connection", "close"))
            )
            self.end_headers()
            piece = bytes(LIMIT)
            with contextlib.suppress(OSError):
                while zeros.sent < 10 * GIB:
                    self.wfile.write(piece)
                    zeros.sent += len(piece)
            self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815

    with listening(Handler) as url:
        yield url


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("claims_length", [True, False])
@pytest.mark.parametrize("verb", ["versions", "read_manifest", "check"])
def test_ten_gibibytes_of_zeros_are_not_read(verb: str, claims_length: bool, status: int) -> None:
    zeros = Zeros(claims_length, status)
    with pouring(zeros) as url:
        settings = json.dumps({"s3": {"bucket": "b", "prefix": "p", "endpoint": url, "region": "us-east-1"}})
        store = open_store(settings, JOB)
        with contextlib.closing(store), pytest.raises(RemoteError):
            getattr(store, verb)(*([V] if verb == "read_manifest" else []))
    assert zeros.sent < 200 * LIMIT, "what is under way in buffers, and a few tries"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[tuple[DirectoryPlace, RemoteStore]]:
    place = DirectoryPlace(tmp_path / "store")
    store = open_store(place.settings(), JOB)
    yield place, store
    store.close()


def test_file_that_has_grown_is_not_read_either(
    directory: tuple[DirectoryPlace, RemoteStore], tmp_path: Path
) -> None:
    place, store = directory
    save(store, tmp_path, V)
    for kind in ("manifests", ".json"):
        for name in [each for each in place.names() if kind in each]:
            path = place.root / name
            body = path.read_bytes()
            os.truncate(path, 10 * GIB)
            with pytest.raises(
                RemoteCorrupt, match=f"{path.name} has more than {LIMIT} bytes; it was not read"
            ):
                read_all(store)
            path.write_bytes(body)
    read_all(store)


def read_all(store: RemoteStore) -> None:
    store.ownership.owner()
    for artifact in store.read_manifest(V).artifacts:
        store.artifact(artifact.rank, V)


def test_what_is_no_file_of_bytes_keeps_nobody_waiting(
    directory: tuple[DirectoryPlace, RemoteStore], tmp_path: Path
) -> None:
    place, store = directory
    save(store, tmp_path, V)
    (name,) = [each for each in place.names() if "manifests" in each]
    path = place.root / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RemoteError):
        store.read_manifest(V)


def test_objects_up_to_the_limit_are_read(s3_server: tuple[str, Any], tmp_path: Path) -> None:
    store = open_store(S3Place(*s3_server).settings(), JOB)
    with contextlib.closing(store):
        save(store, tmp_path, V)
        assert store.versions() == [V]
        assert fetched(store, store.artifact(0, V)) == b"state"
