"""Turns a waiting interpreter into the training command, or replaces the process by it with `exec`.

`exec` keeps the process id, the session and the parent-death signal, so a cold start from here is the command
that the launcher would have started, only later.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import logging
import os
import pkgutil
import re
import runpy
import signal
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

import tiercheck
from tiercheck.launcher.recipe import Recipe
from tiercheck.warm import IDLE_NAME

_LATE = frozenset(
    {
        "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING",
    }
)  # fmt: skip
_LATE_PREFIXES = ("TIERCHECK_", "PET_", "TORCHELASTIC_")
"""Prefixes of variables that an attempt sets, which are read when a process group begins.

If other variables differ between preparation and start, the start is cold."""

_EARLY = re.compile(
    r"\b(?:(?:OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|BLIS|DNNL|ONEDNN|MKLDNN|ATEN|PYTORCH|LD|TRITON|NPY|NUMPY|SYMPY|MALLOC|TBB)_[A-Z0-9_]+|PYTHON[A-Z0-9_]+"
    r"|TORCH(?!ELASTIC_|_NCCL_)[A-Z0-9_]+)\b"
)
"""Matches variables that torch and the libraries it loads (OpenMP, MKL, dynamo ...) read at import."""


def may_differ(name: str) -> bool:
    """Returns whether an attempt may set `name` after torch was imported."""
    return name in _LATE or name.startswith(_LATE_PREFIXES)


def cannot_be_applied(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns a variable that differs and had to be set before the imports; empty if there is none."""
    return next(iter(_different(before, now)), "")


