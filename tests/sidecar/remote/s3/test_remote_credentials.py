"""Credentials and certificates are found where boto3 finds them, and both clients use them.

What the owners of real buckets demand of each request can be set, and both clients then do it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.credentials import ReadOnlyCredentials
from botocore.httpsession import URLLib3Session

from tests.sidecar.remote.remote_places import BUCKET, S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import EMPTY_LIST, Answer, Fault, Proxy, Seen, refusal, serving
from tests.sidecar.remote.test_remote_conformance import JOB, fetched, save
from tests.sidecar.remote.test_remote_trouble import VERSION, opened
from tiercheck.protocol.version import Manifest, Version
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_sidecar.remote import S3_FIELDS, Reason, RemoteError, examine_place, open_store, preflight
from tiercheck_sidecar.remote.errors import ignore
from tiercheck_sidecar.remote.preflight import CHUNK
from tiercheck_sidecar.remote.s3 import s3
from tiercheck_sidecar.remote.s3.s3_ranges import RangeReader
from tiercheck_sidecar.remote.s3.s3_transfers import Transfers
from tiercheck_sidecar.remote.store import RemoteStore


@pytest.fixture
def keyless(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return proxy


def used_by_everything(proxy: Proxy, client: Any, folder: Path) -> set[str]:
    """Upload and read; the access keys that requests were signed with."""
    store = open_store(S3Place(proxy.url, client).settings(), JOB)
    manifest = save(store, folder, Version(1, 1), b"state")
    assert fetched(store, manifest.artifacts[0]) == b"state"
    store.close()
    assert any(each.method == "PUT" and each.key.endswith(".safetensors") for each in proxy.seen)
    return {key_of(each) for each in proxy.seen}


def key_of(seen: Seen) -> str:
    """The access key that a request was signed with."""
    return seen.headers["authorization"].partition("Credential=")[2].partition("/")[0]


def test_profile_of_the_shared_files_is_used(
    keyless: Proxy, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "credentials"
    shared.write_text("[team]\naws_access_key_id = of-the-profile\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert used_by_everything(keyless, s3_client, tmp_path) == {"of-the-profile"}


def test_web_identity_of_the_pod_is_exchanged_for_temporary_keys(
    keyless: Proxy, s3_client: Any, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-service-account")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3_endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    (key,) = used_by_everything(keyless, s3_client, tmp_path)
    assert key.startswith("ASIA"), "temporary keys"
    assert all(each.headers.get("x-amz-security-token") for each in keyless.seen)


def test_endpoint_and_keys_of_the_environment_are_used_by_both_ways(
    keyless: Proxy, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", keyless.url)
    store = open_store('{"s3": {"bucket": "checkpoints", "prefix": "team"}}', JOB)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    manifest = save(store, tmp_path, Version(1, 1), b"state")
    assert fetched(store, manifest.artifacts[0]) == b"state"
    store.close()
    assert all("Credential=of-the-secret/" in each.headers["authorization"] for each in keyless.seen)


def test_temporary_keys_that_boto3_renewed_are_used_from_then_on(keyless: Proxy, s3_client: Any) -> None:
    current = ["first"]

    class Renewing:
        def get_frozen_credentials(self) -> ReadOnlyCredentials:
            return ReadOnlyCredentials(current[0], "secret", None)

    config = {
        "bucket": BUCKET,
        "region": "us-east-1",
        "aws_endpoint_url_s3": f"{keyless.url}/{BUCKET}",
        "virtual_hosted_style_request": True,
    }
    closed = threading.Event()
    transfers = Transfers(config, {"allow_http": True}, Renewing(), "s3://here", closed)
    ranges = RangeReader(URLLib3Session(), config, Renewing(), "s3://here", closed)  # type: ignore[arg-type]
    into = memoryview(bytearray(5))
    transfers.send("x", b"state")
    assert ranges.read_into("x", 0, into, ignore) == 5
    current[0] = "second"
    transfers.send("x", b"state")
    assert ranges.read_into("x", 0, into, ignore) == 5
    assert [key_of(each) for each in keyless.seen] == ["first", "first", "second", "second"]


def test_proxy_of_the_environment_carries_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        asked.append((method, path))
        return (200, EMPTY_LIST) if method == "PUT" or "list-type" in path else refusal("NoSuchKey", 404)

    with serving(answer) as url:
        monkeypatch.setenv("HTTP_PROXY", url)
        settings = '{"s3": {"bucket": "checkpoints", "endpoint": "http://store.invalid"}}'
        with contextlib.closing(open_store(settings, JOB)) as store:
            store.check()
            store.put_artifact(0, Version(1, 1), *sealed(tmp_path, b"state"), None)
            assert store._objects.read_into("artifacts/x", 0, memoryview(bytearray(5))) == 0
    assert all(path.startswith("http://store.invalid/checkpoints") for _, path in asked)
    assert [method for method, path in asked if path.endswith(".safetensors")] == ["PUT"]
    assert [method for method, path in asked if path.endswith("artifacts/x")] == ["GET"]


# A private authority


def bucket(method: str, path: str, headers: dict[str, str]) -> Answer:
    if method == "PUT":
        return 200, b""
    return (200, EMPTY_LIST) if "list-type" in path else refusal("NoSuchKey", 404)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """Its bundle, beside the server's certificate and key."""
    pair = issue_pair("private authority", ["127.0.0.1"], datetime.timedelta(days=1))
    for name, content in (("ca.crt", pair.ca), ("tls.crt", pair.certificate), ("tls.key", pair.key)):
        (tmp_path / name).write_bytes(content)
    return tmp_path / "ca.crt"


