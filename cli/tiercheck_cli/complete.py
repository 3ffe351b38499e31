"""What kubectl asks when somebody presses Tab behind `kubectl tiercheck` (kubectl_complete-tiercheck)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from tiercheck_cli.terminal import say

_CLUSTER = {
    "-n": "namespace",
    "--namespace": "namespace",
    "--context": "context",
    "--kubeconfig": "kubeconfig",
}
_NO_FILES = ":4"
"""The directive that ends the answer, as in cobra: offer no files beside these words."""


def complete(words: Sequence[str]) -> list[str]:
    """What the last of `words` may become."""
    import typer.main

    from tiercheck_cli.commands import app

    *before, begun = words or [""]
    command: Any = typer.main.get_command(app)
    for word in before:
        command = getattr(command, "commands", {}).get(word, command)
    if begun.startswith("-"):
        found = [name for param in command.params for name in param.opts if name.startswith("--")]
    elif hasattr(command, "commands"):
        found = list(command.commands)
    elif any(before[-1] in param.opts and not param.is_flag for param in command.params):
        found = []  # the value of an option
    else:
        found = _jobs(before) if any(param.name == "job" for param in command.params) else []
    return sorted(word for word in found if word.startswith(begun))


def _jobs(words: Sequence[str]) -> list[str]:
    """Names of the jobs that a command with these words would look at; none where they cannot be read."""
    from tiercheck_cli.cluster import Cluster
    from tiercheck_cli.failure import CannotDo

    given: dict[str, str] = {}
    pairs = [word.split("=", 1) for word in words if "=" in word]
    pairs += [list(pair) for pair in itertools.pairwise(words)]
    for option, value in pairs:
        if option in _CLUSTER:
            given[_CLUSTER[option]] = value
    try:
        cluster = Cluster.connect(given.get("kubeconfig"), given.get("context"), given.get("namespace"))
        return [job["metadata"]["name"] for job in cluster.jobs()]
    except CannotDo:
        return []


def main() -> int:
    """Returns the exit status."""
    for word in (*complete(sys.argv[1:]), _NO_FILES):
        say(word)
    return 0
