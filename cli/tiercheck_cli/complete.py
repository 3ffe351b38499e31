"""What kubectl asks when somebody presses Tab behind `kubectl tiercheck` (kubectl_complete-tiercheck)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tiercheck_cli.terminal import say

_NO_FILES = ":4"
"""The directive that ends the answer, as in cobra: offer no files beside these words."""


def complete(words: Sequence[str]) -> list[str]:
    """What the last of `words` may become."""
    import typer.main

    from tiercheck_cli.commands import app

    *before, begun = words or [""]
    command: Any = typer.main.get_command(app)
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
    """Names of the jobs that a command with these words would look at; none where they cannot be read."""
    from click import ClickException

    from tiercheck_cli.cluster import Cluster
    from tiercheck_cli.failure import CannotDo

    try:
        options = command.make_context("", given, resilient_parsing=True).params
        cluster = Cluster.connect(options["kubeconfig"], options["context"], options["namespace"])
        return [job["metadata"]["name"] for job in cluster.jobs()]
    except (ClickException, CannotDo):
        return []


def main() -> int:
    """Returns the exit status."""
    for word in (*complete(sys.argv[1:]), _NO_FILES):
        say(word)
    return 0
