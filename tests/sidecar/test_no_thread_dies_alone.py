"""Whatever goes wrong in a thread of the sidecar, its work goes on and the controller is told."""

from __future__ import annotations

import ast
import queue
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_process import Indoors
from test_offload import with_directory
from world import FakeRank, content, until

from tiercheck import supervised
from tiercheck.protocol.directive import Source, Tier
from tiercheck.protocol.slot import read_header
from tiercheck.protocol.version import Version
from tiercheck_sidecar import supervision, trainer_socket
from tiercheck_sidecar.supervision import INTERNAL_ERROR, Threads
from tiercheck_sidecar.vault import vault

ROOT = Path(__file__).parents[2]
ONLY_PLACE = ROOT / "tiercheck" / "supervised.py"
MODULES = [path for folder in ("tiercheck", "sidecar") for path in sorted((ROOT / folder).rglob("*.py"))]
BEGINNERS = {"Thread", "Timer", "start_new_thread", "start_joinable_thread"}


def begins_threads(path: Path) -> list[int]:
    """The lines at which a module could begin a thread of its own."""
    named = {
        ast.Name: lambda node: node.id,
        ast.Attribute: lambda node: node.attr,
        ast.alias: lambda node: node.name,
    }
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if type(node) in named
        and named[type(node)](node) in BEGINNERS  # type: ignore[index]
        and not _is_annotation(node, path)
    ]


def _is_annotation(node: ast.AST, path: Path) -> bool:
    """`threading.Thread` as the type of something."""
    tree = ast.parse(path.read_text())
    spans = [
        each.annotation for each in ast.walk(tree) if isinstance(each, (ast.AnnAssign, ast.arg)) and each.annotation
    ]
    spans += [each.returns for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.returns]
    place = (node.lineno, node.col_offset)  # type: ignore[attr-defined]
    return any((s.lineno, s.col_offset) <= place <= (s.end_lineno or 0, s.end_col_offset or 0) for s in spans)


def test_all_threads_are_begun_where_they_are_watched() -> None:
    assert len(MODULES) > 150
    assert begins_threads(ONLY_PLACE)
    assert {str(path): lines for path in MODULES if path != ONLY_PLACE and (lines := begins_threads(path))} == {}


class Injected(Exception):
    """Nobody thought of it."""


class Strikes:
    """Makes every wait of every loop fail once, and each first sealing of every sealer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: dict[threading.Thread, str] = {}
        """The loops."""
        self.struck: set[tuple[threading.Thread, str]] = set()
        real_loop, real_wait = Threads.loop, threading.Condition.wait_for
        real_accept, real_digest = socket.socket.accept, vault.digest

        def loop(threads: Threads, name: str, body: Callable[[], None], *, vital: bool = False) -> threading.Thread:
            def noted() -> None:
                self.begun[threading.current_thread()] = name
                body()

            return real_loop(threads, name, noted, vital=vital)

        def wait_for(condition: threading.Condition, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            self.strike()
            return real_wait(condition, predicate, timeout)

        def accept(listener: socket.socket) -> Any:
            self.strike()
            return real_accept(listener)

        def digest(view: memoryview) -> Any:
            self.strike()
            return real_digest(view)

        class Queue:
            def __init__(self) -> None:
                self._inner: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self.put = self._inner.put

            def get(queue: Queue) -> Any:  # noqa: N805
                self.strike()
                return queue._inner.get()

        monkeypatch.setattr(Threads, "loop", loop)
        monkeypatch.setattr(threading.Condition, "wait_for", wait_for)
        monkeypatch.setattr(socket.socket, "accept", accept)
        monkeypatch.setattr(vault, "digest", digest)
        monkeypatch.setattr(trainer_socket, "queue", SimpleNamespace(SimpleQueue=Queue))
        monkeypatch.setattr(supervised, "FIRST", 0.01)
        monkeypatch.setattr(supervised, "LONGEST", 0.1)
        monkeypatch.setattr(supervision, "MOST_DEATHS", 1000)

    def strike(self) -> None:
        thread = threading.current_thread()
        if thread not in self.begun:
            return
        frame = sys._getframe(2)
        while Path(frame.f_code.co_filename).name in ("threading.py", "board.py"):
            assert frame.f_back is not None
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if (thread, place) not in self.struck:
            self.struck.add((thread, place))
            raise Injected(place)

    def spared(self) -> set[str]:
        """The loops that have not failed yet."""
        failed = {thread for thread, _ in list(self.struck)}
        return {name for thread, name in list(self.begun.items()) if thread not in failed}


@pytest.fixture
def strikes(monkeypatch: pytest.MonkeyPatch) -> Strikes:
    return Strikes(monkeypatch)


@pytest.fixture
def world(memory: Path, strikes: Strikes) -> Iterator[Indoors]:
    root = Path(tempfile.mkdtemp(prefix="tc-"))
    made = Indoors(root, memory, workers=2)
    made.node_memory = True
    with_directory(made)
    yield made
    made.close()
    shutil.rmtree(root, ignore_errors=True)


def test_what_is_kept_goes_on_being_kept_although_every_wait_fails_once(world: Indoors, strikes: Strikes) -> None:
    world.start()
    world.begin()
    with world.ranks() as ranks:
        steps = iter(range(10, 1_000_000, 10))

        def advance() -> None:
            step = next(steps)
            for rank in ranks:
                rank.save(step)

        def goes_on(beyond: Version) -> bool:
            """Sealed and replicated, offloaded, freed."""
            advance()
            report = world.report(0)
            peer, remote = report.watermarks.peer, report.watermarks.remote
            return (
                peer is not None
                and remote is not None
                and min(peer, remote) > beyond
                and not any(each.version <= beyond for each in report.holdings)
            )

        until(lambda: goes_on(Version(10, 1)) and not strikes.spared(), f"{strikes.spared()} fail and go on")
        names = {name for name in strikes.begun.values()}
        assert names >= {name for name, _ in world.resident(0).sidecar._loops()}
        assert names >= {"trainer-socket", "exchange", "exchange-sweep", "snapshots-to-worker-1", "pulse-of-worker-1"}
        told = [each.message for each in world.report(0).problems if each.reason == INTERNAL_ERROR]
        assert "Injected in " in told[0]
        assert " restore " in world.resident(0).sidecar.board.threads._troubles["restore"][1]
        mark = world.report(0).watermarks.peer
        assert mark is not None
        until(lambda: goes_on(mark), "after all have failed")

    before = set(strikes.struck)
    kept = until(lambda: world.report(0).watermarks.remote, "something to come back to")
    world.kill(1)
    shutil.rmtree(world.memory_dir(1))
    world.start(1)
    world.begin(kept, {0: (Source(Tier.REMOTE),), 1: (Source(Tier.REMOTE),)})
    assert [each.tier for each in world.report(1).restore.ranks] == [Tier.REMOTE]
    assert [where for thread, where in strikes.struck - before if strikes.begun[thread] == "restore"]
    with world.ranks() as ranks:
        check_restored(ranks[1], kept)
        until(lambda: all(rank.save(kept.step + 1_000_000) for rank in ranks), "saved in the new attempt")


def check_restored(rank: FakeRank, version: Version) -> None:
    body = Path(rank.welcome.restore_path).read_bytes()
    header = read_header(body)
    assert (header.rank, header.version) == (rank.hello.rank, version)
    begin = min(tensor.begin for tensor in header.tensors)
    assert body[begin : header.size] == content(rank.hello.rank, version.step, header.size - begin)
