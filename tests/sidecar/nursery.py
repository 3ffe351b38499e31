"""Forks sidecar processes from one that has imported already, because their start was the cost.

Each runs the sidecar's own `__main__` with its own environment and log, and ends as it would by itself. The
true command is started by the tests of clusters and images.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
HUNG = "TIERCHECK_TESTS_HUNG"
"""Names a file. While it is there, artifacts in a shared directory are read as on a mount whose server is
gone."""


class Process:
    """One of them, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, changed: threading.Condition) -> None:
        self.pid = pid
        self.code: int | None = None
        """Kept here and not by pid: the kernel gives a pid again."""
        self._changed = changed

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.code is not None, timeout):
                raise subprocess.TimeoutExpired(["tiercheck_sidecar"], timeout or 0.0)
            assert self.code is not None
            return self.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that they are forked from, and reaped by."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._changed = threading.Condition()
        self._alive: dict[int, Process] = {}
        self._born: list[Process] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self,
        environment: Mapping[str, str],
        log: Path,
        patience: Mapping[str, float | tuple[float, float]] | None = None,
        network: str = "",
    ) -> Process:
        """`patience`: seconds that its constants have in place of their own, by `module:name`. `network`: the
        file of the network namespace that it is to be in; empty: that of this process."""
        order = {
            "environment": dict(environment),
            "log": str(log),
            "folder": os.getcwd(),
            "patience": dict(patience or {}),
            "network": network,
        }
        with self._changed:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: self._born, 60), "no sidecar was forked"
            return self._born.pop()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, code = json.loads(line)
            with self._changed:
                if code is None:
                    self._alive[pid] = Process(pid, self._changed)
                    self._born.append(self._alive[pid])
                else:
                    self._alive.pop(pid).code = code
                self._changed.notify_all()


@cache
def nursery() -> Nursery:
    """That of this test process."""
    made = Nursery()
    atexit.register(made.stop)
    return made


def serve() -> dict[str, Any]:
    """Fork at each order and tell each end. Returns in every child, with its order."""
    ends, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(ends, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                received = os.read(key.fd, 65536)
                if key.fd == ends:
                    _tell_ends()
                    continue
                if not received:
                    os._exit(0)
                *orders, rest = (rest + received).split(b"\n")
                for order in orders:
                    pid = os.fork()
                    if not pid:
                        signal.set_wakeup_fd(-1)
                        os.close(ends)
                        os.close(wakes)
                        return dict(json.loads(order))
                    _say(pid, None)


def _tell_ends() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(pid, os.waitstatus_to_exitcode(status))


def _say(pid: int, code: int | None) -> None:
    os.write(1, json.dumps([pid, code]).encode() + b"\n")


def _read_unless_hung(read: Callable[..., int], hung: str, *arguments: Any) -> int:
    while os.path.exists(hung):
        time.sleep(0.01)
    return read(*arguments)


def become(order: Mapping[str, Any]) -> None:
    """Of what this process had before the sidecar would know, nothing is left but modules."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(order["folder"])
    if order["network"]:
        with open(order["network"]) as file:
            assert not _LIBC.setns(file.fileno(), _CLONE_NEWNET)
    os.environ.clear()
    os.environ.update(order["environment"])
    if hung := os.environ.get(HUNG):
        os.preadv = functools.partial(_read_unless_hung, os.preadv, hung)
    nothing, log = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
    )
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.close(nothing)
    os.close(log)
    sys.argv = ["tiercheck_sidecar"]
    for constant, seconds in order["patience"].items():
        module, name = constant.split(":")
        assert hasattr(importlib.import_module(module), name), constant
        setattr(importlib.import_module(module), name, seconds)


if __name__ == "__main__":
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    del sys.path[0]  # the folder of the tests
    import tiercheck_sidecar.app  # noqa: F401

    become(serve())
    runpy.run_module("tiercheck_sidecar", run_name="__main__", alter_sys=True)
