"""Promise: no source holds up a restore for ever: the next one is used, that one named."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sidecar.exchange.test_exchange_fetch import MIB, copied
from tests.sidecar.nursery import HUNG
from tests.sidecar.restore.test_lending import directive as lending_directive
from tests.sidecar.restore.test_restore import REMOTE, restored, training
from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.world import MakeWorld, World, until
from tiercheck.protocol.directive import NO_SOURCES, Phase, Restore, Source, SourceTable, Tier
from tiercheck.protocol.report import RankRestore, RestoreProgress, RestoreState
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar import artifact_source
from tiercheck_sidecar.artifact_source import (
    ArtifactSink,
    ArtifactSource,
    BoundedCall,
    BoundedCalls,
    CallAbandoned,
    OpenArtifact,
    Stalled,
)
from tiercheck_sidecar.control.report import _essence
from tiercheck_sidecar.exchange import session
from tiercheck_sidecar.exchange.frames import PeerResponse, Wire, WireBroken
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.watches import ProgressMeter
from tiercheck_sidecar.restore.restore import RankRestorer, Restorer
from tiercheck_sidecar.restore.sources import SOURCE_STALLED, RestoreSources


class DeadMount(ArtifactSource):
    """A remote tier whose file server is gone, until the test brings it back."""

    def __init__(self, hangs_at: str) -> None:
        self.hangs_at, self.calls = hangs_at, list[str]()
        self.entered, self.back = threading.Event(), threading.Event()

    def _wait(self, what: str) -> None:
        self.calls.append(what)
        if what == self.hangs_at:
            self.entered.set()
            assert self.back.wait(60)

    def list(self, rank: int, version: Version, call: BoundedCall) -> dict[Artifact, int]:
        self._wait("list")
        return {Artifact(rank, version): 100_000}

    @contextlib.contextmanager
    def open(self, artifact: Artifact, call: BoundedCall) -> Iterator[OpenArtifact]:
        self._wait("open")
        call.arrived(1)
        yield OpenArtifact(self.seal, self._read)

    def _read(self, indices: Sequence[int], sink: ArtifactSink) -> None:
        raise AssertionError("what comes too late is nobody's any more")


@pytest.fixture
def dead_mount() -> Iterator[Callable[[str], DeadMount]]:
    made: list[DeadMount] = []

    def build(hangs_at: str) -> DeadMount:
        made.append(DeadMount(hangs_at))
        return made[-1]

    yield build
    for each in made:
        each.back.set()


def hours_pass(
    reach: RestoreSources,
    state: SidecarState,
    place: str,
    hangs: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While nothing but `place` is waited for, which hangs. For all others no time passes, however busy this
    machine is."""
    now = [0.0]

    def clock() -> float:
        if hangs.is_set() and state.meter.describe().sources == (place,):
            now[0] += 60.0
        return now[0]

    monkeypatch.setattr(artifact_source, "_LOOK_EVERY", 0.01)
    reach._calls._clock = clock


def bring_back(job: Stations, reach: RestoreSources, artifact: Artifact, *sources: Source) -> RankRestore:
    known = job[0].state.directive
    assert known is not None
    wanted = replace(known, restore=Restore(artifact.version, NO_SOURCES))
    with ThreadPoolExecutor(1) as verifiers:
        return RankRestorer(
            job[0].state,
            job[0].vault,
            reach,
            verifiers,
            directive=wanted,
            rank=artifact.rank,
            sources=sources,
        ).run()


@pytest.mark.parametrize("hangs_at", ["list", "open"])
def test_mount_that_hangs_is_gone_round_and_named_until_it_is_back(
    stations: MakeStations,
    dead_mount: Callable[[str], DeadMount],
    monkeypatch: pytest.MonkeyPatch,
    hangs_at: str,
) -> None:
    job, mount = stations(workers=3), dead_mount(hangs_at)
    seal, artifact, content = copied(job, 100_000)
    state, reach = job[0].state, job[0].reach(mount)
    hours_pass(reach, state, "the remote tier", mount.entered, monkeypatch)
    found = bring_back(job, reach, artifact, Source(Tier.REMOTE), Source(Tier.PEER, job.peer(1)))
    assert (found.tier, found.worker) == (Tier.PEER, 1)
    assert found.failures[0].startswith("the remote tier: nothing came from it for ")
    assert job[0].content(seal, Tier.LOCAL) == content
    assert state.meter.stalled == ("the remote tier",)
    (problem,) = state.problems
    assert problem.reason == SOURCE_STALLED
    assert problem.message.startswith("the remote tier hangs: ")
    # The next restore loses no time there.
    job[0].vault.evict(lambda each: True)
    before = list(mount.calls)
    again = bring_back(job, reach, artifact, Source(Tier.REMOTE), Source(Tier.PEER, job.peer(1)))
    assert (again.tier, mount.calls) == (Tier.PEER, before)
    assert "an earlier call to it has not come back" in again.failures[0]
    mount.back.set()
    until(lambda: not state.problems, "it is told that the mount is well again")


