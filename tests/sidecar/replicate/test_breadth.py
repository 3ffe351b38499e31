"""A copy uses as many streams as bring something, whatever the network and the machine can carry.

What is protected stays so while holders change and while an evicted pod ends.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sidecar.world import MakeWorld, World, until
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.version import Kind, Version
from tiercheck_sidecar.exchange import streams
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.streams import (
    FEW,
    GAIN,
    REST,
    ChunkQueue,
    ConnectionPool,
    StreamCountTuner,
    StreamPool,
    Take,
)

MOST = 8
BEGINNING = StreamCountTuner()
ONE = 100e6
"""Bytes per second that one stream carries where nothing else is the limit."""


def after(
    throughput: Callable[[int], float], measurements: int, tuner: StreamCountTuner = BEGINNING
) -> Iterator[StreamCountTuner]:
    for _ in range(measurements):
        tuner = tuner.measured(throughput(tuner.count), MOST)
        yield tuner


def settled(throughput: Callable[[int], float], tuner: StreamCountTuner = BEGINNING) -> int:
    """The number that it comes back to, once it has tried both ways often enough."""
    *_, last = after(throughput, 4 * MOST * (REST + 2), tuner)
    return next(each.count for each in after(throughput, REST + 4, last) if each.rest)


def limited(most: float) -> Callable[[int], float]:
    return lambda count: min(count * ONE, most)


@given(st.lists(st.floats(0, 1e12), max_size=200), st.integers(1, 8))
def test_there_is_always_one_stream_and_never_more_than_the_most(rates: list[float], most: int) -> None:
    tuner = StreamCountTuner(min(FEW, most))
    for rate in rates:
        before, tuner = tuner.count, tuner.measured(rate, most)
        assert 1 <= tuner.count <= most
        assert abs(tuner.count - before) <= 1


@given(st.floats(0.5, 10), st.floats(0.5, 10))
def test_each_stream_that_stays_brings_a_tenth_and_the_next_one_would_not(first: float, then: float) -> None:
    """Of a network that carries so many streams' worth, and then becomes another."""
    tuner = StreamCountTuner()
    for worth in (first, then):
        throughput = limited(worth * ONE)
        count = settled(throughput, tuner)
        assert count == 1 or throughput(count) * (1 + 1e-9) >= throughput(count - 1) * GAIN
        assert count == MOST or throughput(count + 1) < throughput(count) * GAIN
        *_, tuner = after(throughput, 4 * MOST * (REST + 2), tuner)


def test_it_widens_at_every_measurement_as_long_as_that_helps() -> None:
    assert [each.count for each in after(limited(5 * ONE), 4)] == [3, 4, 5, 6]
    assert [each.count for each in after(limited(5 * ONE), 6)][-1] == 5, "the sixth brought nothing"


def test_a_copy_that_something_else_limits_goes_on_with_one_stream() -> None:
    assert settled(lambda _: ONE) == 1


@given(st.floats(1.0, MOST))
def test_trials_are_rare(worth: float) -> None:
    throughput = limited(worth * ONE)
    count = settled(throughput)
    *_, tuner = after(throughput, 4 * MOST * (REST + 2))
    others = sum(each.count != count for each in after(throughput, 10 * REST, tuner))
    assert others <= 10


class FakeLine:
    """Carries chunks at `rate` bytes per second of its own clock for so many streams."""

    def __init__(self, rate: Callable[[int], float], most: int = MOST) -> None:
        self.meter = streams.ThroughputMeter()
        self.sent, self.now, self.active = 0, 1.0, 0
        self.widest = 0
        self._rate, self._most = rate, most
        self._changed = threading.Condition()

    def wires(self, count: int) -> list[Wire]:
        return cast(list[Wire], list(range(count)))

    def carry(self, deal: ChunkQueue) -> None:
        StreamPool(cast(ConnectionPool, self), deal, self._most, self.body(deal), lambda: self.now).run()

    def body(self, deal: ChunkQueue) -> Callable[[Wire, Take], None]:
        """Nobody runs ahead before all have begun that should."""

        def all_are_here() -> bool:
            return self.active >= min(self.meter.tuner.count, self._most, len(deal))

        def send(_: Wire, take: Take) -> None:
            if take() is None:
                return
            with self._changed:
                self.active += 1
                self.widest = max(self.widest, self.active)
            more: int | None = 0
            while more is not None:
                with self._changed:
                    self._changed.notify_all()
                    assert self._changed.wait_for(all_are_here, 30)
                    self.sent += 4 << 20
                    self.now += (4 << 20) / self._rate(self.active)
                more = take()
            with self._changed:
                self.active -= 1
                self._changed.notify_all()

        return send


@pytest.mark.parametrize("worth", [1, 3, 6])
def test_copies_on_one_line_find_out_how_many_streams_it_takes(
    monkeypatch: pytest.MonkeyPatch, worth: int
) -> None:
    monkeypatch.setattr(streams, "STREAMS", MOST)
    line = FakeLine(limited(worth * ONE))
    for _ in range(30):
        deal = ChunkQueue(300)
        line.carry(deal)
        assert not deal
        assert line.active == 0
    assert line.sent == 30 * 300 * (4 << 20), "every chunk once"
    assert abs(line.meter.tuner.count - worth) <= 1
    assert line.widest <= min(MOST, max(FEW, worth) + 1)


