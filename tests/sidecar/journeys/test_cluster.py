"""What is saved is copied, what is lost comes back, and no stranger is heard.

Whatever goes wrong in a thread of the sidecar, its work goes on and the controller is told.
"""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.journeys.strikes import Strikes
from tests.sidecar.world import (
    DEADLINE,
    FakeLauncher,
    FakeRank,
    Lines,
    MakeWorld,
    World,
    content,
    flip,
    until,
)
from tiercheck.protocol import names
from tiercheck.protocol.artifacts.slot import read_header
from tiercheck.protocol.directive import Phase, Source, Tier
from tiercheck.protocol.local import Hello, Order, StepLeft
from tiercheck.protocol.version import Version
from tiercheck_sidecar import app
from tiercheck_sidecar.app import Sidecar
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.supervision import INTERNAL_ERROR


def copies(world: World, worker: int, rank: int) -> list[Path]:
    return sorted(world.memory_dir(worker).glob(f"copy-{rank}-*.safetensors"))


def test_snapshot_is_sealed_copied_and_both_watermarks_rise(make_world: MakeWorld) -> None:
    world = make_world(workers=2, procs=2).launch()
    world.save_everywhere(1, 2, 3, 4, 5, 6)
    for worker in range(2):
        world.reach("local", Version(6, 1), worker)
        for rank in range(4):
            tier = Tier.LOCAL if rank // 2 == worker else Tier.PEER
            assert world.holds(worker, rank, Version(6, 1), tier)
        until(lambda worker=worker: not world.holds(worker, 0, Version(4, 1)), "older ones are freed")
    assert world.report(0).counters.replicated >= 6


