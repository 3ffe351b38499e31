"""Parses a Python or torchrun command line, so that a warm interpreter can run its script.

Understood are `python [flags] script arguments`, `python [flags] -m module arguments`, and torchrun with no
other options than those for its rendezvous and its number of ranks. Any other command has no recipe, and
runs as it is.
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
    {
        "nnodes", "node-rank", "master-addr", "master-port", "local-addr", "rdzv-backend", "rdzv-endpoint",
        "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval", "standalone",
    }
)  # fmt: skip
"""torchrun's options that TierCheck decides itself, or that only torchrun's agents read."""
_VARIABLES = {f"PET_{name.upper().replace('-', '_')}" for name in (*_OF_AN_ATTEMPT, "nproc-per-node")}
_WITHOUT_VALUE = frozenset({"m", "module", "no-python", "run-path", "standalone", "virtual-local-rank"})


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


def without_rendezvous(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the command without torchrun's options that TierCheck decides itself, and these options.

    They would win over the variables of the attempt, and lead to other ranks or to another rendezvous."""
    begin = _torchrun_options(command)
    if not begin:
        return list(command), []
    kept, taken, rest = list(command[:begin]), list[str](), list(command[begin:])
    while rest and rest[0].startswith("-"):
        given = rest.pop(0)
        option, has_value, _ = given.partition("=")
        name = option.lstrip("-").replace("_", "-")
        words = [given]
        if not has_value and name not in _WITHOUT_VALUE and rest:
            words.append(rest.pop(0))
        if name in _OF_AN_ATTEMPT:
            taken.append(option)
        else:
            kept += words
    return kept + rest, taken


def _torchrun_options(command: Sequence[str]) -> int:
    """Returns the index at which torchrun's options begin; 0 if the command is not torchrun."""
    if Path(command[0]).name == "torchrun":
        return 1
    target = _target(command)
    rest = command[target:] if target else []
    if rest[:2] == ["-m", _TORCHRUN]:
        return target + 2
    return target + 1 if rest and Path(rest[0]).name == "torchrun" else 0


def _target(command: Sequence[str]) -> int:
    """Returns the index of the script, or of `-m`, after Python's flags; 0 if these are not understood."""
    if not _PYTHON.match(Path(command[0]).name):
        return 0
    at = 1
    while at < len(command) and command[at].startswith("-") and command[at] != "-m":
        flag = command[at]
        if flag not in _ALONE and not flag.startswith(_WITH_VALUE):
            return 0
        at += 2 if flag in _WITH_VALUE else 1
    return at if at < len(command) else 0


def recipe_of(
    command: Sequence[str], environment: Mapping[str, str], locate: Callable[[str], tuple[str, str]]
) -> Recipe | None:
    """Returns the command's recipe; None: run it as it is, with a new interpreter.

    `locate(program)`: its path on the PATH and the interpreter that it names; empty strings if none."""
    begin, target = _torchrun_options(command), _target(command)
    if begin:
        path, named = locate(command[0])
        return _recipe_of_ranks(path if target else named, command[begin:], environment)
    if not target:
        return None
    flags, rest = tuple(command[1:target]), command[target:]
    module = rest[0] == "-m"
    if module:
        rest = rest[1:]
    if not rest or not rest[0]:
        return None
    return Recipe(command[0], flags, rest[0], tuple(rest[1:]), module)


def _recipe_of_ranks(
    interpreter: str, options: Sequence[str], environment: Mapping[str, str]
) -> Recipe | None:
    """Returns the recipe of torchrun (torch/distributed/run.py); None if it does more than start ranks."""
    if not interpreter or any(name.startswith("PET_") and name not in _VARIABLES for name in environment):
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
