"""A credential is taken out however it is spelt, and however long the text is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.redaction import GONE, LONGEST_LINE, is_secret_name, redacted

NAMES = [
    "password", "PASSWORD", "Password", "db_password", "dbPassword", "PGPASSWORD", "MYSQL_PWD", "passphrase",
    "ssh-passphrase",
    "secret", "client_secret", "clientSecret", "CLIENT_SECRET", "token", "hf_token", "HF_TOKEN",
    "accessToken", "refresh-token",
    "api_key", "apiKey", "API-KEY", "apikey", "OPENAI_API_KEY", "aws_secret_access_key",
    "AWS_SECRET_ACCESS_KEY", "AccountKey",
    "private_key", "credentials", "authorization", "Proxy-Authorization", "cookie", "X-Auth-Token",
    "X-Api-Key", "encryption.key.secret",
]  # fmt: skip
SEPARATORS = [":", ": ", "=", " = ", " => ", ":="]
QUOTES = ["", "'", '"', '\\"', '\\\\\\"']
AROUND = [
    ("", ""), ("2026-01-01 INFO train: ", ", and so on"), ("{", "}"), ("  - ", ""), ("export ", ""),
    ("a=1 ", ";"), ("config.", ""),
    ("https://x.example/?a=b&", "&c=d"),
]  # fmt: skip
WORD = "hunter2-" + "0f9a"


@pytest.mark.parametrize("name", NAMES)
def test_value_after_a_name_is_taken_out(name: str) -> None:
    shown = []
    for separator, quote, (before, after) in product(SEPARATORS, QUOTES, AROUND):
        value = f"{quote}two {WORD}{quote}" if quote else WORD
        for named in (name, f"{quote}{name}{quote}"):
            line = f"{before}{named}{separator}{value}{after}"
            once = redacted(line)
            if WORD in once or GONE not in once or (not before and redacted(once) != once):
                shown.append((line, once))
    assert shown == []


@pytest.mark.parametrize("name", NAMES)
def test_name_is_known_as_that_of_a_credential(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "tokens_per_second", "secretName", "credentialsSecretName", "secretRef", "tokenPath",
        "TOKEN_FILE", "key", "hostname"],
)  # fmt: skip
def test_name_of_something_else_is_not(name: str) -> None:
    assert not is_secret_name(name)


_PARTS = st.sampled_from([
    "password", "token", "Authorization", "wandb login", "--hf-token", "Bearer", "https://", "@", "secret",
    "api_key", "name", "value",
    ":", "=", " ", "\n", "  ", '"', "'", "\\", "{", "}", "[", "]", ",", ";", "|", "-", "hunter2",
    "0f9a4c21" * 5, "Zq7Xw2" * 7,
    "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "machine", "login", "is", "true", GONE,
    "header value b'",
])  # fmt: skip


@given(st.lists(_PARTS, max_size=14))
def test_any_mixture_of_what_it_looks_for_can_be_redacted_and_keeps_its_lines(parts: list[str]) -> None:
    content = "".join(parts)
    once = redacted(content)
    assert once.count("\n") <= content.count("\n")
    if "PRIVATE KEY" not in content:
        assert once.count("\n") == content.count("\n")


@pytest.mark.parametrize(
    "unit",
    [
        "a", "a.", "a-", "-", " --a", "token", "-token", "password ", "secret=", '"', "\\", '\\"', "= ",
        "://a@", "://a:", "login ", "wandb login --a ", "cookie:", "'cookie: ", "bearer a.", "eyJ", "gh",
        "sk-", "eyJaaaaaaaa.", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "token=(", "token=a.",
        "token=[]", "token=\\", 'token="', 'token=\\"', "token value", "token: is ", "pwd=/", "token12",
        "a: ",
        "- ", "\x1b", "\x1b[", "\x1b[3", "\0", "\r", "\t", "(", "\u200b", "é",
    ],
)  # fmt: skip
def test_line_of_a_mebibyte_is_cut_and_not_looked_at_for_hours(unit: str) -> None:
    """Backtracking from every place took 35 s for 20 kB."""
    shown = redacted(unit * (2**20 // len(unit)))
    assert len(shown) <= 2 * LONGEST_LINE, "REDACTED is longer than some of what it stands for"
    shown = redacted("\n".join([unit * (LONGEST_LINE // len(unit))] * 16))
    assert shown.count("\n") in (15, 0), "a key without an end goes over lines"


@pytest.mark.parametrize("place", range(LONGEST_LINE - 60, LONGEST_LINE + 5, 4))
def test_credential_where_a_line_is_cut_is_not_shown_in_part(place: int) -> None:
    secret = "gh" + "p_" + "0f9a" * 9
    shown = redacted(("x " * LONGEST_LINE)[:place] + secret + " more" * 100)
    assert secret[:8] not in shown


def test_credential_that_is_held_here_is_taken_out_wherever_it_stands() -> None:
    assert redacted("xplainwordx and plain", {"plainword", "plain"}) == f"x{GONE}x and plain", (
        "short ones are words"
    )
