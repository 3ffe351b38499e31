"""Credentials are found where boto3 finds them, and both ways to the bucket use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import Proxy, proxying
from remote_places import S3Place
from test_remote_conformance import JOB, Slots, fetched, save

from tiercheck.protocol.version import Version
from tiercheck_sidecar.remote import open_store


@pytest.fixture
def proxy(s3_endpoint: str, s3_client: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with proxying(s3_endpoint) as proxy:
        yield proxy


def used_by_everything(proxy: Proxy, client: Any, folder: Path) -> set[str]:
    """Upload and read; the access keys that requests were signed with."""
    store = open_store(S3Place(proxy.url, client).settings(), JOB)
    manifest = save(store, Slots(folder), Version(1, 1), b"state")
    assert fetched(store, manifest.artifacts[0]) == b"state"
    store.close()
    signed = [each.headers["authorization"] for each in proxy.seen]
    assert any(each.method == "PUT" and each.key.endswith(".safetensors") for each in proxy.seen)
    return {line.partition("Credential=")[2].partition("/")[0] for line in signed}


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
    manifest = save(store, Slots(tmp_path), Version(1, 1), b"state")
    assert fetched(store, manifest.artifacts[0]) == b"state"
    store.close()
    assert all("Credential=of-the-secret/" in each.headers["authorization"] for each in proxy.seen)
