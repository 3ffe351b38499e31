"""Both S3 clients reach a bucket of a private authority with its certificate only."""

from __future__ import annotations

import datetime
import json
import ssl
from pathlib import Path

import pytest
import xxhash

from tests.sidecar.remote.s3.odd_servers import EMPTY_LIST, Answer, refusal, serving
from tiercheck.protocol.manifest import Digests
from tiercheck.protocol.version import Version
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_sidecar.remote import Reason, RemoteError, open_store


class Authority:
    """A private authority with one server certificate for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        pair = issue_pair("private authority", ["127.0.0.1"], datetime.timedelta(hours=1))
        self.bundle = folder / "authority.pem"
        self.bundle.write_bytes(pair.ca)
        chain, secret = folder / "server.pem", folder / "server.key"
        chain.write_bytes(pair.certificate)
        secret.write_bytes(pair.key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(chain, secret)


def bucket(method: str, path: str, headers: dict[str, str]) -> Answer:
    if method == "PUT":
        return 200, b""
    return (200, EMPTY_LIST) if "list-type" in path else refusal("NoSuchKey", 404)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def settings(endpoint: str, **more: str) -> str:
    return json.dumps({"s3": {"bucket": "checkpoints", "endpoint": endpoint, **more}})


@pytest.mark.parametrize("given_as", ["text", "path", "environment"])
def test_private_authority_is_trusted_when_given(
    authority: Authority, tmp_path: Path, given_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = tmp_path / "slot"
    slot.write_bytes(b"state")
    more = {"text": {"caBundle": authority.bundle.read_text()}, "path": {"caBundle": str(authority.bundle)}}
    if given_as == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    with serving(bucket, authority.context) as endpoint:
        store = open_store(settings(endpoint, **more.get(given_as, {})), "research/gpt")
        store.check()
        store.put_artifact(
            0, Version(1, 1), slot, Digests(5, 5, (xxhash.xxh3_128_hexdigest(b"state"),)), None
        )
        store.close()


def test_unknown_authority_is_named_by_both_clients(authority: Authority) -> None:
    with serving(bucket, authority.context) as endpoint:
        store = open_store(settings(endpoint), "research/gpt")
        for operation in (
            store.check,
            lambda: store._objects.read_into("artifacts/x", 0, memoryview(bytearray(5))),
        ):
            with pytest.raises(RemoteError, match="caBundle") as caught:
                operation()
            assert caught.value.reason is Reason.UNREACHABLE
        store.close()