def test_small_copies_have_as_many_streams_as_there_is_work_for_and_are_measured_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "STREAMS", MOST)
    line = FakeLine(limited(3 * ONE), most=2)
    before = line.meter.tuner
    for _ in range(40):
        line.carry(ChunkQueue(4))
    assert line.widest <= 2
    assert line.meter.tuner != before, "none of them took long enough alone"


def test_error_of_a_stream_is_raised_once_all_have_ended() -> None:
    line, deal = FakeLine(limited(ONE)), ChunkQueue(50)
    send = line.body(deal)

    def body(wire: Any, take: Take) -> None:
        send(wire, take)
        if wire == 1:
            raise OSError("the cable was pulled")

    with pytest.raises(OSError, match="cable"):
        StreamPool(cast(ConnectionPool, line), deal, MOST, body, lambda: line.now).run()
    assert line.active == 0


def protected(world: World, version: Version) -> bool:
    mark = world.report(0).watermarks.peer
    return mark is not None and mark >= version


def test_copies_move_to_another_holder_without_a_moment_with_fewer(make_world: MakeWorld) -> None:
    world = make_world(workers=3)
    world.start(0, 1, 2)
    world.begin()
    version = Version(4, 1)
    with world.ranks(delta=20_480) as ranks:
        for rank in ranks:
            until(lambda rank=rank: rank.save(4), "a free slot")  # type: ignore[misc]
        until(lambda: protected(world, version), "the first copies")
        world.direct(Phase.RELEASE, holders=(1, 2))
        for worker in range(3):
            until(
                lambda worker=worker: world.holds((worker + 2) % 3, worker, version, Tier.PEER),  # type: ignore[misc]
                "the new copies",
            )
            assert world.holds((worker + 1) % 3, worker, version, Tier.PEER), "the old ones are still there"
        world.direct(Phase.RELEASE, holders=(2,))
        for rank in ranks:
            until(lambda rank=rank: rank.save(8), "a free slot")  # type: ignore[misc]
        until(lambda: protected(world, Version(8, 1)), "the next version at the new holders")
        for worker in range(3):
            assert world.holds((worker + 2) % 3, worker, Version(8, 1), Tier.PEER)
            until(
                lambda worker=worker: (
                    not any(  # type: ignore[misc]
                        world.holds((worker + 1) % 3, worker, each, Tier.PEER)
                        for each in (version, Version(8, 1))
                    )
                ),
                "the old holders to free what nobody needs there",
            )
    assert world.report(0).attempt == 1


def test_a_holder_that_is_exchanged_at_once_keeps_what_it_has_until_its_successor_has_it(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=3)
    world.start(0, 1, 2)
    world.begin()
    version = Version(4, 1)
    with world.ranks() as ranks:
        for rank in ranks:
            until(lambda rank=rank: rank.save(4), "a free slot")  # type: ignore[misc]
        until(lambda: protected(world, version), "the first copies")
        world.direct(Phase.RELEASE, holders=(2,))

        def moved() -> bool:
            new = [
                world.holds((worker + 2) % 3, worker, version, Tier.PEER, Kind.SNAPSHOT)
                for worker in range(3)
            ]
            # Asked after the new ones: what is not there by now has been freed because all new ones were
            # complete.
            old = [
                world.holds((worker + 1) % 3, worker, version, Tier.PEER, Kind.SNAPSHOT)
                for worker in range(3)
            ]
            assert all(old) or all(
                world.holds((worker + 2) % 3, worker, version, Tier.PEER, Kind.SNAPSHOT)
                for worker in range(3)
            )
            return all(new)

        until(moved, "the copies at the new holders")
        until(lambda: protected(world, version), "the same version to be complete again")


# Eviction


def save_slowly(world: World) -> None:
    """One snapshot, sealed by every rank; its copies take their time."""
    with world.ranks() as ranks:
        for rank in ranks:
            assert rank.save(1)
        world.reach("local", Version(1, 1), 1)


def test_evicted_sidecar_brings_its_holder_the_last_version_before_it_ends(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.policy = dataclasses.replace(world.policy, peer_bandwidth=100_000)  # three seconds for a snapshot
    world.launch()
    save_slowly(world)
    assert not world.holds(0, 1, Version(1, 1)), "its copy is still under way"
    assert world.report(1).holders_lack, "and the controller waits for it"
    assert world.terminate(1) == 0
    assert world.holds(0, 1, Version(1, 1))


def test_sidecar_of_an_attempt_that_is_over_owes_nobody_anything(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.policy = dataclasses.replace(world.policy, peer_bandwidth=1_000)  # minutes
    world.launch()
    save_slowly(world)
    world.kill(0)
    world.start(0)
    world.new_attempt()

    assert world.send(0, world.directive(0, Phase.HOLD))[0] == 200
    assert world.terminate(1) == 0, "it learns of attempt 2, and goes"
