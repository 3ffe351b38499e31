"""Promise: a slip in a variable costs a line in the log, and not the start of the command."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tiercheck.launcher.app import Launcher, main
from tiercheck.launcher.environment import seconds_of
from tiercheck.launcher.warm import ENV_WARM_AFTER_SECONDS
from tiercheck.protocol.names import ENV_RUN_DIR


@pytest.mark.parametrize("text", ["ten", "10s", "nan", "-1", "٣x", "1e", "\udcff", "[" * 5000])
def test_a_time_that_is_none_is_taken_for_the_usual_one_and_said(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, text: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert seconds_of({"SECONDS": text}, "SECONDS", 7.0) == 7.0
    assert "SECONDS" in caplog.text
    Launcher(["true"], tmp_path, {ENV_WARM_AFTER_SECONDS: text}, 1.0)


def test_a_time_is_taken() -> None:
    assert [seconds_of({"S": text} if text else {}, "S", 7.0) for text in ("0", "2.5", "inf", None)] == [
        0.0,
        2.5,
        float("inf"),
        7.0,
    ]


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [(["--help"], (0, "usage:")), ([], (2, "usage:")), (["--", "true"], (2, "folder"))],
)
def test_where_no_sidecar_can_be_it_says_so_and_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    outcome: tuple[int, str],
) -> None:
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path / "no pod"))
    assert main(arguments) == outcome[0]
    assert outcome[1] in "".join(capsys.readouterr())
