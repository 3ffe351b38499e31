"""Settings that cannot work are refused with a sentence before anything is contacted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tiercheck_sidecar.remote import RemoteConfigError, open_store

S3 = {"bucket": "b", "prefix": "p", "region": "eu-west-1", "endpoint": "https://127.0.0.1:9000"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("{", "cannot be read"),
        ({}, "exactly one of s3 and directory"),
        ({"s3": S3, "directory": {"path": "/x"}}, "exactly one of s3 and directory"),
        ({"s3": {"prefix": "p"}}, "bucket"),
        ({"s3": {**S3, "bucket": ""}}, "bare name"),
        ({"s3": {**S3, "bucket": "s3://b"}}, "bare name"),
        ({"s3": {**S3, "endpoint": "127.0.0.1:9000"}}, "http:// or https://"),
        ({"s3": {**S3, "prefix": "a/../b"}}, '".."'),
        ({"s3": {**S3, "prefix": "a\nb"}}, "control characters"),
        ({"s3": {**S3, "bucket": 7}}, "str"),
        ({"s3": {**S3, "addressing": "path"}}, "addressing"),
        ({"s3": {**S3, "encryption": {"type": "SSE-C"}}}, "encryption"),
        ({"s3": {**S3, "storageClass": "DEEP_ARCHIVE"}}, "archive"),
        ({"directory": {"path": "relative"}}, "absolute"),
        ({"directory": {}}, "path"),
        ({"directory": {"path": "/x", "subPath": "../y"}}, "subPath"),
    ],
)
def test_unusable_settings_are_refused_with_a_sentence(settings: object, sentence: str) -> None:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    with pytest.raises(RemoteConfigError, match=sentence):
        open_store(text, "research/gpt")


@pytest.mark.parametrize("job", ["gpt", "/gpt", "research/", "a/b/c", ""])
def test_job_must_have_a_namespace(job: str) -> None:
    with pytest.raises(RemoteConfigError, match="namespace/name"):
        open_store(json.dumps({"s3": S3}), job)


def test_fields_of_a_newer_operator_are_ignored_and_absent_ones_may_be_null() -> None:
    settings = {
        "s3": {**S3, "region": None, "endpoint": None, "caBundle": None, "colour": "red"},
        "directory": None,
    }
    store = open_store(json.dumps(settings), "research/gpt")
    assert store.location == "s3://b/p/research/gpt"
    store.close()


def test_starting_a_sidecar_does_not_load_the_s3_clients() -> None:
    code = (
        "import sys; from tiercheck_sidecar.remote import open_store; "
        f"open_store({json.dumps(json.dumps({'s3': S3}))}, 'research/gpt'); "
        "print([name for name in ('boto3', 'botocore', 'obstore', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
