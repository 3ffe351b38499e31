"""Starts the command for users, as `tiercheck` or `kubectl tiercheck`.

`tiercheck launch` also runs in training images, where nothing but the standard library and torch is
installed, so it is dispatched before anything else is imported.
"""

from __future__ import annotations

import os
import sys

from tiercheck_cli.failure import INSTALL, program


def main() -> int:
    """Runs the command and returns the exit status."""
    if sys.argv[1:2] == ["launch"]:
        from tiercheck.launcher.app import main as launch

        return launch(sys.argv[2:])
    try:
        from tiercheck_cli.commands import app
    except ModuleNotFoundError as error:
        print(f"tiercheck: {error.name} is not installed; {INSTALL.format('cli')}", file=sys.stderr)
        return 1
    try:
        app(prog_name=program())
    except BrokenPipeError:
        # The reader has closed the pipe (| head). What is still in the buffer must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(main())
