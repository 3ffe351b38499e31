"""Runs lives of training scripts, each in a process forked from one that has imported already.

To import torch, or a framework on top of it, takes far longer than what the scripts of these tests do. Tests
ask for lives (`Lives`) over the socket of one server, which all workers of pytest share, with a line of JSON
for each; a line answers with what the ranks said. A life ends by itself, or by SIGKILL of all its ranks as
soon as rank 0 has said a certain step. No life may talk to another machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercheck_local.markers import free_ports

Said = list[dict[str, Any]]
"""What one rank said, of what is JSON: a line for each step, mostly."""

_ROOT = Path(__file__).resolve().parents[1]
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_OWN = ("127.", "::1", "localhost", "/")
_OPENS = ("socket.connect", "socket.getaddrinfo")
_KNOWN = set[str]()


class Lives:
    """A connection to the server that all lives are forked from, which has imported nothing before it is
    asked to. Whoever needs the server first starts it; it ends when the last connection does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder / "lives.log"
        self._server: subprocess.Popen[bytes] | None = None
        with open(folder / "lives.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._connect():
                self._start()
                assert self._connect(), self._log.read_text()

    def _connect(self) -> bool:
        """Returns whether a server runs: it greets."""
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.connect(str(self._folder / "lives"))
            self._answers = self._connection.makefile("rb")
            return self._answers.readline() == b"\n"
        except OSError:
            return False

    def _start(self) -> None:
        """Returns when the server listens."""
        with open(self._log, "wb") as log, socket.socket(socket.AF_UNIX) as listener:
            (self._folder / "lives").unlink(missing_ok=True)
            listener.bind(str(self._folder / "lives"))
            listener.listen()
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=[listener.fileno()],
            )

    def run(
        self,
        modules: Sequence[str],
        argv: Sequence[str | Path | int],
        *,
        ranks: int | None = None,
        kill_at: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Said]:
        """What each rank of this life said. `modules`: what its script imports; what a script of ours imports
        at its beginning is known. `ranks`: as under torchrun; None: alone, without it. `kill_at`: the last
        step of rank 0, as it says it; a script may also kill itself."""
        asked = {
            "modules": list(modules), "argv": [*map(str, argv)], "env": {**(env or {})}, "ranks": ranks,
            "kill_at": kill_at,
        }  # fmt: skip
        self._connection.sendall(json.dumps(asked).encode() + b"\n")
        answer = json.loads(self._answers.readline() or '{"error": "it is gone"}')
        assert "error" not in answer, f"{answer['error']}\n{self._log.read_text()[-4000:]}"
        said: list[Said] = answer["said"]
        return said

    def stop(self) -> None:
        self._answers.close()
        self._connection.close()
        if self._server is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # others may still need it
                self._server.wait(1)


def live(argv: list[str], env: dict[str, str], ranks: int | None, kill_at: int | None) -> list[Said]:
    """Raises RuntimeError if a rank ended in another way than it should."""
    numbers = range(ranks or 1)
    said: list[Said] = [[] for _ in numbers]
    rests = [b"" for _ in numbers]
    (port,) = free_ports(1)
    children: list[int] = []
    ended: dict[int, int] = {}

    def kill_others() -> None:
        for rank in numbers:
            if rank not in ended:
                os.kill(children[rank], signal.SIGKILL)

    with selectors.DefaultSelector() as selector:
        for rank in numbers:
            read, write = os.pipe()
            children.append(
                _fork(argv, env if ranks is None else env | _as_torchrun(rank, ranks, port), write)
            )
            os.close(write)
            selector.register(read, selectors.EVENT_READ, (rank, True))
            selector.register(os.pidfd_open(children[rank]), selectors.EVENT_READ, (rank, False))
        killed = False
        while selector.get_map():
            for key, _ in selector.select():
                rank, speaks = key.data
                content = os.read(key.fd, 65536) if speaks else b""
                if not content:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                if not speaks:
                    ended[rank] = os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1])
                    with contextlib.suppress(ProcessLookupError):
                        # Workers of a loader, which would hold the pipe for seconds.
                        os.killpg(children[rank], signal.SIGKILL)
                    if ended[rank] and not killed:  # the others would wait for it
                        kill_others()
                *lines, rests[rank] = (rests[rank] + content).split(b"\n")
                for line in lines:
                    if line.startswith(b'{"') and not killed:
                        said[rank].append(json.loads(line))
                        killed = rank == 0 and kill_at is not None and said[0][-1].get("step") == kill_at
                        if killed:
                            kill_others()
    expected = 0 if kill_at is None else -signal.SIGKILL
    if set(ended.values()) != {expected}:
        raise RuntimeError(
            f"the ranks ended with {sorted(ended.items())} instead of {expected}, after {said[0][-1:]}"
        )
    return said


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "lives",
    }  # fmt: skip


def _fork(argv: list[str], env: dict[str, str], write: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(write, 1)
        sys.stdout = os.fdopen(1, "w")
        sys.addaudithook(_only_this_machine)
        os.environ.update(env)
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(argv[0]))
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        sys.stdout.flush()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            sys.stderr.flush()
        os._exit(code)


def _only_this_machine(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _OPENS:
        return
    host = arguments[1] if event == "socket.connect" else arguments[0]
    host = host[0] if isinstance(host, tuple) else host
    own = isinstance(host, str) and (host.startswith(_OWN) or host in ("", socket.gethostname()))
    if host is not None and not own:
        raise PermissionError(f"a life asks {host!r}")


def _answer(asked: dict[str, Any]) -> Any:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        return {"said": live(**asked)}
    except Exception as error:  # whatever it is, the test that waits shall know
        return {"error": str(error) or repr(error)}


def _import(modules: list[str], script: str) -> None:
    """Imports these, and what a script of ours imports before its `main`."""
    for name in modules:
        importlib.import_module(name)
    if script not in _KNOWN and script.startswith((f"{_ROOT}/tests/", f"{_ROOT}/examples/")):
        runpy.run_path(script, run_name="imported")
        _KNOWN.add(script)
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # as an optimizer does at its first step
    gc.collect()
    gc.freeze()  # or the first collection of each life would copy what all of them share


def main(listener: socket.socket) -> None:
    sys.path[0] = str(_ROOT)  # as in pytest, and not the folder of the tests
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        clients = running = 0
        while True:
            while running and os.waitpid(-1, os.WNOHANG)[0]:
                running -= 1
            for key, _ in selector.select():
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.sendall(b"\n")
                    selector.register(connection, selectors.EVENT_READ, connection.makefile("rb"))
                    clients += 1
                elif line := key.data.readline():
                    asked = json.loads(line)
                    try:
                        _import(asked.pop("modules"), asked["argv"][0])
                    except ImportError as error:
                        key.fileobj.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
                    else:
                        if not os.fork():
                            key.fileobj.sendall(json.dumps(_answer(asked)).encode() + b"\n")
                            os._exit(0)
                        running += 1
                else:
                    selector.unregister(key.fileobj)
                    key.data.close()
                    key.fileobj.close()
                    clients -= 1
                    if not clients:
                        return


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
