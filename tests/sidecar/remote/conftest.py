"""S3 servers and a shared directory, each as the sidecar is told of it: one JSON text.

radosgw takes part where TIERCHECK_RADOSGW names one that runs (`make radosgw-test`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.loaders import create_loader
from botocore.retries.standard import ExponentialBackoff
from moto.server import ThreadedMotoServer

from tests.sidecar.remote import radosgw
from tests.sidecar.remote.remote_places import BUCKET, DirectoryPlace, Place, S3Place
from tests.sidecar.remote.s3.faulty_proxy import Proxy, proxying
from tests.sidecar.world import until
from tiercheck_sidecar.remote.s3 import s3_ranges, s3_transfers


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_CA_BUNDLE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_transfers, "BACKOFF", (0.01, 0.01))
    monkeypatch.setattr(s3_ranges, "BACKOFF", (0.01, 0.01))
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.001)


@pytest.fixture(scope="session", autouse=True)
def botocore_reads_its_models_once() -> Iterator[None]:
    """And not for each client anew, which was most of what the tests of a few objects took."""
    with mock.patch("botocore.session.create_loader", cache(create_loader)):
        yield


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_client(s3_endpoint: str) -> Iterator[Any]:
    """boto3 with an empty bucket, to look behind the store's back."""
    yield from _with_bucket(s3_endpoint)


@pytest.fixture(params=["moto", "radosgw"])
def s3_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """Endpoint and client of each S3 server in turn."""
    if request.param == "radosgw":
        endpoint = _radosgw(monkeypatch)
        for client in _with_bucket(endpoint):
            yield endpoint, client
    else:
        yield request.getfixturevalue("s3_endpoint"), request.getfixturevalue("s3_client")


@pytest.fixture
def proxy(s3_endpoint: str, s3_client: Any) -> Iterator[Proxy]:
    """Passes requests on to a server that has an empty bucket."""
    with proxying(s3_endpoint) as proxy:
        yield proxy


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    """A worker's memory volume."""
    folder = tmp_path / "slots"
    folder.mkdir()
    return folder


@pytest.fixture(params=["s3", "directory", "radosgw"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    if kind == "radosgw":
        endpoint = _radosgw(monkeypatch)
        for client in _with_bucket(endpoint):
            yield S3Place(endpoint, client)
    elif kind == "s3":
        yield S3Place(request.getfixturevalue("s3_endpoint"), request.getfixturevalue("s3_client"))
    else:
        yield DirectoryPlace(tmp_path / "shared")


def _radosgw(monkeypatch: pytest.MonkeyPatch) -> str:
    endpoint = os.environ.get("TIERCHECK_RADOSGW", "")
    if not endpoint:
        pytest.skip("no radosgw runs here; make radosgw-test installs and starts one")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", radosgw.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", radosgw.SECRET_KEY)
    return endpoint


def _with_bucket(endpoint: str) -> Iterator[Any]:
    session = boto3.Session(region_name="us-east-1")
    client = session.client("s3", endpoint_url=endpoint, config=Config(s3={"addressing_style": "path"}))
    client.create_bucket(Bucket=BUCKET)
    yield client
    until(lambda: _is_removed(client), "the bucket to stay empty")
    client.close()


def _is_removed(client: Any) -> bool:
    """False: somebody wrote meanwhile. The server may still be at a request whose sender was ended."""
    for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        with contextlib.suppress(client.exceptions.NoSuchUpload):  # whoever made it has just ended it
            client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for entry in page.get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    try:
        client.delete_bucket(Bucket=BUCKET)
    except ClientError as error:
        if error.response["Error"]["Code"] != "BucketNotEmpty":
            raise
        return False
    return True
