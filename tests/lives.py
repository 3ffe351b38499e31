"""Runs lives of training scripts, each in a process forked from one that has imported already.

To import torch, or a framework on top of it, takes far longer than what the scripts of these tests do. Tests
ask for lives (`Lives`) through the standard input of that one process, with a line of JSON for each; a line
answers with what the ranks said. A life ends by itself, or by SIGKILL of all its ranks as soon as rank 0 has
said a certain step. No life may talk to another machine.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercheck_local.addresses import free_ports

Said = list[dict[str, Any]]
"""What one rank said, of what is JSON: a line for each step, mostly."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_OWN = ("127.", "::1", "localhost", "/")
_OPENS = ("socket.connect", "socket.getaddrinfo")


class Lives:
    """The process that all lives are forked from. It has imported nothing before it is asked to."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "stderr.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def run(
        self,
        modules: Sequence[str],
        argv: Sequence[str | Path],
        *,
        ranks: int | None = None,
        kill_at: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Said]:
        """What each rank of this life said. `modules`: what its script imports. `ranks`: as under torchrun;
        None: alone, without it."""
        asked = {
            "modules": list(modules), "argv": [*map(str, argv)], "env": {**(env or {})}, "ranks": ranks,
            "kill_at": kill_at,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "it is gone"}')
        assert "error" not in answer, f"{answer['error']}\n{self._log.read_text()[-4000:]}"
        said: list[Said] = answer["said"]
        return said

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def live(argv: list[str], env: dict[str, str], ranks: int | None, kill_at: int | None) -> list[Said]:
    """Raises RuntimeError if a rank ended in another way than it should."""
    numbers = range(ranks or 1)
    said: list[Said] = [[] for _ in numbers]
    rests = [b"" for _ in numbers]
    (port,) = free_ports(1)
    children: list[int] = []
    ended: dict[int, int] = {}
    killed = False
    with selectors.DefaultSelector() as selector:
        for rank in numbers:
            read, write = os.pipe()
            children.append(
                _fork(argv, env if ranks is None else env | _as_torchrun(rank, ranks, port), write)
            )
            os.close(write)
            selector.register(read, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                content = os.read(key.fd, 65536)
                if not content:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    ended[key.data] = os.waitstatus_to_exitcode(os.waitpid(children[key.data], 0)[1])
                    if ended[key.data] and not killed:  # the others would wait for it
                        _kill(children[rank] for rank in numbers if rank not in ended)
                *lines, rests[key.data] = (rests[key.data] + content).split(b"\n")
                for line in lines:
                    if line.startswith(b'{"') and not killed:
                        said[key.data].append(json.loads(line))
                        killed = key.data == 0 and kill_at is not None and said[0][-1].get("step") == kill_at
                        if killed:
                            _kill(children[rank] for rank in numbers if rank not in ended)
    expected = 0 if kill_at is None else -signal.SIGKILL
    if set(ended.values()) != {expected}:
        raise RuntimeError(
            f"the ranks ended with {sorted(ended.items())} instead of {expected}, after {said[0][-1:]}"
        )
    return said


def _kill(children: Iterable[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)


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


def main() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # as in pytest, and not the folder of the tests
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            for name in asked.pop("modules"):
                importlib.import_module(name)
            answer: Any = {"said": live(**asked)}
        except (ImportError, RuntimeError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
