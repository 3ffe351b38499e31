"""What is exported for a bug report holds no secret that its makers could have told from the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli import recorded
from tiercheck.redaction import redacted
from tiercheck_cli.export import clean

SECRET = "hunter2-0f9a"


@pytest.mark.parametrize(
    "line",
    [
        f"curl https://bob:{SECRET}@store.example.com/x",
        f"Authorization: Bearer {SECRET}",
        f"GET /b/o?X-Amz-Signature={SECRET}&x=1",
        f"GET /b/o?a=1&X-Amz-Security-Token={SECRET}",
        f"--hf-token={SECRET}",
        f"WANDB_API_KEY={SECRET}",
        f"aws_secret_access_key = {SECRET}",
        f'{{"password": "{SECRET}"}}',
        f"db_password: {SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_credential_is_taken_out_of_a_log(line: str) -> None:
    assert SECRET not in redacted(line)


@pytest.mark.parametrize(
    "secret",
    ["AKIA" + "IOSFODNN7EXAMPLE", "ghp_" + "a" * 36, "hf_" + "b" * 34, "eyJ" + "hbGciOiJI.eyJzdWIiOiIx.sig"],
)
def test_keys_are_known_by_their_looks(secret: str) -> None:
    assert secret not in redacted(f"trying with {secret} now")


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-21T12:00:00Z worker 3: step 12480, loss 2.31, 1.91 s",
        "attempt 5: step 12214: newest version that every rank can rebuild; 56 ranks from own memory, 8 "
        "from a peer",
        "https://minio.storage.svc:9000/checkpoints/team-a/gpt-large: 503 Slow Down",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    assert redacted(line) == line


def test_environment_variables_keep_their_names_and_lose_their_values() -> None:
    pod = clean(recorded.pods()[0])
    assert pod["spec"]["containers"][0]["env"] == [{"name": "WANDB_API_KEY", "value": "REDACTED"}]


def test_names_of_secrets_stay_because_they_tell_where_to_look() -> None:
    env = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "AWS_SECRET_ACCESS_KEY"}}}
    content = {"s3": {"credentialsSecretName": "s3"}, "imagePullSecrets": [{"name": "pull"}], "env": [env]}
    assert clean(content) == content


def test_the_copy_that_kubectl_keeps_of_an_object_goes_as_a_whole() -> None:
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": SECRET, "team": "language"}
    assert clean({"metadata": {"annotations": annotations, "managedFields": [SECRET]}}) == {
        "metadata": {"annotations": {"team": "language"}}
    }


@pytest.mark.parametrize(
    "command",
    [["train", "--token", SECRET], ["train", f"--api-key={SECRET}"], ["sh", "-c", f"TOKEN={SECRET} x"]],
)
def test_secrets_on_the_command_line_are_taken_out(command: list[str]) -> None:
    assert SECRET not in str(clean({"command": command}))


_NAMES = st.sampled_from(["name", "env", "value", "token", "password", "spec", "list", "command", "apiKey"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(_VALUES)
def test_any_object_can_be_redacted_and_once_is_enough(content: Any) -> None:
    once = clean(content)
    assert clean(once) == once


@given(st.text())
def test_any_text_can_be_redacted_and_once_is_enough(content: str) -> None:
    once = redacted(content)
    assert redacted(once) == once
