"""A cut link is silence, not an end, until it is mended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiercheck_local import markers

HERE, THERE, ELSEWHERE = (f"127.{os.getpid() % 200 + 20}.251.{number}" for number in (1, 2, 3))

SERVER = """
import socket, sys, threading
def echo(line):
    while data := line.recv(100):
        line.sendall(data)
    print("ended", flush=True)
server = socket.create_server((sys.argv[1], 7777))
print("ready", flush=True)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""
CLIENT = """
import socket, sys
lines = {}
for words in map(str.split, sys.stdin):
    try:
        if words[0] == "call":
            lines[words[1]] = socket.create_connection((words[2], 7777), 1.0, (words[1], 0))
        else:
            lines[words[1]].sendall(b"x")
            assert lines[words[1]].recv(1) == b"x"
        print("fine", flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start(script: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env=markers.hooked_environment(os.environ, str(tmp_path / "cut")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_cut_link_is_silent_for_old_and_new_connections_and_for_no_others(
    spawn: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    server, client = spawn(SERVER, THERE), spawn(CLIENT)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"

    def said(text: str) -> str:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(text + "\n")
        client.stdin.flush()
        return client.stdout.readline().strip()

    assert said(f"call {HERE} {THERE}") == said(f"say {HERE}") == "fine"
    assert said(f"call {ELSEWHERE} {THERE}") == "fine"
    markers.write_cuts(tmp_path / "cut", [frozenset((HERE, THERE))])
    while said(f"say {HERE}") == "fine":
        pass
    assert said(f"say {ELSEWHERE}") == "fine", "only what was cut"
    assert said(f"call {HERE} {THERE}") == "silence"
    os.set_blocking(server.stdout.fileno(), False)
    assert server.stdout.readline() == "", "the server sees no end of the connection"
    markers.write_cuts(tmp_path / "cut", [])
    assert server.poll() is None
    for _ in range(100):
        if said(f"call {HERE} {THERE}") == "fine":
            break
    assert said(f"say {HERE}") == "fine"


def test_process_of_a_cluster_whose_links_cannot_be_cut_is_left_alone() -> None:
    assert markers.hooked_environment({"A": "b"}, None) == {"A": "b"}
