"""Defines the error that ends a command: a sentence with the reason and what to do.

It has an exit status for scripts.
"""

from __future__ import annotations

import sys
from pathlib import Path

INSTALL = "in a clone of TierCheck's repository run: pip install '.[{}]'"
"""The way to install: nothing is on a package index yet, where the name is free for any publisher."""
FAILED = 1
USAGE = 2
"""The exit status if the command line or a file given on it is wrong."""
NOT_FOUND = 3
"""The exit status if there is no such job, object or version."""
NO_ACCESS = 4
"""The exit status if the API server does not answer, or refuses."""


class CannotDo(Exception):
    """An error that is shown without a traceback; `status` is the exit status."""

    def __init__(self, sentence: str, status: int = FAILED) -> None:
        super().__init__(sentence)
        self.status = status


def program() -> str:
    """Returns the command as it was called: `tiercheck`, or `kubectl tiercheck`."""
    return "kubectl tiercheck" if Path(sys.argv[0]).name.startswith("kubectl-") else "tiercheck"
