"""What the owners of real buckets demand of each request can be set, and both clients then do it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sidecar.remote.remote_places import BUCKET, sealed
from tests.sidecar.remote.s3.faulty_proxy import Fault, Proxy, Seen, refusal
from tests.sidecar.remote.test_remote_trouble import VERSION, opened
from tiercheck.protocol.version import Manifest
from tiercheck_sidecar.remote import S3_FIELDS, RemoteError, examine_place, preflight
from tiercheck_sidecar.remote.preflight import CHUNK
from tiercheck_sidecar.remote.s3 import s3_multipart

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
    "its name in the host, behind a proxy": (
        {"addressing": "Virtual", "endpoint": "http://s3.test"},
        lambda seen: seen.headers["host"] == f"{BUCKET}.s3.test",
    ),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart, "PART", 5 * CHUNK)
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


def test_upload_that_goes_on_carries_what_a_lock_demands(
    proxy: Proxy, s3_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = memoryview(bytes(11 * CHUNK))
    with opened(proxy.url) as store:
        key = store._objects._key("artifacts/x")  # type: ignore[attr-defined]
        upload = s3_client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        part = {"Bucket": BUCKET, "Key": key, "UploadId": upload, "PartNumber": 1}
        s3_client.upload_part(**part, Body=content[: 5 * CHUNK].tobytes())
        _, meets = DEMANDS["checksums, as a lock does"]
        proxy.rule = lambda seen: None if meets(seen) else Fault(answer=refusal("InvalidRequest", 400))
        store._objects.upload("artifacts/x", content, CHUNK, lambda *_: None)
    assert proxy.parts() == [2, 3]


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
    definition = yaml.safe_load(Path("crds/tiercheckjobs.yaml").read_text())
    node = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in ("tiers", "remote", "s3"):
        node = node["properties"][name]
    of_the_pod = {"credentialsSecretName", "caBundleConfigMap"}
    assert node["properties"].keys() - of_the_pod == set(S3_FIELDS)
