"""A copy uses as many streams as bring something, whatever the network and the machine can carry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck_sidecar.exchange import streams
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.streams import FEW, GAIN, REST, Breadth, Deal, Line, StreamCrew, Take

MOST = 8
BEGINNING = Breadth()
ONE = 100e6
"""Bytes per second that one stream carries where nothing else is the limit."""


def after(
    throughput: Callable[[int], float], measurements: int, breadth: Breadth = BEGINNING
) -> Iterator[Breadth]:
    for _ in range(measurements):
        breadth = breadth.measured(throughput(breadth.count), MOST)
        yield breadth


def settled(throughput: Callable[[int], float], breadth: Breadth = BEGINNING) -> int:
    """The number that it comes back to, once it has tried both ways often enough."""
    *_, last = after(throughput, 4 * MOST * (REST + 2), breadth)
    return next(each.count for each in after(throughput, REST + 4, last) if each.rest)


def limited(most: float) -> Callable[[int], float]:
    return lambda count: min(count * ONE, most)


@given(st.lists(st.floats(0, 1e12), max_size=200), st.integers(1, 8))
def test_there_is_always_one_stream_and_never_more_than_the_most(rates: list[float], most: int) -> None:
    breadth = Breadth(min(FEW, most))
    for rate in rates:
        before, breadth = breadth.count, breadth.measured(rate, most)
        assert 1 <= breadth.count <= most
        assert abs(breadth.count - before) <= 1


@given(st.floats(0.5, 10), st.floats(0.5, 10))
def test_each_stream_that_stays_brings_a_tenth_and_the_next_one_would_not(first: float, then: float) -> None:
    """Of a network that carries so many streams' worth, and then becomes another."""
    breadth = Breadth()
    for worth in (first, then):
        throughput = limited(worth * ONE)
        count = settled(throughput, breadth)
        assert count == 1 or throughput(count) * (1 + 1e-9) >= throughput(count - 1) * GAIN
        assert count == MOST or throughput(count + 1) < throughput(count) * GAIN
        *_, breadth = after(throughput, 4 * MOST * (REST + 2), breadth)


def test_it_widens_at_every_measurement_as_long_as_that_helps() -> None:
    assert [each.count for each in after(limited(5 * ONE), 4)] == [3, 4, 5, 6]
    assert [each.count for each in after(limited(5 * ONE), 6)][-1] == 5, "the sixth brought nothing"


def test_a_copy_that_something_else_limits_goes_on_with_one_stream() -> None:
    assert settled(lambda _: ONE) == 1


@given(st.floats(1.0, MOST))
def test_trials_are_rare(worth: float) -> None:
    throughput = limited(worth * ONE)
    count = settled(throughput)
    *_, breadth = after(throughput, 4 * MOST * (REST + 2))
    others = sum(each.count != count for each in after(throughput, 10 * REST, breadth))
    assert others <= 10


class FakeLine:
    """Carries chunks at `rate` bytes per second of its own clock for so many streams."""

    def __init__(self, rate: Callable[[int], float], most: int = MOST) -> None:
        self.gauge = streams.Gauge()
        self.sent, self.now, self.active = 0, 1.0, 0
        self.widest = 0
        self._rate, self._most = rate, most
        self._changed = threading.Condition()

    def wires(self, count: int) -> list[Wire]:
        return cast(list[Wire], list(range(count)))

    def carry(self, deal: Deal) -> None:
        StreamCrew(cast(Line, self), deal, self._most, self.body(deal), lambda: self.now).run()

    def body(self, deal: Deal) -> Callable[[Wire, Take], None]:
        """Nobody runs ahead before all have begun that should."""

        def all_are_here() -> bool:
            return self.active >= min(self.gauge.breadth.count, self._most, len(deal))

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
        deal = Deal(300)
        line.carry(deal)
        assert not deal
        assert line.active == 0
    assert line.sent == 30 * 300 * (4 << 20), "every chunk once"
    assert abs(line.gauge.breadth.count - worth) <= 1
    assert line.widest <= min(MOST, max(FEW, worth) + 1)


def test_small_copies_have_as_many_streams_as_there_is_work_for_and_are_measured_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "STREAMS", MOST)
    line = FakeLine(limited(3 * ONE), most=2)
    before = line.gauge.breadth
    for _ in range(40):
        line.carry(Deal(4))
    assert line.widest <= 2
    assert line.gauge.breadth != before, "none of them took long enough alone"


def test_error_of_a_stream_is_raised_once_all_have_ended() -> None:
    line, deal = FakeLine(limited(ONE)), Deal(50)
    send = line.body(deal)

    def body(wire: Any, take: Take) -> None:
        send(wire, take)
        if wire == 1:
            raise OSError("the cable was pulled")

    with pytest.raises(OSError, match="cable"):
        StreamCrew(cast(Line, line), deal, MOST, body, lambda: line.now).run()
    assert line.active == 0