def test_four_workers_lose_two_and_all_ranks_come_back(make_world: MakeWorld) -> None:
    world = make_world(workers=4, procs=2).launch()
    world.save_everywhere(10, 20)
    world.renew(1, 3)
    lost = {rank: (world.from_peer((rank // 2 + 1) % 4),) for rank in (2, 3, 6, 7)}
    world.begin(Version(20, 1), lost)
    for worker in range(4):
        for rank in world.report(worker).restore.ranks:
            expected = (Tier.PEER, (worker + 1) % 4) if worker in (1, 3) else (Tier.LOCAL, None)
            assert (rank.tier, rank.worker) == expected, rank
    world.reach("peer", Version(20, 1))
    world.save_everywhere(30)


def test_flipped_bit_in_a_peers_copy_is_noticed_and_the_next_source_is_used(make_world: MakeWorld) -> None:
    world = make_world(workers=3)
    world.start()
    world.new_attempt()
    world.direct(Phase.HOLD, holders=(1, 2))
    world.direct(Phase.RELEASE, holders=(1, 2))
    world.save_everywhere(10)
    (copy,) = copies(world, 1, 0)
    flip(copy, 150_000)
    world.renew(0)
    world.restore_in_vain(Version(10, 1), {0: (world.from_peer(1),)}, holders=(1, 2))
    assert "worker 1 is bad" in world.report(0).restore.ranks[0].failures[0]
    assert [(bad.rank, bad.version, bad.worker) for bad in world.report(0).quarantined] == [
        (0, Version(10, 1), 1)
    ]
    world.begin(Version(10, 1), {0: (world.from_peer(1), world.from_peer(2))})
    restore = world.report(0).restore.ranks[0]
    assert (restore.tier, restore.worker) == (Tier.PEER, 2)
    until(lambda: world.holds(1, 0, Version(10, 1), Tier.PEER), "the bad copy is replaced by a good one")


def test_restore_without_any_good_source_fails_and_says_why(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    world.save_everywhere(10)
    (copy,) = copies(world, 1, 0)
    flip(copy, 150_000)
    world.renew(0)
    world.restore_in_vain(Version(10, 1), {0: (world.from_peer(1),)})
    assert "bad" in world.report(0).restore.ranks[0].failures[0]
    assert not world.holds(0, 0, Version(10, 1)), "a half-restored slot is never offered"


def test_sidecar_killed_while_training_comes_back_with_what_it_held(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    world.save_everywhere(10)
    world.kill(1)
    world.start(1)
    assert world.holds(1, 1, Version(10, 1), Tier.LOCAL)
    assert world.holds(1, 0, Version(10, 1), Tier.PEER)
    world.direct(Phase.RELEASE)
    world.save_everywhere(20)


def test_unreachable_holder_never_delays_a_capture(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    world.save_everywhere(10)
    world.pause(1)
    with world.rank(0) as rank:
        rank.socket.settimeout(2.0)  # what a trainer would wait; far less than any exchange timeout
        rank.reserve(300_000)
        assert rank.save(20)
        assert rank.save(30)
        assert rank.begin(40).skip, "memory is bounded: the committed and two pending ones"
    world.resume(1)
    assert world.holds(0, 0, Version(10, 1)), "the newest complete version is kept"


def test_ranks_that_skip_independently_agree_in_the_end(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    with world.ranks() as (one, other):
        assert one.save(1)
        assert other.save(2)
        assert one.save(3)
        assert other.save(3)
        world.reach("peer", Version(3, 1), 1)
        until(
            lambda: [each.version.step for each in world.report(0).holdings] == [3, 3], "the others are freed"
        )


def test_versions_cut_off_by_the_history_are_dropped_after_release(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    with world.ranks() as (one, other):
        for rank in (one, other):
            assert rank.save(10)
        world.reach("peer", Version(10, 1), 1)
        assert one.save(20)
        until(lambda: world.holds(0, 0, Version(20, 1)), "sealed")
    world.begin(Version(10, 1))
    until(lambda: not world.holds(0, 0, Version(20, 1)), "dropped")
    until(lambda: not world.holds(1, 0, Version(20, 1)), "its copy too")
    assert world.holds(0, 0, Version(10, 1))


def test_process_stays_once_its_rank_has_left_the_step_and_as_long_as_it_is_there(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=1)
    world.policy = replace(world.policy, interrupt_seconds=5.0)
    world.launch()
    path = world.run_dir(0) / names.SOCKET_NAME
    launcher, listener = FakeLauncher(path), Lines(path)
    assert launcher.receive(Order).listens == (), "nobody listens yet"
    refused = Lines(path)
    refused.send(Hello("listener", os.getpid(), 0, 1, world.attempt, refusal="NCCL"))
    until(lambda: world.report(0).trainer.refusal == "NCCL", "the reason is reported")
    refused.close()
    until(lambda: world.report(0).trainer.refusal == "", "the rank that had it is gone")
    listener.send(Hello("listener", os.getpid(), 0, 1, world.attempt))
    assert listener.receive(Order).listens == (0,)
    assert launcher.receive(Order).listens == (0,)
    assert world.report(0).trainer.listens == 1
    with world.rank(0) as rank:
        assert rank.reserve(300_000).ok
        assert rank.save(1)
        world.reach("local", Version(1, 1))
    world.new_attempt(Version(1, 1))
    world.direct(Phase.HOLD)
    for line in (launcher, listener):
        order = line.receive(Order)
        assert (order.attempt, order.interrupt_seconds, order.listens, order.stays) == (2, 5.0, (0,), ())
    listener.send(StepLeft(1))
    listener.send(StepLeft(2))
    assert launcher.receive(Order).stays == (0,)
    assert listener.receive(Order).stays == (0,)
    listener.close()
    order = launcher.receive(Order)
    assert (order.attempt, order.listens, order.stays) == (2, (), ())
    launcher.close()


SIZE = 37 * 1024 * 1024 + 12_345


def test_many_chunks_are_pushed_and_pulled_over_several_streams(make_world: MakeWorld) -> None:
    world = make_world(workers=2, limit=400 << 20).launch()
    with world.ranks(SIZE) as ranks:
        for rank in ranks:
            assert rank.save(10)
        world.reach("peer", Version(10, 1))
    world.renew(0)
    world.begin(Version(10, 1), {0: (world.from_peer(1),)})
    assert world.report(0).restore.ranks[0].tier is Tier.PEER
    with world.rank(0) as rank:
        data = Path(rank.welcome.restore_path).read_bytes()
    assert content(0, 10, 1_000_000) in data
    assert len(data) > SIZE


# In their nodes' network


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    world = make_world(workers=3)
    world.on_one_host = True
    return world


def test_copies_are_made_and_restored_between_pods_of_one_address(world: World) -> None:
    world.launch()
    world.save_everywhere(10, 20)
    for worker in range(3):
        assert world.holds((worker + 1) % 3, worker, Version(20, 1), Tier.PEER)
    world.renew(1)
    world.begin(Version(20, 1), {1: (world.from_peer(2),)})
    (rank,) = world.report(1).restore.ranks
    assert (rank.tier, rank.worker) == (Tier.PEER, 2)
    until(lambda: not world.report(0).unreachable, "and nobody misses it any more")


def test_peer_of_the_same_address_that_is_gone_is_the_one_that_is_named(world: World) -> None:
    world.launch()
    world.save_everywhere(10)
    world.kill(2)
    until(lambda: world.report(1).unreachable, "worker 1 notices")
    (lost,) = world.report(1).unreachable
    assert (lost.worker, lost.host) == (2, world.peer(2).host)


def test_job_on_one_address_ends_with_its_last_version_in_the_remote_tier(world: World) -> None:
    store = world.use_directory(every=1000)
    world.launch()
    world.save_everywhere(7)
    world.direct(Phase.FINISH, holders=())
    for worker in (0, 1, 2):
        assert world.terminate(worker) == 0, world.logs(worker)
    assert [path.name for path in store.rglob("manifests/*.json")] == ["000000000007-1.json"]


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
def struck(make_world: MakeWorld, strikes: Strikes, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(app, "_HAND_OVER", 0.0)  # all end at once: nobody is there to be handed anything
    made = make_world(Indoors, workers=2)
    made.node_memory = True
    made.use_directory()
    return made


def test_what_is_kept_goes_on_being_kept_although_every_wait_fails_once(
    struck: Indoors, strikes: Strikes
) -> None:
    struck.launch()
    with struck.ranks() as ranks:
        steps = iter(range(10, 1_000_000, 10))

        def advance() -> None:
            step = next(steps)
            for rank in ranks:
                rank.save(step)

        def goes_on(beyond: Version) -> bool:
            """Sealed and replicated, offloaded, freed."""
            advance()
            report = struck.report(0)
            peer, remote = report.watermarks.peer, report.watermarks.remote
            return (
                peer is not None
                and remote is not None
                and min(peer, remote) > beyond
                and not any(each.version <= beyond for each in report.holdings)
            )

        until(lambda: goes_on(Version(10, 1)) and not strikes.spared(), f"{strikes.spared()} fail and go on")
        names = {name for name in strikes.begun.values()}
        loops = {name for name, _ in struck.resident(0).sidecar._loops()}
        assert app._BESIDE < loops <= names
        assert names >= {
            "trainer-socket",
            "exchange",
            "exchange-sweep",
            "snapshots-to-worker-1",
            "heartbeat-of-worker-1",
        }
        told = [each.message for each in struck.report(0).problems if each.reason == INTERNAL_ERROR]
        assert "Injected in " in told[0]
        assert " restore " in struck.resident(0).sidecar.state.threads._troubles["restore"][1]
        mark = struck.report(0).watermarks.peer
        assert mark is not None
        until(lambda: goes_on(mark), "after all have failed")

    before = set(strikes.struck)
    kept = until(lambda: struck.report(0).watermarks.remote, "something to come back to")
    struck.kill(1)
    shutil.rmtree(struck.memory_dir(1))
    struck.start(1)
    struck.begin(kept, {0: (Source(Tier.REMOTE),), 1: (Source(Tier.REMOTE),)})
    assert [each.tier for each in struck.report(1).restore.ranks] == [Tier.REMOTE]
    assert [where for thread, where in strikes.struck - before if strikes.begun[thread] == "restore"]
    with struck.ranks() as ranks:
        check_restored(ranks[1], kept)
        until(lambda: all(rank.save(kept.step + 1_000_000) for rank in ranks), "saved in the new attempt")


def check_restored(rank: FakeRank, version: Version) -> None:
    body = Path(rank.welcome.restore_path).read_bytes()
    header = read_header(body)
    assert (header.rank, header.version) == (rank.hello.rank, version)
    begin = min(tensor.begin for tensor in header.tensors)
    assert body[begin : header.size] == content(rank.hello.rank, version.step, header.size - begin)
