"""Defines the subcommands of `tiercheck`, how their failures are shown, and completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from click import ClickException
from typer.core import TyperGroup
from typer.main import get_command

from tiercheck.about import __version__
from tiercheck.redaction import log_redacted
from tiercheck_cli.checkpoint.command import import_checkpoint, remote
from tiercheck_cli.cluster import Cluster
from tiercheck_cli.events import events
from tiercheck_cli.explain.command import explain
from tiercheck_cli.export import export
from tiercheck_cli.failure import INSTALL, CannotDo
from tiercheck_cli.plan.command import plan
from tiercheck_cli.simulate.command import simulate
from tiercheck_cli.status.command import status
from tiercheck_cli.terminal import remark, say


class _Commands(TyperGroup):
    """Shows an expected failure as a sentence and an exit status, never as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        log_redacted("WARNING")
        try:
            return super().invoke(ctx)
        except CannotDo as failure:
            remark(f"error: {failure}")
            raise typer.Exit(failure.status) from failure


app = typer.Typer(
    name="tiercheck",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Keeps training alive on Kubernetes. Is called `tiercheck` or `kubectl tiercheck`.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_JOBS, _PLANS, _OTHERS = "A job", "A cluster on paper", "Others"

app.command(rich_help_panel=_JOBS)(status)
app.command(rich_help_panel=_JOBS)(plan)
app.command(rich_help_panel=_JOBS)(explain)
app.command(rich_help_panel=_JOBS)(events)
app.command(rich_help_panel=_PLANS)(simulate)
app.command(rich_help_panel=_JOBS)(export)
app.command("import", rich_help_panel=_JOBS)(import_checkpoint)
app.add_typer(remote, name="remote", rich_help_panel=_JOBS)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback()
def before(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Without colours, as with NO_COLOR.")] = False,
) -> None:
    """Settings of all commands."""
    if no_color:
        os.environ["NO_COLOR"] = "1"


@app.command(rich_help_panel=_OTHERS)
def version() -> None:
    """Print the version."""
    say(__version__)


@app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel=_OTHERS)
def launch() -> None:
    """Run COMMAND as the first process of a trainer container: tiercheck launch -- COMMAND."""
    raise AssertionError("main() hands this over")  # listed here for --help only


@app.command(rich_help_panel=_OTHERS)
def demo(
    keep: Annotated[bool, typer.Option(help="Leave the cluster up afterwards, for exploring.")] = False,
    report: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-report"),
) -> None:
    """Train on a laptop cluster, survive failures of every size, compare with an uninterrupted run."""
    try:
        from tiercheck_local.demo.__main__ import main
    except ModuleNotFoundError as error:
        remark(f"the demo needs {error.name}; {INSTALL.format('demo')}")
        raise typer.Exit(1) from error
    raise typer.Exit(main([f"--report={report}", *(["--keep"] if keep else [])]))


_NO_FILES = ":4"
"""The directive that ends the answer, as in cobra: it asks the shell to offer no files as well."""


def complete(words: Sequence[str]) -> list[str]:
    """Returns the completions of the last of `words`."""
    *before, begun = words or [""]
    command: Any = get_command(app)
    given = list(before)
    while given and given[0] in getattr(command, "commands", {}):
        command = command.commands[given.pop(0)]
    if begun.startswith("-"):
        found = [name for param in command.params for name in param.opts if name.startswith("--")]
    elif hasattr(command, "commands"):
        found = list(command.commands)
    elif any(before[-1] in param.opts and not param.is_flag for param in command.params):
        found = []  # the value of an option
    else:
        found = _jobs(command, given) if any(param.name == "job" for param in command.params) else []
    return sorted(word for word in found if word.startswith(begun))


def _jobs(command: Any, given: list[str]) -> list[str]:
    """Returns the names of jobs that a command with these words could read; none if they cannot be listed."""
    try:
        options = command.make_context("", given, resilient_parsing=True).params
        cluster = Cluster.connect(options["kubeconfig"], options["context"], options["namespace"])
        return [job["metadata"]["name"] for job in cluster.jobs()]
    except (ClickException, CannotDo):
        return []


def print_completions() -> int:
    """Prints the completions of the command line and returns the exit status."""
    for word in (*complete(sys.argv[1:]), _NO_FILES):
        say(word)
    return 0
