"""Starts lives of training scripts in a process that has imported their frameworks already: each is a fork that runs the script as its main program.

Importing is what is slow. Each line of standard input asks for one life, in JSON; each line of standard output answers with what
its rank 0 said. A life ends by itself, or by SIGKILL of all its ranks as soon as rank 0 has said a certain step.
No life may talk to another machine.
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
import sys
from typing import Any

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_OWN = ("127.", "::1", "localhost")
_OPENS = ("socket.connect", "socket.getaddrinfo")


def live(argv: list[str], env: dict[str, str], ranks: int, kill_at: int | None) -> list[dict[str, Any]]:
    """What rank 0 said. Raises RuntimeError if a rank ended in another way than it should."""
    (port,) = _free_ports(1)
    children: list[int] = []
    with selectors.DefaultSelector() as selector:
        for rank in range(ranks):
            read, write = os.pipe()
            told = {} if ranks == 1 else _as_torchrun(rank, ranks, port)
            children.append(_fork(argv, env | told, write))
            os.close(write)
            selector.register(read, selectors.EVENT_READ, rank)
        said: list[dict[str, Any]] = []
        rest, killed = b"", False
        others = b""
        while selector.get_map():
            for key, _ in selector.select():
                content = os.read(key.fd, 65536)
                if not content:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                elif key.data:
                    others += content
                elif not killed:
                    *lines, rest = (rest + content).split(b"\n")
                    for line in lines:
                        if line.startswith(b'{"step"') and not killed:
                            said.append(json.loads(line))
                            killed = said[-1]["step"] == kill_at
                    if killed:
                        for child in children:
                            os.kill(child, signal.SIGKILL)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    expected = -signal.SIGKILL if kill_at is not None else 0
    if ended != [expected] * ranks:
        raise RuntimeError(f"the ranks ended with {ended} instead of {expected}, after {said[-1:]}")
    if b'{"step"' in others:
        raise RuntimeError("not only rank 0 speaks: the ranks do not know of each other")
    return said


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "lives",
    }  # fmt: skip


def _free_ports(count: int) -> list[int]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in opened]
    for each in opened:
        each.close()
    return ports


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
        runpy.run_path(argv[0], run_name="__main__")
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
    own = isinstance(host, str) and (host.startswith((*_OWN, "/")) or host in ("", socket.gethostname()))
    if host is not None and not own:
        raise PermissionError(f"an example asks {host!r}")


def main() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
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
