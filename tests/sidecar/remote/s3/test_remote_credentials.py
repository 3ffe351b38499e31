"""Credentials and certificates are found where boto3 finds them, and both clients use them."""

from __future__ import annotations

import contextlib
import datetime
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import ReadOnlyCredentials

from tests.sidecar.remote.remote_places import BUCKET, S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import EMPTY_LIST, Answer, Proxy, Seen, refusal, serving
from tests.sidecar.remote.test_remote_conformance import JOB, fetched, save
from tiercheck.protocol.version import Version
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_sidecar.remote import Reason, RemoteError, open_store
from tiercheck_sidecar.remote.errors import ignore
from tiercheck_sidecar.remote.s3.s3_transfers import Transfers


@pytest.fixture
def proxy(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
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
    proxy: Proxy, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "credentials"
    shared.write_text("[team]\naws_access_key_id = of-the-profile\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert used_by_everything(proxy, s3_client, tmp_path) == {"of-the-profile"}


def test_web_identity_of_the_pod_is_exchanged_for_temporary_keys(
    proxy: Proxy, s3_client: Any, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-service-account")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3_endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    (key,) = used_by_everything(proxy, s3_client, tmp_path)
    assert key.startswith("ASIA"), "temporary keys"
    assert all(each.headers.get("x-amz-security-token") for each in proxy.seen)


def test_endpoint_and_keys_of_the_environment_are_used_by_both_ways(
    proxy: Proxy, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    store = open_store('{"s3": {"bucket": "checkpoints", "prefix": "team"}}', JOB)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    manifest = save(store, tmp_path, Version(1, 1), b"state")
    assert fetched(store, manifest.artifacts[0]) == b"state"
    store.close()
    assert all("Credential=of-the-secret/" in each.headers["authorization"] for each in proxy.seen)


def test_temporary_keys_that_boto3_renewed_are_used_from_then_on(proxy: Proxy, s3_client: Any) -> None:
    current = ["first"]

    class Renewing:
        def get_frozen_credentials(self) -> ReadOnlyCredentials:
            return ReadOnlyCredentials(current[0], "secret", None)

    config = {
        "bucket": BUCKET,
        "region": "us-east-1",
        "aws_endpoint_url_s3": f"{proxy.url}/{BUCKET}",
        "virtual_hosted_style_request": True,
    }
    transfers = Transfers(config, {"allow_http": True}, Renewing(), "s3://here", threading.Event())
    into = memoryview(bytearray(5))
    transfers.send("x", b"state")
    assert transfers.receive("x", 0, into, ignore) == 5
    current[0] = "second"
    transfers.send("x", b"state")
    assert transfers.receive("x", 0, into, ignore) == 5
    assert [key_of(each) for each in proxy.seen] == ["first", "first", "second", "second"]


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
