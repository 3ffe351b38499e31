"""A call that brings nothing is left behind, and one that brings something is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

import pytest

from tests.sidecar.world import until
from tiercheck_sidecar import artifact_source
from tiercheck_sidecar.artifact_source import BoundedCall, BoundedCalls, LeftBehind, Stalled
from tiercheck_sidecar.exchange.frames import Say, Wire, WireBroken
from tiercheck_sidecar.model.watches import ProgressMeter

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
    assert place.told == [LeftBehind]
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
                wire.receive(Say)
            except (WireBroken, LeftBehind):  # which one: whether it was left behind before it began
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
        with pytest.raises(LeftBehind):
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