@contextlib.contextmanager
def serving_privately(authority: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.with_name("tls.crt"), authority.with_name("tls.key"))
    with serving(bucket, context) as endpoint:
        yield endpoint


def settings(endpoint: str, **more: str) -> str:
    return json.dumps({"s3": {"bucket": "checkpoints", "endpoint": endpoint, **more}})


@pytest.mark.parametrize("given_as", ["text", "path", "environment"])
def test_private_authority_is_trusted_when_given(
    authority: Path, tmp_path: Path, given_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"text": {"caBundle": authority.read_text()}, "path": {"caBundle": str(authority)}}
    if given_as == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
    with serving_privately(authority) as endpoint:
        store = open_store(settings(endpoint, **more.get(given_as, {})), "research/gpt")
        store.check()
        store.put_artifact(0, Version(1, 1), *sealed(tmp_path), None)
        store.close()


def test_unknown_authority_is_named_by_both_clients(authority: Path) -> None:
    with serving_privately(authority) as endpoint:
        store = open_store(settings(endpoint), "research/gpt")
        for operation in (
            store.check,
            lambda: store._objects.read_into("artifacts/x", 0, memoryview(bytearray(5))),
        ):
            with pytest.raises(RemoteError, match="caBundle") as caught:
                operation()
            assert caught.value.reason is Reason.UNREACHABLE
        store.close()


KEY = "arn:aws:kms:us-east-1:1:key/k"
SSE, SSE_KEY = "x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id"


def makes(seen: Seen) -> bool:
    """Whether the request makes an object, or begins to."""
    return not seen.part and (seen.method == "PUT" or seen.path.endswith("?uploads"))


def with_headers(**wanted: str) -> Callable[[Seen], bool]:
    return lambda seen: (
        not makes(seen)
        or all(seen.headers.get(name.replace("_", "-")) == value for name, value in wanted.items())
    )


