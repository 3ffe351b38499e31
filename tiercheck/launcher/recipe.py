"""Parses a Python or torchrun command line, so that a warm interpreter can run its script.

Understood are `python [flags] script arguments`, `python [flags] -m module arguments`, and torchrun without
options that change its ranks. Any other command has no recipe, and runs as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercheck.protocol.names import ENV_PROCS_PER_WORKER

_PYTHON = re.compile(r"python(3(\.\d+)?)?$")
_ALONE = frozenset({"-u", "-O", "-OO", "-B", "-s", "-P", "-q", "-b", "-bb", "-d", "-v"})
"""The supported flags without a value. Not -i, -x, -E, -I and -S.

Without PYTHONPATH (-E, -I) and site (-S) the library may not be found."""
_WITH_VALUE = ("-W", "-X")
_TORCHRUN = "torch.distributed.run"
_OF_AN_ATTEMPT = frozenset(
    f"PET_{name}"
    for name in (
        "NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_ADDR",
        "RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID", "MAX_RESTARTS", "STANDALONE",
    )
)  # fmt: skip
"""Variables for torchrun's options that TierCheck sets or removes, or that only its agents read."""


@dataclass(frozen=True)
class Recipe:
    """The parts of `interpreter flags target arguments`, with `-m` before a target that is a module."""

    interpreter: str
    flags: tuple[str, ...]
    target: str
    arguments: tuple[str, ...]
    module: bool = False
    each_rank: bool = False
    """True if this is the command that torchrun would start for each rank."""

    @property
    def command(self) -> list[str]:
        """Returns the command line, as Python will find it in `sys.orig_argv`."""
        return [self.interpreter, *self.flags, *(["-m"] if self.module else []), self.target, *self.arguments]


def recipe_of(
    command: Sequence[str], environment: Mapping[str, str], locate: Callable[[str], tuple[str, str]]
) -> Recipe | None:
    """Returns the command's recipe; None: run it as it is, with a new interpreter.

    `locate(program)`: its path on the PATH and the interpreter that it names; empty strings if none."""
    name = Path(command[0]).name
    if name == "torchrun":
        return _recipe_of_ranks(locate(command[0])[1], command[1:], environment)
    if not _PYTHON.match(name):
        return None
    flags: list[str] = []
    rest = list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        flag = rest.pop(0)
        flags.append(flag)
        if flag in _WITH_VALUE:
            if not rest:
                return None
            flags.append(rest.pop(0))
        elif flag not in _ALONE and not flag.startswith(_WITH_VALUE):
            return None
    module = rest[:1] == ["-m"]
    if module:
        rest.pop(0)
    if not rest or not rest[0]:
        return None
    if rest[0] == _TORCHRUN if module else Path(rest[0]).name == "torchrun":
        return _recipe_of_ranks(locate(command[0])[0], rest[1:], environment)
    return Recipe(command[0], tuple(flags), rest[0], tuple(rest[1:]), module)


def _recipe_of_ranks(
    interpreter: str, options: Sequence[str], environment: Mapping[str, str]
) -> Recipe | None:
    """Returns the recipe of torchrun (torch/distributed/run.py); None if it does more than start ranks."""
    if not interpreter or any(name.startswith("PET_") and name not in _OF_AN_ATTEMPT for name in environment):
        return None
    ranks = environment.get(ENV_PROCS_PER_WORKER, "1")
    rest, module = list(options), False
    while rest and rest[0].startswith("-"):
        option, _, value = rest.pop(0).partition("=")
        if option in ("-m", "--module") and not value:
            module = True
        elif option in ("--nproc-per-node", "--nproc_per_node"):
            if (value or (rest.pop(0) if rest else "")) != ranks:
                return None
        else:
            return None
    return Recipe(interpreter, ("-u",), rest[0], tuple(rest[1:]), module, each_rank=True) if rest else None
