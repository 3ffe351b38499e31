"""The command behaves as the shell and kubectl start it, in a pipe and on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(
    *words: str, name: str = "tiercheck", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As the installed script called `name` does."""
    code = f"import sys; sys.argv[0] = {name!r}; from tiercheck_cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **(env or {})},
    )  # fmt: skip


PLAN = ("plan", "-f", "examples/parity.yaml", "--made-up", "4x4")


def test_help_names_the_command_as_it_was_called() -> None:
    assert "Usage: tiercheck " in start("--help").stdout
    assert "Usage: kubectl tiercheck " in start("--help", name="/usr/local/bin/kubectl-tiercheck").stdout


def test_there_are_no_colours_in_a_pipe_nor_with_no_color() -> None:
    for env in ({}, {"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        ran = start(*PLAN, env=env)
        assert ran.returncode == 0, ran.stderr
        assert "\x1b[3" not in ran.stdout


def test_a_terminal_without_unicode_gets_question_marks_and_no_traceback() -> None:
    ran = start(*PLAN, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"})
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "survives     the loss of any one rack" in ran.stdout


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = "import sys; sys.argv[0] = 'tiercheck'; from tiercheck_cli.main import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "plan",
        "-f",
        "examples/parity.yaml",
        "--made-up",
        "64x64",
        "-o",
        "json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_a_wrong_option_is_a_usage_error() -> None:
    ran = start("status", "--colour", "red")
    assert ran.returncode == 2
    assert "No such option: --colour" in ran.stderr
