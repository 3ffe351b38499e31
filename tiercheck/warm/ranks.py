"""Forks torchrun's ranks before torchrun runs, while there is one thread and no socket.

torchrun starts each rank as a subprocess of its own. Here the subprocess is there already, as a child of
torchrun that waits to be told its arguments, its environment and its output; what torchrun then holds answers
as a `subprocess.Popen` does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from tiercheck.warm import becoming
from tiercheck.warm.variables import cannot_be_applied

_MOST = 64
"""Ranks that are kept ready; more are started cold."""
_ANSWER_SECONDS = 20.0
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


@dataclass
class Reserve:
    """Children that wait. In such a child itself, `child` is what it has to run."""

    waiting: list[tuple[int, socket.socket]] = field(default_factory=list)
    child: becoming.Command | None = None

    def close(self) -> None:
        """Whoever still waits is not needed."""
        while self.waiting:
            pid, channel = self.waiting.pop()
            channel.close()
            os.waitpid(pid, 0)


def reserve_ranks(count: int, imports: becoming.Imports, names: Mapping[str, Any]) -> Reserve | None:
    """Fork `count` ranks and let torchrun use them. None: it will start its ranks as it always does."""
    original = _torchruns_start()
    if original is None or not 0 < count <= _MOST:
        return None
    reserve = Reserve()
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in reserve.waiting:
                other.close()
            os.setsid()
            return Reserve(child=_wait(becoming.Channel(theirs.detach()), imports, names))
        theirs.close()
        reserve.waiting.append((pid, ours))
        if len(os.listdir("/proc/self/task")) > 1:
            # OpenBLAS ends its threads before a fork; a thread that is still there may have held a lock.
            reserve.close()
            return None
    _install(original, reserve)
    return reserve


def _torchruns_start() -> Callable[..., Any] | None:
    """The method by which torchrun starts a rank, if it is the one that is known."""
    try:
        handler = importlib.import_module(_HANDLER).SubprocessHandler
        method: Callable[..., Any] = handler._popen
    except (ImportError, AttributeError):
        return None
    return method if list(inspect.signature(method).parameters) == ["self", "args", "env"] else None


def _install(original: Callable[..., Any], reserve: Reserve) -> None:
    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        started = _take(reserve, args, env, handler._stdout, handler._stderr)
        return original(handler, args, env) if started is None else started

    importlib.import_module(_HANDLER).SubprocessHandler._popen = start


def _take(
    reserve: Reserve,
    args: Sequence[str],
    env: Mapping[str, str],
    stdout: IO[str] | None,
    stderr: IO[str] | None,
) -> ForkedRank | None:
    """A waiting child that runs `args` now; None if there is none that can."""
    outputs = [opened.fileno() for opened in (stdout, stderr) if opened is not None]
    order = {
        "command": list(args),
        "environment": dict(env),
        "folder": os.getcwd(),
        "outputs": [number for number, opened in ((1, stdout), (2, stderr)) if opened is not None],
    }
    while reserve.waiting:
        pid, channel = reserve.waiting.pop(0)
        try:
            channel.settimeout(_ANSWER_SECONDS)
            if outputs:
                socket.send_fds(channel, [b"o"], outputs)
            else:
                channel.sendall(b"-")
            channel.sendall(json.dumps(order).encode() + b"\n")
            if channel.recv(1):
                return ForkedRank(pid, args)
        except OSError:
            os.kill(pid, signal.SIGKILL)
        finally:
            channel.close()
        os.waitpid(pid, 0)
    return None


def _wait(channel: becoming.Channel, imports: becoming.Imports, names: Mapping[str, Any]) -> becoming.Command:
    """In the child: until torchrun starts this rank."""
    descriptors = channel.descriptors()
    order = channel.hear()
    for number, descriptor in zip(order["outputs"], descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    environment: dict[str, str] = order["environment"]
    os.chdir(order["folder"])
    channel.say("g")
    channel.close()
    try:
        if late := cannot_be_applied({**imports.environment, **imports.variables}, environment):
            raise becoming.Unfit(f"{late} differs from what torch was imported with")
        if _cuda_is_spoilt():
            raise becoming.Unfit("CUDA was touched before the fork")
        recipe, command = becoming.rank_command(order["command"], names)
    except becoming.Unfit as unfit:
        print(f"tiercheck: a rank starts cold: {unfit}", file=sys.stderr)
        becoming.start_cold(order["command"], environment)
    becoming.apply(environment)
    if not sys.flags.safe_path:
        del sys.path[0]
    becoming.set_search_path(recipe)
    becoming.new_identity()
    becoming.draw_curtain(imports, order["command"], environment)
    becoming.take_over(recipe, command)
    return command


def _cuda_is_spoilt() -> bool:
    """Whether the parent has used CUDA: a forked child cannot then."""
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() or cuda._is_in_bad_fork())


class ForkedRank:
    """What torchrun uses of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._collect(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while (code := self._collect(0 if end is None else os.WNOHANG)) is None:
            left = (end or 0.0) - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            pause = min(2 * pause, left, 0.05)
            time.sleep(pause)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # collected elsewhere; Popen calls that 0 as well
                self.returncode = 0
                return 0
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
