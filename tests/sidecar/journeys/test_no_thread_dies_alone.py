"""Whatever goes wrong in a thread of the sidecar, its work goes on and the controller is told."""

from __future__ import annotations

import ast
import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.journeys.strikes import Strikes
from tests.sidecar.world import DEADLINE, FakeRank, MakeWorld, World, content, until
from tiercheck.protocol.artifacts.slot import read_header
from tiercheck.protocol.directive import Source, Tier
from tiercheck.protocol.version import Version
from tiercheck_sidecar import app
from tiercheck_sidecar.app import Sidecar
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.supervision import INTERNAL_ERROR


class Resident:
    """One sidecar, with what `World` uses of a process."""

    def __init__(self, config: SidecarConfig) -> None:
        self.sidecar = Sidecar(config)
        self._loop = asyncio.new_event_loop()
        self._ends: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._live, name=f"sidecar-{config.worker}")
        self._thread.start()

    def _live(self) -> None:
        # Signals reach the main thread only.
        self._loop.add_signal_handler = lambda _, end: self._ends.append(end)  # type: ignore[method-assign, assignment, misc]
        self._loop.run_until_complete(self.sidecar.run())
        self._loop.close()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def send_signal(self, number: int) -> None:
        """None is heard."""

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self._ends[0])

    def wait(self, timeout: float = DEADLINE) -> int:
        self._thread.join(timeout)
        assert not self._thread.is_alive()
        return 0


class Indoors(World):
    """`kill` ends a sidecar in good order."""

    def start(self, *workers: int) -> None:
        for worker in workers or range(self.workers):
            self._life += 1
            resident: Any = Resident(SidecarConfig.from_env(self.env(worker)))
            self._processes[worker] = resident
            until(lambda worker=worker: self.is_ready(worker), f"sidecar {worker} is ready")

    def logs(self, worker: int) -> str:
        return "in this process"

    def resident(self, worker: int) -> Resident:
        found: Any = self._processes[worker]
        assert isinstance(found, Resident)
        return found


ROOT = Path(__file__).parents[3]
ONLY_PLACE = ROOT / "tiercheck" / "supervised.py"
MODULES = [path for folder in ("tiercheck", "sidecar") for path in sorted((ROOT / folder).rglob("*.py"))]
BEGINNERS = {"Thread", "Timer", "start_new_thread", "start_joinable_thread"}


def begins_threads(path: Path) -> list[int]:
    """The lines at which a module could begin a thread of its own. `Thread` as the type of something is none
    of them."""
    text = path.read_text()
    if not any(word in text for word in BEGINNERS):
        return []
    nodes = list(ast.walk(ast.parse(text)))
    types = [
        each.annotation for each in nodes if isinstance(each, (ast.AnnAssign, ast.arg)) and each.annotation
    ]
    types += [each.returns for each in nodes if isinstance(each, ast.FunctionDef) and each.returns]
    spoken = {id(part) for each in types for part in ast.walk(each)}
    return [node.lineno for node in nodes if _name(node) in BEGINNERS and id(node) not in spoken]  # type: ignore[attr-defined]


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.name if isinstance(node, ast.alias) else ""


def test_all_threads_are_begun_where_they_are_watched() -> None:
    assert len(MODULES) > 150
    assert begins_threads(ONLY_PLACE)
    assert {
        str(path): lines for path in MODULES if path != ONLY_PLACE and (lines := begins_threads(path))
    } == {}


@pytest.fixture
def strikes(monkeypatch: pytest.MonkeyPatch) -> Strikes:
    return Strikes(monkeypatch)


@pytest.fixture
def world(make_world: MakeWorld, strikes: Strikes, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(app, "_HAND_OVER", 0.0)  # all end at once: nobody is there to be handed anything
    made = make_world(Indoors, workers=2)
    made.node_memory = True
    made.use_directory()
    return made


def test_what_is_kept_goes_on_being_kept_although_every_wait_fails_once(
    world: Indoors, strikes: Strikes
) -> None:
    world.launch()
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
        loops = {name for name, _ in world.resident(0).sidecar._loops()}
        assert app._BESIDE < loops <= names
        assert names >= {
            "trainer-socket",
            "exchange",
            "exchange-sweep",
            "snapshots-to-worker-1",
            "heartbeat-of-worker-1",
        }
        told = [each.message for each in world.report(0).problems if each.reason == INTERNAL_ERROR]
        assert "Injected in " in told[0]
        assert " restore " in world.resident(0).sidecar.state.threads._troubles["restore"][1]
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
