"""Runs a command as the shell does, in this process: exit status, standard output, standard error."""

from __future__ import annotations

from dataclasses import dataclass

from typer.testing import CliRunner

from tiercheck_cli.commands import app


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


def run(*words: str, columns: int = 80, env: dict[str, str] | None = None, stdin: str | None = None) -> Ran:
    """Without a terminal."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": str(columns), **(env or {})}, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)
