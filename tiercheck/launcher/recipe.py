"""What a command line will make Python do, so that an interpreter that is already up can do just that.

Only what is fully understood is warm: `python [flags] script arguments`, `python [flags] -m module arguments`
and `torchrun arguments`. Anything else has no recipe, and starts as it always did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"python(3(\.\d+)?)?$")
_ALONE = frozenset({"-u", "-O", "-OO", "-B", "-s", "-P", "-q", "-b", "-bb", "-d", "-v"})
"""Flags without a value. Not -E, -I and -S: without PYTHONPATH and site the library may not be found; not -i
and -x."""
_WITH_VALUE = ("-W", "-X")
_TORCHRUN_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})


@dataclass(frozen=True)
class Recipe:
    """`interpreter flags target arguments`, with `-m` before the target if it is a module."""

    interpreter: str
    flags: tuple[str, ...]
    target: str
    arguments: tuple[str, ...]
    module: bool = False
    torchrun: bool = False
    """It starts ranks of its own, as children."""

    @property
    def command(self) -> list[str]:
        """What Python will find in `sys.orig_argv`."""
        return [self.interpreter, *self.flags, *(["-m"] if self.module else []), self.target, *self.arguments]


def recipe_of(
    command: Sequence[str], shebang: Callable[[str], tuple[str, str]] = lambda name: ("", "")
) -> Recipe | None:
    """None: start it cold. `shebang(program)` gives the path and the interpreter of a program on the PATH, or
    nothing."""
    name = Path(command[0]).name
    if name == "torchrun":
        path, interpreter = shebang(command[0])
        return Recipe(interpreter, (), path, tuple(command[1:]), torchrun=True) if interpreter else None
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
    torchrun = rest[0] in _TORCHRUN_MODULES if module else Path(rest[0]).name == "torchrun"
    return Recipe(command[0], tuple(flags), rest[0], tuple(rest[1:]), module, torchrun)
