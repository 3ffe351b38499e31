"""Each message is one line of the log, and a terminal obeys nothing in it."""

from __future__ import annotations

import logging
import sys

import pytest

from tiercheck.redaction import GONE, _Redacting, escape_controls, redacted

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
