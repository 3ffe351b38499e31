"""A job's credentials let its own parts talk and keep strangers out, shown by real TLS handshakes."""

from __future__ import annotations

import ssl
from pathlib import Path

import kubernetes_validate
import pytest

from tests.operator.manifests.test_pod_manifest import make_job
from tiercheck.protocol.names import TLS_SERVER_NAME
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.manifests.owned import Credentials, build_secret, parse_secret


def handshake(server: Credentials, trusted: Credentials, name: str, folder: Path) -> None:
    """Client and server in memory. Raises ssl.SSLError as the client would."""
    (folder / "crt").write_bytes(server.certificate)
    (folder / "key").write_bytes(server.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=trusted.ca.decode()).wrap_bio(
        to_client, to_server, server_hostname=name
    )
    listener = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, listener):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() in ("TLSv1.2", "TLSv1.3")


def test_operator_and_sidecar_of_a_job_trust_each_other(tmp_path: Path) -> None:
    credentials = issue("u-1")
    handshake(credentials, credentials, TLS_SERVER_NAME, tmp_path)


def test_sidecar_of_another_job_is_a_stranger(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(issue("u-1"), issue("u-2"), TLS_SERVER_NAME, tmp_path)


def test_certificate_is_good_for_the_sidecars_name_only(tmp_path: Path) -> None:
    credentials = issue("u-1")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(credentials, credentials, "example.com", tmp_path)


def test_every_job_has_its_own_token() -> None:
    first, second = issue("u-1").token, issue("u-1").token
    assert first != second
    assert len(first) >= 40


def test_credentials_survive_their_secret() -> None:
    credentials = issue("u-1")
    secret = build_secret(make_job(), credentials)
    kubernetes_validate.validate(secret, "1.33", strict=True)
    assert parse_secret(secret) == credentials
    assert b"PRIVATE KEY" not in credentials.ca + credentials.certificate, "the authority's key is nowhere"


def test_secret_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="not a credentials Secret"):
        parse_secret({"data": {"token": "eA=="}})
