"""The subcommands of `tiercheck`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tiercheck.about import __version__

app = typer.Typer(
    name="tiercheck", no_args_is_help=True, add_completion=False, help="Keeps training alive on Kubernetes."
)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command(context_settings={"ignore_unknown_options": True})
def launch() -> None:
    """Run COMMAND as the first process of a trainer container: tiercheck launch -- COMMAND."""
    raise AssertionError("main() hands this over")  # listed here for --help only


@app.command()
def demo(
    keep: Annotated[bool, typer.Option(help="Leave the cluster up afterwards, for exploring.")] = False,
    report: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-report"),
) -> None:
    """Train on a laptop cluster, survive five failures, compare with an uninterrupted run."""
    try:
        from tiercheck_local.demo.__main__ import main
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}; run: pip install 'tiercheck[dev]'", file=sys.stderr)
        raise typer.Exit(1) from error
    raise typer.Exit(main([f"--report={report}", *(["--keep"] if keep else [])]))
