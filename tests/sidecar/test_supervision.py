"""Loops that die are begun again, or end the process; connections only end themselves."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.sidecar.exchange.test_exchange_fetch import copied
from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.world import DEADLINE, FakeLauncher, until
from tiercheck import supervised
from tiercheck.protocol.directive import NO_SOURCES, Phase, Restore, Source, Tier
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.version import Artifact, Version
from tiercheck.supervised import FIRST, LONGEST, REMEMBERED, describe, supervise
from tiercheck_sidecar.artifact_source import ArtifactSource
from tiercheck_sidecar.exchange.frames import WireBroken
from tiercheck_sidecar.exchange.server import _MOST_STRANGERS
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.restore.restore import RankRestorer, Restorer
from tiercheck_sidecar.supervision import INTERNAL_ERROR, MOST_DEATHS, Threads, incoming
from tiercheck_sidecar.trainer.pod_socket import TrainerSocket
from tiercheck_sidecar.vault import Vault

SECRET = "hvs.the-token-itself"


class Clock:
    """Time that passes only in pauses."""

    def __init__(self, pauses: int) -> None:
        self.now, self.left, self.pauses = 0.0, pauses, list[float]()

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> bool:
        self.now += seconds
        self.pauses.append(seconds)
        return len(self.pauses) < self.left


def fail(*_: object, **__: object) -> None:
    raise ValueError(SECRET)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit, RecursionError, KeyError])
def test_loop_begins_again_whatever_ended_it_until_it_returns(error: type[BaseException]) -> None:
    lives: list[int] = []

    def body() -> None:
        lives.append(len(lives))
        if len(lives) < 4:
            raise error

    supervise(body, lambda *_: None, Clock(10).pause)
    assert len(lives) == 4


def test_it_waits_longer_each_time_and_forgets_what_is_long_past() -> None:
    clock, counts = Clock(30), list[int]()
    supervise(fail, lambda _, deaths: counts.append(deaths), clock.pause, clock)
    assert clock.pauses[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert max(clock.pauses) == LONGEST
    assert max(counts) <= REMEMBERED / LONGEST + 10, "as many as there were in the last minutes, not ever"


def test_who_is_told_may_fail_too() -> None:
    clock = Clock(5)
    supervise(fail, fail, clock.pause, clock)
    assert len(clock.pauses) == 5


def test_what_is_told_names_the_place_and_no_secret() -> None:
    with pytest.raises(ValueError, match=SECRET) as caught:
        fail()
    assert describe(caught.value).startswith("ValueError in test_supervision.py, line ")
    assert SECRET not in describe(caught.value)


class Kept(Threads):
    """Threads whose pauses take no time."""

    def __init__(self) -> None:
        self.clock, self.ends, self.changes = Clock(3 * MOST_DEATHS), list[int](), list[int]()
        super().__init__(lambda: self.changes.append(1), clock=self.clock, end=lambda: self.ends.append(1))

    def pause(self, seconds: float) -> bool:
        return self.clock.pause(seconds)


@pytest.mark.parametrize("vital", [True, False])
def test_vital_loop_that_keeps_dying_ends_the_process_and_another_never_does(vital: bool) -> None:
    threads = Kept()
    threads.loop("reclaim", fail, vital=vital).join(20)
    assert bool(threads.ends) == vital
    assert len(threads.clock.pauses) == 3 * MOST_DEATHS


def test_process_ends_at_once_and_with_an_error() -> None:
    script = (
        "from tiercheck import supervised; from tiercheck_sidecar.supervision import Threads;"
        "supervised.FIRST = 0.0; Threads().loop('reclaim', lambda: 1 / 0, vital=True).join(60)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "the loop reclaim fails again and again" in ended.stderr


def test_trouble_is_told_at_once_and_for_as_long_as_it_is_fresh() -> None:
    threads = Kept()
    threads.clock.left = 2
    assert threads.problems() == ()
    threads.loop("reclaim", fail).join(20)
    (problem,) = threads.problems()
    assert problem.reason == INTERNAL_ERROR
    assert "its loop reclaim failed and began again, 2 times in 10 minutes: ValueError in " in problem.message
    assert SECRET not in problem.message
    assert len(threads.changes) == 2
    threads.clock.now += REMEMBERED + 1
    assert threads.problems() == ()


def test_many_troubles_are_one_bounded_sentence() -> None:
    threads = Kept()
    for number in range(1000):
        threads.trouble(f"loop-{number}", "x" * 100)
    (problem,) = threads.problems()
    assert "and 997 more" in problem.message
    assert len(problem.message) < 1000


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_connection_whose_thread_dies_is_closed_and_nothing_more(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    threads, undone = Kept(), list[int]()
    threads.serve("exchange", pair[0], fail, lambda: undone.append(1))
    pair[1].settimeout(20)
    assert pair[1].recv(1) == b""
    assert undone == []
    assert threads.problems() == (), "it comes again"


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_connection_for_which_there_is_no_thread_is_closed_and_its_place_is_free(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    threads, undone = Kept(), list[int]()
    threads.serve("exchange", pair[0], fail, lambda: undone.append(1))
    pair[1].settimeout(20)
    assert pair[1].recv(1) == b""
    assert undone == [1]
    assert "no thread" in threads.problems()[0].message


TROUBLES = [
    errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPERM, errno.EPROTO,
    errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOPROTOOPT, errno.EOPNOTSUPP,
    errno.ETIMEDOUT, errno.EAGAIN,
]  # fmt: skip


class Listener(socket.socket):
    """Fails as `errors` say before each connection that it accepts."""

    errors: Iterator[int] = iter(())

    def accept(self) -> tuple[socket.socket, object]:
        for number in self.errors:
            raise OSError(number, os.strerror(number))
        return super().accept()


def test_accepting_goes_on_after_every_passing_error() -> None:
    threads = Kept()
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.errors = iter(TROUBLES)
        threads.clock.left = 1000
        with socket.create_connection(listener.getsockname()):
            connection = next(incoming("exchange", listener, threads, lambda: False))
            connection.close()
    assert len(threads.clock.pauses) == len(TROUBLES)
    assert max(threads.clock.pauses) <= 1.0
    assert "exchange accepts no connections: " in threads.problems()[0].message


def test_accepting_ends_when_it_is_stopped_and_a_broken_listener_is_told() -> None:
    listener = socket.socket()
    listener.close()
    assert list(incoming("exchange", listener, Kept(), lambda: True)) == []
    stops = itertools.chain([False], itertools.repeat(True))
    assert list(incoming("exchange", listener, Kept(), lambda: next(stops))) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        next(incoming("exchange", listener, Kept(), lambda: False))


def test_worker_is_heard_again_after_a_time_without_descriptors(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, troubles = socket.socket.accept, iter(TROUBLES)

    def accept(listener: socket.socket) -> object:
        for number in troubles:
            raise OSError(number, os.strerror(number))
        return real(listener)

    job = stations()
    monkeypatch.setattr(socket.socket, "accept", accept)
    until(lambda: reached(job), "heard again")
    until(lambda: next(troubles, None) is None and reached(job), "heard after all")
    assert [each.reason for each in job[0].state.problems] == [INTERNAL_ERROR]


def reached(job: Stations) -> bool:
    try:
        job[1].connect(0).close()
    except WireBroken:
        return False
    return True


def test_shortage_of_threads_leaves_every_stranger_its_place(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real, refused = stations(), threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name == "exchange" and len(refused) < 2 * _MOST_STRANGERS:
            refused.append(thread.name)
            no_thread()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    while len(refused) < 2 * _MOST_STRANGERS:
        assert not reached(job)
    until(lambda: reached(job), "heard again")
    server = job[0].server
    until(lambda: not server._strangers._guests, "no place is lost")


def test_lanes_that_got_no_thread_at_first_are_begun_later(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "FIRST", 0.01)
    job, real, refused = stations(), threading.Thread.start, set[str]()

    def start(thread: threading.Thread) -> None:
        if "-to-worker-" in thread.name and thread.name not in refused:
            refused.add(thread.name)
            no_thread()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    seal = job[0].save(Version(5, 1), 100_000)
    job[0].replicate(seal.version)
    until(lambda: job[1].vault.find(Artifact(0, seal.version)), "copied")
    assert refused == {"snapshots-to-worker-1", "deltas-to-worker-1"}
    until(lambda: sorted(lanes()) == sorted(refused), "one each")


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "-to-worker-" in thread.name]


def test_launcher_that_gets_no_orders_any_more_can_come_again(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    station = stations(workers=1)[0]
    listener = TrainerSocket(station.state, station.vault, object())  # type: ignore[arg-type]
    listener.start()
    real, failures = SidecarState.wait, iter(["once"])
    introduced = threading.Event()  # it is hung up on while it waits, not while it still speaks

    def wait(state: SidecarState, seen: int, timeout: float) -> int:
        if threading.current_thread().name == "orders":
            for _ in failures:
                introduced.wait(DEADLINE)
                fail()
        return real(state, seen, timeout)

    monkeypatch.setattr(SidecarState, "wait", wait)
    path = station.state.config.socket_path
    try:
        first = FakeLauncher(path)
        introduced.set()
        with first.socket.makefile("rb") as lines:
            assert len(lines.readlines()) == 1, "one order, then it is hung up"
        second = FakeLauncher(path)
        assert second.order().attempt == 1
        second.close()
    finally:
        listener.stop()


def test_fault_of_the_launcher_is_told_as_those_of_the_sidecar_are(stations: MakeStations) -> None:
    station = stations(workers=1)[0]
    listener = TrainerSocket(station.state, station.vault, object())  # type: ignore[arg-type]
    listener.start()
    try:
        launcher = FakeLauncher(station.state.config.socket_path)
        launcher.tell("started", 1, fault="KeyError in app.py, line 7")
        until(lambda: station.state.problems, "told")
        launcher.close()
    finally:
        listener.stop()
    (problem,) = station.state.problems
    assert problem.reason == INTERNAL_ERROR
    assert problem.message.startswith(
        "its launcher failed and goes on (KeyError in app.py, line 7): see the log of the "
    )


def restoring(job: Stations, monkeypatch: pytest.MonkeyPatch) -> SidecarState:
    """Worker 0 begins attempt 2 with what it holds of attempt 1."""
    monkeypatch.setattr(supervised, "FIRST", 0.01)
    station, directive = job[0], job[0].state.directive
    assert directive is not None
    seal = station.save(Version(5, 1), 100_000)
    restore = Restore(seal.version, NO_SOURCES)
    history = directive.history.after(2, 5)
    wanted = replace(directive, attempt=2, phase=Phase.HOLD, history=history, restore=restore, revision="2")
    station.accept(wanted)
    station.state.threads.loop("restore", Restorer(station.state, station.vault, station.sidecar.reach).run)
    return station.state


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_restore_that_fails_unforeseen_is_tried_again(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(Vault, "fault", failing_first(failures, Vault.fault))
    state = restoring(stations(), monkeypatch)
    until(lambda: state.restore.state is RestoreState.READY, "restored")


def test_restore_that_always_fails_is_reported_instead_of_being_waited_for(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vault, "fault", fail)
    state = restoring(stations(), monkeypatch)
    until(lambda: state.restore.state is RestoreState.FAILED, "given up")
    (rank,) = state.restore.ranks
    assert rank.tier is None
    assert "3 times unexpectedly: ValueError in " in rank.failures[0]


def failing_first(times: int, real: Callable[..., str]) -> Callable[..., str]:
    left = iter(range(times))

    def sometimes(*given: object, **more: object) -> str:
        for _ in left:
            fail()
        return real(*given, **more)

    return sometimes


class Broken(ArtifactSource):
    """A remote tier whose every answer is unforeseen."""

    def list(self, rank: int, version: Version, call: object) -> dict[Artifact, int]:
        return {Artifact(rank, version): 100_000}

    def open(self, artifact: Artifact, call: object) -> None:
        fail()


def test_place_that_fails_unforeseen_is_gone_round(stations: MakeStations) -> None:
    job = stations(workers=3)
    _, artifact, _ = copied(job, 100_000)
    known = job[0].state.directive
    assert known is not None
    directive = replace(known, restore=Restore(artifact.version, NO_SOURCES))
    sources = [Source(Tier.REMOTE), Source(Tier.PEER, job.peer(1))]
    with ThreadPoolExecutor(1) as verifiers:
        found = RankRestorer(
            job[0].state,
            job[0].vault,
            job[0].reach(Broken()),
            verifiers,
            directive=directive,
            rank=0,
            sources=sources,
        ).run()
    assert (found.tier, found.worker) == (Tier.PEER, 1)
    assert found.failures[0].startswith("the remote tier: ValueError in ")