DEMANDS: dict[str, tuple[dict[str, Any], Callable[[Seen], bool]]] = {
    "keys of the store": ({"encryption": {"type": "SSE-S3"}}, with_headers(**{SSE: "AES256"})),
    "a key of KMS": (
        {"encryption": {"type": "SSE-KMS", "kmsKeyId": KEY}},
        with_headers(**{SSE: "aws:kms", SSE_KEY: KEY}),
    ),
    "that the requester pays": (
        {"requesterPays": True},
        lambda seen: seen.headers.get("x-amz-request-payer") == "requester",
    ),
    "a storage class": (
        {"storageClass": "STANDARD_IA"},
        with_headers(**{"x-amz-storage-class": "STANDARD_IA"}),
    ),
    "checksums, as a lock does": (
        {},
        lambda seen: (
            seen.method != "PUT"
            or "content-md5" in seen.headers
            or any(name.startswith("x-amz-checksum-") for name in seen.headers)
        ),
    ),
    "a storage class and MD5, as an old lock does": (
        {"storageClass": "STANDARD_IA"},
        lambda seen: (
            with_headers(**{"x-amz-storage-class": "STANDARD_IA"})(seen)
            and (seen.method != "PUT" or "content-md5" in seen.headers)
        ),
    ),
    "its name in the host, behind a proxy": (
        {"addressing": "Virtual", "endpoint": "http://s3.test"},
        lambda seen: seen.headers["host"] == f"{BUCKET}.s3.test",
    ),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART", 5 * CHUNK)
    monkeypatch.setattr(preflight, "SIZE", 11 * CHUNK)


def is_signed(seen: Seen) -> bool:
    """AWS refuses what is not."""
    signed = re.search("SignedHeaders=([^,]*)", seen.headers.get("authorization", ""))
    ours = {name for name in seen.headers if name.startswith("x-amz-")}
    return signed is not None and ours <= set(signed[1].split(";"))


@pytest.mark.parametrize("demand", DEMANDS)
def test_bucket_that_demands_something_is_used_as_any_other(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demand: str
) -> None:
    more, meets = DEMANDS[demand]
    refused = Fault(answer=refusal("InvalidRequest", 400, demand))
    proxy.rule = lambda seen: None if meets(seen) and is_signed(seen) else refused
    if "endpoint" in more:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
    settings = {"endpoint": proxy.url, **more}
    assert [each.message for each in examine_place(of(settings)) if not each.ok] == []
    with opened(**settings) as store:
        store.begin_attempt("uid", 1)
        artifact = store.put_artifact(0, VERSION, *sealed(tmp_path), None)
        assert store.commit(Manifest(store.job, "uid", VERSION, 1, (artifact,), 1.0))
        into = bytearray(5)
        store.fetch(store.artifact(0, store.versions()[-1]), memoryview(into))
        assert bytes(into) == b"state"
    if more:
        for name in more.keys() - {"endpoint"}:
            del settings[name]
        with opened(**settings) as store, pytest.raises(RemoteError, match=demand):
            store.check()


def of(settings: dict[str, Any]) -> str:
    return json.dumps({"s3": {"bucket": BUCKET, **settings}})


CONTENT = memoryview(bytes(11 * CHUNK))


def begin_upload(s3_client: Any, store: RemoteStore) -> None:
    """Leaves an upload with the first of three parts."""
    key = store._objects._key("artifacts/x")  # type: ignore[attr-defined]
    upload = s3_client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    part = {"Bucket": BUCKET, "Key": key, "UploadId": upload, "PartNumber": 1}
    s3_client.upload_part(**part, Body=CONTENT[: 5 * CHUNK].tobytes())


def test_upload_that_goes_on_carries_what_a_lock_demands(
    proxy: Proxy, s3_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(proxy.url) as store:
        begin_upload(s3_client, store)
        _, meets = DEMANDS["checksums, as a lock does"]
        proxy.rule = lambda seen: None if meets(seen) else Fault(answer=refusal("InvalidRequest", 400))
        store._objects.upload("artifacts/x", CONTENT, CHUNK, lambda *_: None)
    assert proxy.parts() == [2, 3]


def test_proxy_that_takes_the_etag_of_a_part_is_named(
    s3_endpoint: str, s3_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(s3_endpoint) as store:
        begin_upload(s3_client, store)
        monkeypatch.setattr(store._objects._clients().boto, "upload_part", lambda **_: {})  # type: ignore[attr-defined]
        with pytest.raises(RemoteError, match=r"without an ETag.*a proxy in between"):
            store._objects.upload("artifacts/x", CONTENT, CHUNK, lambda *_: None)


@pytest.mark.parametrize("excluded", ["127.0.0.0/8", "10.0.0.0/8, 127.0.0.0/30", "localhost,127.0.0.1"])
def test_network_in_no_proxy_is_called_directly(
    s3_endpoint: str, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excluded: str
) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", excluded)
    monkeypatch.setenv("no_proxy", excluded)
    with opened(s3_endpoint) as store:
        store.check()
        store.put_artifact(0, VERSION, *sealed(tmp_path), None)


def test_proxy_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "")
    with opened("http://s3.test") as store, pytest.raises(RemoteError, match="NO_PROXY"):
        store.check()


def test_every_field_of_a_bucket_is_known_to_the_sidecar() -> None:
    definition = yaml.load(Path("crds/tiercheckjobs.yaml").read_text(), yaml.CSafeLoader)
    node = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in ("tiers", "remote", "s3"):
        node = node["properties"][name]
    of_the_pod = {"credentialsSecretName", "caBundleConfigMap"}
    assert node["properties"].keys() - of_the_pod == set(S3_FIELDS)