def test_slot_that_a_dead_mount_may_still_write_to_is_never_used_again(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = stations(workers=3)
    seal, artifact, content = copied(job, 100_000)
    vault, back, late = job[0].vault, threading.Event(), list[BaseException]()

    class Late(DeadMount):
        @contextlib.contextmanager
        def open(self, artifact: Artifact, call: BoundedCall) -> Iterator[OpenArtifact]:
            def read(indices: Sequence[int], sink: ArtifactSink) -> None:
                self.entered.set()
                try:
                    assert back.wait(60)
                    sink.view[:] = bytes(len(sink.view))
                    call.arrived(1)
                except BaseException as error:
                    late.append(error)
                    raise

            yield OpenArtifact(seal, read)

    mount = Late("")
    reach = job[0].reach(mount)
    hours_pass(reach, job[0].state, "the remote tier", mount.entered, monkeypatch)
    used = vault.used()
    found = bring_back(job, reach, artifact, Source(Tier.REMOTE), Source(Tier.PEER, job.peer(1)))
    assert found.tier is Tier.PEER
    assert vault.used() <= used + seal.digests.size + MIB, "one slot, not two"
    back.set()
    until(lambda: late, "the late bytes came")
    until(lambda: not job[0].state.problems, "it is over")
    assert job[0].content(seal, Tier.LOCAL) == content


def test_holder_that_says_nothing_more_is_cut_off_and_the_next_one_is_asked(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its connection would time out."""
    job, mute_now, asleep = stations(workers=4), threading.Event(), threading.Event()
    seal, artifact, content = copied(job, 100_000)
    real = session.open_plain

    def mute(slot: Path) -> int:
        """Worker 1 has said that it has the artifact, and sends no chunk of it."""
        if slot.is_relative_to(job[1].state.config.vault_dir):
            mute_now.set()
            assert asleep.wait(60)
        return real(slot)

    monkeypatch.setattr(session, "open_plain", mute)

    def one_by_one(sources: list[Source]) -> Iterator[list[Source]]:
        yield from ([source] for source in sources)

    monkeypatch.setattr("tiercheck_sidecar.restore.restore._at_once", one_by_one)
    places = [Source(Tier.PEER, job.peer(worker)) for worker in (1, 2)]
    reach = job[0].sidecar.reach
    hours_pass(reach, job[0].state, "worker 1", mute_now, monkeypatch)
    found = bring_back(job, reach, artifact, *places)
    asleep.set()
    assert (found.tier, found.worker) == (Tier.PEER, 2)
    assert found.failures[0].startswith("worker 1: nothing came from it for ")
    assert job[0].content(seal, Tier.LOCAL) == content
    until(lambda: not job[0].state.problems, "nothing of the call is left")


def test_other_ranks_slots_in_a_mount_that_hangs_fail_by_name(
    stations: MakeStations, dead_mount: Callable[[str], DeadMount]
) -> None:
    job, mount = stations(workers=4), dead_mount("open")
    station = job[3]
    wanted = replace(lending_directive(job), attempt=2, phase=Phase.HOLD, revision="2")
    wanted = replace(
        wanted, history=wanted.history.after(2, 5), policy=replace(wanted.policy, restore_stall=0.2)
    )
    table = SourceTable.of({3: (Source(Tier.REMOTE),)}, range(4))
    wanted = replace(wanted, restore=Restore(Version(5, 1), table, world_size=4))
    station.accept(wanted)
    Restorer(station.state, station.vault, station.reach(mount)).carry_out(wanted)
    report = station.state.restore
    assert (report.state, report.stalled) == (RestoreState.FAILED, ("the remote tier",))
    assert "the remote tier: nothing came from it for " in report.ranks[0].failures[0]


def hang_store(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whoever is started from now on waits for the bytes of artifacts as long as this file is there."""
    path = world.root / "hung"
    path.touch()
    monkeypatch.setenv(HUNG, str(path))
    return path


def test_worker_goes_on_to_its_peer_and_says_what_hangs(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = training(make_world(workers=2), remote=True)
    with world.ranks(100_000) as ranks:
        for rank in ranks:
            assert rank.save(1)
        world.reach("remote", Version(1, 1))
        world.reach("peer", Version(1, 1))
    path = hang_store(world, monkeypatch)
    world.renew(0)
    world.policy = replace(world.policy, restore_stall=4.0)
    world.new_attempt(Version(1, 1))
    world.direct(Phase.HOLD, {0: (REMOTE, world.from_peer(1))})
    until(lambda: world.report(0).restore.state is RestoreState.READY, "restored")
    back = restored(world)
    assert (back.tier, back.worker) == (Tier.PEER, 1)
    restore = world.report(0).restore
    assert (restore.stalled, restore.progress) == (("the remote tier",), None)
    assert [each.reason for each in world.report(0).problems] == [SOURCE_STALLED]
    path.unlink()
    until(lambda: not world.report(0).problems, "the mount is back")


def restore_from_hung_store(world: World, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only worker has nothing but an object that never comes. `seconds`: its bound."""
    with world.ranks(100_000) as (rank,):
        assert rank.save(1)
        world.reach("remote", Version(1, 1))
    hang_store(world, monkeypatch)
    world.renew(0)
    world.policy = replace(world.policy, restore_stall=seconds)
    world.new_attempt(Version(1, 1))
    world.direct(Phase.HOLD, {0: (REMOTE,)})


def test_worker_without_another_source_says_so_and_which_one_hangs(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = training(make_world(), remote=True)
    restore_from_hung_store(world, 0.3, monkeypatch)
    until(lambda: world.report(0).restore.state is RestoreState.FAILED, "it is reported")
    restore = world.report(0).restore
    assert restore.stalled == ("the remote tier",)
    assert "the remote tier: nothing came from it for " in restore.ranks[0].failures[0]


def test_worker_says_what_it_waits_for_and_how_long_and_wakes_nobody_by_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report's serial grows with what the controller may act on, and it looks at the progress every few
    seconds anyway."""
    world = training(make_world(), remote=True)
    restore_from_hung_store(world, 60.0, monkeypatch)

    def progress() -> RestoreProgress:
        found = world.report(0).restore.progress
        assert found is not None
        return found

    until(
        lambda: progress().sources == ("the remote tier",) and progress().wanted > 100_000,
        "it waits for the bytes",
    )
    before = world.report(0)
    idle = progress().idle_seconds
    until(lambda: progress().idle_seconds > idle, "time passes")
    later = replace(before, restore=world.report(0).restore)
    assert later != before
    assert _essence(later) == _essence(before)
    assert world.report(0).problems == (), "it is too early to complain"


PLACE = "the remote tier"


class Hanging:
    """A place from which nothing comes until the test lets it."""

    def __init__(self) -> None:
        self.server_is_back = threading.Event()
        self.told: list[type[BaseException] | None] = []

    def __call__(self, call: BoundedCall) -> str:
        assert self.server_is_back.wait(40)
        try:
            call.arrived(1)
        except BaseException as error:
            self.told.append(type(error))
            raise
        self.told.append(None)
        return "late"


def test_call_returns_what_comes_and_raises_what_goes_wrong() -> None:
    calls, heard = BoundedCalls(), list[int]()

    def bring(call: BoundedCall) -> str:
        call.arrived(7)
        return "it"

    assert calls.make(PLACE, bring, heard.append) == "it"
    assert heard == [7]
    with pytest.raises(TimeoutError, match="of its own"):
        calls.make(PLACE, lambda call: (_ for _ in ()).throw(TimeoutError("of its own")))


def test_call_that_brings_nothing_is_left_behind_and_told_so_when_something_comes() -> None:
    told = list[Mapping[str, int]]()
    patience, place, heard = [0.1], Hanging(), list[int]()
    calls = BoundedCalls(lambda: patience[0], told.append)
    with pytest.raises(Stalled, match="nothing came from it for "):
        calls.make(PLACE, place, heard.append)
    patience[0] = 40.0  # what answers is never too slow
    assert told == [{PLACE: 1}]
    with pytest.raises(Stalled, match="an earlier call to it has not come back"):
        calls.make(PLACE, lambda call: "not even tried")
    assert calls.make("worker 1", lambda call: "another place") == "another place"
    place.server_is_back.set()
    until(lambda: told == [{PLACE: 1}, {}], "it has come back")
    assert place.told == [CallAbandoned]
    assert heard == [], "nobody counts what comes too late"
    assert calls.make(PLACE, lambda call: "well again") == "well again"


def test_place_where_a_call_hangs_is_tried_again_ever_more_seldom() -> None:
    """One file of many may hang, as one on a bad disk of the server does."""
    now, patience, hanging = [0.0], [0.1], Hanging()
    calls = BoundedCalls(lambda: patience[0], clock=lambda: now[0])

    def hang() -> None:
        with pytest.raises(Stalled, match="nothing came"):
            calls.make(PLACE, hanging)

    def passing_clock() -> float:
        now[0] += 0.05
        return now[0]

    calls._clock = passing_clock
    hang()
    for waited in (300, 600):
        with pytest.raises(Stalled, match="has not come back"):
            calls.make(PLACE, lambda call: "too soon")
        now[0] += waited
        hang()
    now[0] += 900
    patience[0] = 40.0
    assert calls.make(PLACE, lambda call: "a good file") == "a good file"
    hanging.server_is_back.set()


def test_as_long_as_bytes_come_it_may_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes four seconds, and ten without a byte are too many; a byte comes between any two."""
    monkeypatch.setattr(artifact_source, "_LOOK_EVERY", 0.001)
    looked, brought, now = threading.Semaphore(0), threading.Semaphore(0), [0.0]

    def clock() -> float:
        now[0] += 2.0
        looked.release()
        assert brought.acquire(timeout=40)
        return now[0]

    def trickle(call: BoundedCall) -> str:
        for _ in range(100):
            assert looked.acquire(timeout=40)
            call.arrived(1)
            brought.release()
        brought.release(1000)
        return "all"

    assert BoundedCalls(lambda: 10.0, clock=clock).make(PLACE, trickle) == "all"
    assert now[0] >= 200


def test_time_in_which_we_were_stopped_is_not_held_against_the_place() -> None:
    place, looks = Hanging(), list[float]()

    def clock() -> float:
        """After the first look an hour has passed."""
        looks.append(0.0 if not looks else 3600.0)
        if len(looks) == 2:
            place.server_is_back.set()
        return looks[-1]

    assert BoundedCalls(lambda: 60.0, clock=clock).make(PLACE, place) == "late"


def test_connection_of_a_call_that_is_left_behind_is_cut() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        wire, ended = Wire(connection), threading.Event()

        def listen(call: BoundedCall) -> None:
            try:
                call.own(wire)
                wire.receive(PeerResponse)
            except (WireBroken, CallAbandoned):  # which one: whether it was left behind before it began
                ended.set()

        with pytest.raises(Stalled):
            BoundedCalls(lambda: 0.1).make("worker 1", listen)
        assert ended.wait(40), "it would have waited for its own timeout"
        wire.close()


def test_connection_that_is_made_too_late_is_closed() -> None:
    call = BoundedCall(lambda count: None)
    call.leave()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = Wire(socket.create_connection(listener.getsockname()))
        with pytest.raises(CallAbandoned):
            call.own(wire)
        with pytest.raises(WireBroken):
            _ = wire.far_end


def test_meter_tells_how_far_and_since_when_nothing_came() -> None:
    now = [100.0]
    meter = ProgressMeter(lambda: now[0])
    meter.plan(0, wanted=1000, done=200)
    meter.plan(1, wanted=500, done=0)
    now[0] += 30
    with meter.waiting("worker 3"), meter.waiting("worker 3"), meter.waiting("the remote tier"):
        told = meter.describe()
    assert (told.bytes, told.wanted, told.idle_seconds) == (200, 1500, 30.0)
    assert told.sources == ("the remote tier", "worker 3")
    meter.arrived(1, 400)
    now[0] += 5
    meter.arrived(1, 400)
    assert (meter.describe().bytes, meter.describe().idle_seconds) == (700, 0.0), "never more than is wanted"
    assert meter.describe().sources == ()
    now[0] += 50
    meter.given_up("worker 3")
    assert (meter.describe().idle_seconds, meter.stalled) == (0.0, ("worker 3",)), (
        "to go on to the next one is progress"
    )
    meter.begin()
    assert (meter.describe().wanted, meter.stalled) == (0, ())
