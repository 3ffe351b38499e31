"""Says in one sentence why a command cannot do what was asked, and what to do.

It has an exit status for scripts.
"""

from __future__ import annotations

import sys
from pathlib import Path

INSTALL = "in a clone of TierCheck's repository run: pip install '.[{}]'"
"""Nothing is on a package index yet; the name is free there, for anybody."""
FAILED = 1
"""It cannot be done."""
USAGE = 2
"""The command line or a file given on it is wrong."""
NOT_FOUND = 3
"""There is no such job."""
NO_ACCESS = 4
"""The API server does not answer, or refuses."""


class CannotDo(Exception):
    """Shown without a traceback; `status` is the exit status."""

    def __init__(self, sentence: str, status: int = FAILED) -> None:
        super().__init__(sentence)
        self.status = status


def program() -> str:
    """The command as it was called: `tiercheck`, or `kubectl tiercheck`."""
    return "kubectl tiercheck" if Path(sys.argv[0]).name.startswith("kubectl-") else "tiercheck"
