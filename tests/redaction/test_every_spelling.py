"""A credential is taken out however it is spelt; a message stays one line, which no terminal obeys."""

from __future__ import annotations

import logging
import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.redaction import GONE, LONGEST_LINE, _Redacting, escape_controls, is_secret_name, redacted

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


FORGED = "it ended\n2026-11-26 09:00:00,000 INFO tiercheck_operator: team-b/prod: gone \x1b[2K\x9b2K\r\u202e"


def line_of(
    message: str, *arguments: object, error: BaseException | None = None, stack: str = ""
) -> list[str]:
    record = logging.LogRecord("tiercheck", logging.INFO, "x.py", 1, message, arguments, None)
    if error is not None:
        record.exc_info = (type(error), error, error.__traceback__)
    record.stack_info = stack or None
    return _Redacting(["known-credential"]).format(record).split("\n")


def test_message_of_others_is_one_line() -> None:
    (line,) = line_of("%s: %s", "team-a/job", FORGED)
    assert "it ended\\n2026" in line
    assert line.isprintable()


def test_traceback_keeps_its_lines_and_no_line_looks_like_one_of_the_log() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        first, *others = line_of("%s", FORGED, error=error, stack=FORGED)
    assert first.isprintable()
    assert len(others) >= 5
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_credentials_go_whatever_stands_between_them() -> None:
    (line,) = line_of("%s", "a\ntoken: abcdefgh12345\nknown-credential\n-----BEGIN PRIVATE KEY-----\nMIIB\n")
    assert "abcdefgh12345" not in line
    assert "known-credential" not in line
    assert "MIIB" not in line
    assert GONE in line


@pytest.mark.parametrize(
    "code", [*range(32), *range(0x7F, 0xA0), 0x200E, 0x200F, 0x061C, *range(0x2028, 0x202F)]
)
def test_control_characters_become_visible(code: int) -> None:
    shown = escape_controls(f"a{chr(code)}b")
    assert (shown == f"a{chr(code)}b") is (chr(code) in "\n\t")
    assert chr(code) not in escape_controls(f"a{chr(code)}b", breaks=True).replace("\t", "")
    assert escape_controls("é 漢 \U0001f600 ‰") == "é 漢 \U0001f600 ‰"


def test_root_logger_writes_so(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Redacting(()))
    handler.handle(logging.makeLogRecord({"msg": FORGED, "levelname": "INFO", "name": "x"}))
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert redacted("plain") == "plain"
