"""Silences the links of a Python process that a fault has cut, without any privilege.

Python imports this module if its folder is on PYTHONPATH. A file names pairs of addresses. Connections
between the two are replaced, descriptor by descriptor, by sockets on which nothing ever happens (that reaches
C++ code as well), and new ones are sent to a listener that never answers. The other end sees no end of the
connection either. When a link is restored, what was cut stays dead until its owner gives it up; new
connections work at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import os
import socket
import sys
import threading
import time

tiercheck_warm = True
"""A marker for the launcher: nothing that runs here reads what an attempt sets."""
CUTS = "TIERCHECK_LOCAL_CUTS"
_LOOK_EVERY = 0.2
_LOOPBACK = "127.0.0.1"
"""The source address of connections to another loopback address that were not bound to one."""


class _Links:
    """The cut links, and the sockets that are held in place of them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self.pairs: set[frozenset[str]] = set()
        self._kept: list[int] = []
        self._holes: list[socket.socket] = []
        self._deaf: list[socket.socket] = []

    def watch(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY)
            self.look()

    def look(self) -> None:
        try:
            stat = os.stat(self._path)
        except OSError:
            return
        if (stat.st_mtime_ns, stat.st_ino) != self._seen:
            self._seen = (stat.st_mtime_ns, stat.st_ino)
            with open(self._path) as file:
                self.pairs = {frozenset(line.split()) for line in file if line.strip()}
            if not self.pairs:
                self._let_go()
        if self.pairs:
            for name in os.listdir("/proc/self/fd"):
                self._mute(int(name))

    def _mute(self, number: int) -> None:
        if number in self._kept:
            return
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is not connected
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                return
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                    return
                if not self.is_cut(found.getsockname()[0], found.getpeername()[0]):
                    return
                hole, far = socket.socketpair()
                self._holes.append(far)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    hole.setsockopt(
                        socket.SOL_SOCKET, option, found.getsockopt(socket.SOL_SOCKET, option, 16)
                    )
                fcntl.fcntl(hole, fcntl.F_SETFL, fcntl.fcntl(found, fcntl.F_GETFL))
                self._kept.append(os.dup(number))  # the other end must not see the connection end
                os.dup2(hole.fileno(), number, inheritable=False)
                hole.close()

    def _let_go(self) -> None:
        for number in self._kept:
            os.close(number)
        for hole in self._holes:
            hole.close()
        self._kept.clear()
        self._holes.clear()

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.pairs

    def nowhere(self) -> tuple[str, int]:
        """Returns the address of a listener with a full queue: the kernel drops requests for a connection."""
        if not self._deaf:
            listener = socket.socket()
            listener.bind((_LOOPBACK, 0))
            listener.listen(0)
            self._deaf.append(listener)
            for _ in range(2):
                caller = socket.socket()
                caller.setblocking(False)
                with contextlib.suppress(OSError):
                    _connect(caller, listener.getsockname())
                self._deaf.append(caller)
        host, port = self._deaf[0].getsockname()
        return str(host), int(port)


_connect = socket.socket.connect


def _install(path: str) -> None:
    links = _Links(path)

    def connect(self: socket.socket, address: object) -> None:
        if self.family == socket.AF_INET and isinstance(address, tuple) and links.pairs:
            here = self.getsockname()[0]
            if links.is_cut(_LOOPBACK if here == "0.0.0.0" else here, str(address[0])):
                address = links.nowhere()
        _connect(self, address)  # type: ignore[arg-type]

    socket.socket.connect = connect  # type: ignore[assignment, method-assign]
    links.look()
    threading.Thread(target=links.watch, name="cut-links", daemon=True).start()


def _run_the_next_one() -> None:
    """Runs the other module of this name that the interpreter would have imported, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(CUTS):
    _install(os.environ[CUTS])
_run_the_next_one()
