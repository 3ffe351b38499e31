"""`tiercheck`: one command for people.

`tiercheck launch` also runs in training images, where nothing but the standard library and torch is installed, so it is
handed over before anything else is imported.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Returns the exit status."""
    if sys.argv[1:2] == ["launch"]:
        from tiercheck.launcher.app import main as launch

        return launch(sys.argv[2:])
    try:
        from tiercheck_cli.commands import app
    except ModuleNotFoundError as error:
        print(f"tiercheck: {error.name} is not installed; run: pip install 'tiercheck[cli]'", file=sys.stderr)
        return 1
    app()
    return 0


if __name__ == "__main__":
    sys.exit(main())