def set_too_late(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns a variable that torch reads at import and the user's code changed before; empty if none."""
    return next(filter(_EARLY.fullmatch, _different(before, now)), "")


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the variables that differ, and that no attempt may set after torch was imported."""
    return sorted(
        name for name in {*before, *now} if before.get(name) != now.get(name) and not may_differ(name)
    )


class PreloadedModuleHider(MetaPathFinder, Loader):
    """Hides preloaded modules until the script imports one of them.

    The script therefore sees the `sys.modules` of a cold start, and its first `import torch` is detected: a
    variable set before it that torch reads at import can then be handled. `before`: names of modules that
    stay visible. `opening` is called once, just before the others are shown.
    """

    def __init__(self, before: frozenset[str], opening: Callable[[], None]) -> None:
        self._opening = opening
        seen = {name.partition(".")[0] for name in before} | sys.stdlib_module_names | {"__mp_main__"}
        self._hidden = {
            name: module for name, module in sys.modules.items() if name.partition(".")[0] not in seen
        }
        for name in self._hidden:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a hidden module. Finding a module does not show it; only loading does."""
        if fullname not in self._hidden:
            return None
        true = self._hidden[fullname].__spec__
        spec = ModuleSpec(fullname, self, origin=true.origin if true else None)
        if true is not None:
            spec.submodule_search_locations = true.submodule_search_locations
            spec.has_location = true.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if self in sys.meta_path:
            self._opening()
            sys.meta_path.remove(self)
            self._specs = {name: module.__spec__ for name, module in self._hidden.items()}
            sys.modules.update(self._hidden)
        return self._hidden[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restores the spec that the import system replaced; the module is already executed."""
        name = module.__spec__.name if module.__spec__ else module.__name__
        module.__spec__ = self._specs[name]


_PREIMPORTED = ("torch", "torch.distributed", "tiercheck.trainer.checkpointer")
_LATER = "torch._dynamo"
"""The module that the first optimizer imports; this takes as long as importing torch itself."""
OPT_IN = "tiercheck_warm"


@dataclass
class Command:
    """The code to run: `module` by its name with `run_module`, or else `code` with `names` as its globals."""

    names: dict[str, Any]
    module: str = ""
    code: Any = None
    run_module: Callable[[str], object] = runpy._run_module_as_main  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Imports:
    """The state around the imports: modules loaded `before`, the `environment` used, effects of torch.

    The effects are the environment `variables` and warning `filters` that torch has set."""

    before: frozenset[str]
    environment: dict[str, str]
    variables: dict[str, str]
    filters: list[Any]

    def show_effects(self) -> None:
        os.environ.update(self.variables)
        warnings.filters[:0] = self.filters  # type: ignore[index]
        with warnings.catch_warnings():  # leaving it makes Python re-read the filters
            pass


class Channel:
    """A connection to the launcher: receives one line, sends a few."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)

    def send(self, line: str) -> None:
        try:
            self._socket.sendall(line.encode(errors="replace") + b"\n")
        except OSError:
            sys.exit(0)  # the launcher does not wait for this process any more

    def receive(self) -> dict[str, str]:
        """Returns the environment to start in. Exits the process if the launcher closes the connection."""
        received = b""
        while not received.endswith(b"\n"):
            piece = self._socket.recv(65536)
            if not piece:
                os._exit(0)
            received += piece
        environment: dict[str, str] = json.loads(received)
        return environment

    def close(self) -> None:
        self._socket.close()


class NotReusable(Exception):
    """The error for a process that cannot become the command, with the reason."""


def prepare(
    descriptor: int, arguments: Sequence[str], names: Mapping[str, Any], before: frozenset[str]
) -> Command:
    """Imports torch, waits for the order, and returns the code to run.

    `arguments`: the recipe and the command line of the launcher's command, each in JSON."""
    channel = Channel(descriptor)
    spec = json.loads(arguments[0])
    recipe = Recipe(**{**spec, "flags": tuple(spec["flags"]), "arguments": tuple(spec["arguments"])})
    given = json.loads(arguments[1])
    imported_with = dict(os.environ)
    name = rename(IDLE_NAME)
    try:
        refuse_users_start_up()
        set_search_path(recipe)
        refuse_other_library()
        if not recipe.module:
            refuse_script(recipe.target, must_exist=False)
    except NotReusable as unfit:
        channel.send(f"never {unfit}")
        sys.exit(0)
    try:
        with warnings.catch_warnings():
            filters = list(warnings.filters)
            for module in _PREIMPORTED:
                importlib.import_module(module)
            of_torch = [each for each in warnings.filters if each not in filters]
            importlib.import_module(_LATER)
    except Exception as error:  # the command itself will raise it again, in its own output
        channel.send(f"never {type(error).__name__} while importing: {error}")
        sys.exit(0)
    set_by_imports = {name: value for name, value in os.environ.items() if imported_with.get(name) != value}
    channel.send("ready")
    environment = channel.receive()
    rename(name)
    try:
        if late := cannot_be_applied(imported_with, environment):
            raise NotReusable(f"{late} has changed since torch was imported")
        command = build(recipe, names)
    except NotReusable as unfit:
        channel.send(f"cold {unfit}")
        start_cold(given, environment)
    apply(environment)
    imports = Imports(before, imported_with, set_by_imports, of_torch)
    channel.send("warm")
    channel.close()
    hide_preloaded_modules(imports, given, environment)
    take_over(recipe, command)
    return command


def rename(name: str) -> str:
    """Sets this process's name for `ps`, and returns the previous one."""
    try:
        with open("/proc/self/comm", "r+") as file:
            before = file.read().strip()
            file.write(name)
            return before
    except OSError:  # no such file, or not writable: the name stays
        return name


def refuse_users_start_up() -> None:
    """Raises NotReusable if a sitecustomize or usercustomize ran, which may have read an attempt's variables.

    Allowed are files directly in the standard library's folder (not those installed below it, in
    site-packages) or in /etc/python3* (Debian's own), and any module that sets `tiercheck_warm = True`.
    """
    library = os.path.dirname(os.__file__)
    for name in ("sitecustomize", "usercustomize"):
        module = sys.modules.get(name)
        file = os.path.realpath(getattr(module, "__file__", None) or "")
        if getattr(module, OPT_IN, False):
            continue
        of_python = os.path.dirname(file) == library or file.startswith("/etc/python3")
        if module is not None and not of_python:
            raise NotReusable(f"{name} is there, and may read what only an attempt sets")


def refuse_other_library() -> None:
    """Raises NotReusable unless the `tiercheck` that this interpreter finds first is the one running here."""
    found = importlib.machinery.PathFinder.find_spec("tiercheck")
    if found is None or os.path.realpath(found.origin or "") != os.path.realpath(tiercheck.__file__ or ""):
        raise NotReusable(f"{sys.executable} does not find the launcher's own tiercheck first")


def set_search_path(recipe: Recipe) -> None:
    """Inserts the folder that Python puts first for this command; its modules may shadow others.

    Must be called before anything is imported."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if recipe.module else os.path.dirname(os.path.realpath(recipe.target)))


def refuse_script(path: str, *, must_exist: bool = True) -> bytes:
    """Returns the source of a script. Raises NotReusable if it is not a plain script."""
    if pkgutil.get_importer(os.path.abspath(path)) is not None:
        raise NotReusable(f"{path} is a folder or an archive")
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        if must_exist:
            raise NotReusable(f"{path} cannot be read: {error.strerror}") from None
        return b""
    if path.endswith(".pyc") or b"\0" in source:
        raise NotReusable(f"{path} is no source text")
    return source


def build(recipe: Recipe, names: Mapping[str, Any]) -> Command:
    """Does every step that can fail, before anything is changed. Raises NotReusable."""
    if recipe.module:
        return Command(
            {name: names[name] for name in names if name not in ("__file__", "__cached__")},
            module=recipe.target,
        )
    source = refuse_script(recipe.target)
    file = recipe.target if os.path.isabs(recipe.target) else os.path.join(os.getcwd(), recipe.target)
    try:
        code = compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        raise NotReusable(f"{recipe.target} cannot be compiled") from None  # Python reports the error itself
    return Command({**names, "__file__": file, "__loader__": SourceFileLoader("__main__", file)}, code=code)


def apply(environment: Mapping[str, str]) -> None:
    """Sets the process environment to that of the attempt, for Python and for C."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def take_over(recipe: Recipe, command: Command) -> None:
    """Makes this process look as if it had been started with that command."""
    main = types.ModuleType("__main__")
    main.__dict__.clear()
    main.__dict__.update(command.names)
    command.names = main.__dict__
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main
    sys.orig_argv = recipe.command
    sys.argv = ["-m" if recipe.module else recipe.target, *recipe.arguments]
    start: Any = logging._startTime  # type: ignore[attr-defined]
    logging._startTime = time.time_ns() if isinstance(start, int) else time.time()  # type: ignore[attr-defined]


def hide_preloaded_modules(imports: Imports, given: Sequence[str], environment: Mapping[str, str]) -> None:
    """Hides the preloaded modules until the script imports one.

    If the script has changed a variable that torch reads at import, `given` is executed instead."""
    process = os.getpid()
    at_first = dict(os.environ)

    def opening() -> None:
        name = set_too_late(at_first, os.environ)
        if name and os.getpid() == process:
            print(
                f"tiercheck: {name} was set before torch was imported; starting again, cold", file=sys.stderr
            )
            sys.stdout.flush()
            sys.stderr.flush()
            start_cold(given, environment)
        imports.show_effects()

    PreloadedModuleHider(imports.before, opening)


def start_cold(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Executes the command in this process, after a reset of the signals that Python ignores."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
