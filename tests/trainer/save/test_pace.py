"""Promise: deltas that take longer than steps end by themselves, and come back with time.

The owner is told.
"""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.deltas.replaying import Script, loop, mean_square, started, train
from tiercheck.protocol.version import Kind
from tiercheck.trainer.save.delta import DeltaBudget, DeltaChain, there_is_time

seconds = st.floats(1e-6, 1e4)


@given(st.booleans(), seconds, seconds, seconds)
def test_modules_that_take_a_good_part_of_a_step_to_tell_what_they_keep_end_deltas(
    taken: bool, delta: float, step: float, asked: float
) -> None:
    if asked > step / 10:
        assert not there_is_time(taken, delta, step, asked)
    now = there_is_time(taken, delta, step, asked)
    assert there_is_time(now, delta, step, asked) is now


@given(st.booleans(), seconds, seconds)
def test_delta_that_takes_as_long_as_its_step_is_never_taken(taken: bool, delta: float, step: float) -> None:
    if delta >= step:
        assert not there_is_time(taken, delta, step)


@given(seconds, seconds)
def test_answer_stands_as_long_as_nothing_changes(delta: float, step: float) -> None:
    """Whatever was before: else deltas would come and go, and each time a snapshot would have to begin a new
    chain."""
    for taken in (False, True):
        now = there_is_time(taken, delta, step)
        assert there_is_time(now, delta, step) is now


@given(st.booleans(), seconds, seconds, seconds)
def test_more_time_never_takes_deltas_away(taken: bool, delta: float, step: float, more: float) -> None:
    if there_is_time(taken, delta, step):
        assert there_is_time(taken, delta, step + more)
        assert there_is_time(True, delta, step)


@given(st.floats(0.01, 10), st.lists(st.floats(1, 1.9), max_size=8))
def test_noise_makes_one_change_at_most(least: float, noise: list[float]) -> None:
    """A machine whose steps and deltas vary by less than the bounds lie apart settles on one answer."""
    taken, changes = True, 0
    for factor in noise:
        now = there_is_time(taken, least * factor, 1.0)
        taken, changes = now, changes + (now is not taken)
    assert changes <= 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    measured: DeltaBudget,
    clock: Clock,
    steps: int,
    *,
    step: float,
    delta: float | None,
    taken: bool,
    waited: float = 0,
) -> bool:
    for _ in range(steps):
        clock.now += step + waited
        measured.note_wait(waited)
        if delta is not None:
            measured.note_work(delta)
        taken = measured.ends_step(taken)
    return taken


def test_waiting_for_copies_is_no_part_of_a_step() -> None:
    clock = Clock()
    assert not run(DeltaBudget(clock), clock, 100, step=1, delta=1, taken=True, waited=9)


def test_extra_state_that_is_slow_to_tell_ends_deltas_for_good() -> None:
    clock = Clock()
    measured = DeltaBudget(clock)
    taken = True
    for step in range(200):
        clock.now += 1
        if taken:
            measured.note_work(0.01)
            measured.note_extra_state(0.2)
        taken = measured.ends_step(taken)
        assert taken or step >= 8
    assert not taken


def test_nothing_is_decided_by_a_few_slow_ones() -> None:
    clock = Clock()
    measured = DeltaBudget(clock)
    assert run(measured, clock, 7, step=100, delta=1000, taken=True), "too few of them"
    assert not run(measured, clock, 1, step=100, delta=1000, taken=True)
    measured = DeltaBudget(clock)
    assert run(measured, clock, 20, step=1, delta=1000, taken=True), "a minute is not over"
    assert run(measured, clock, 70, step=1, delta=0.1, taken=True), "the first were slow, most are not"


def test_without_deltas_steps_alone_bring_them_back() -> None:
    clock = Clock()
    measured = DeltaBudget(clock)
    taken = run(measured, clock, 100, step=1, delta=2, taken=True)
    assert not taken
    taken = run(measured, clock, 100, step=4, delta=None, taken=taken)
    assert not taken, "they would take half of it"
    assert run(measured, clock, 100, step=6, delta=None, taken=taken)


def script() -> Script:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return loop(model, optimizer, loss_of=mean_square(2, 4))


def test_slow_deltas_end_are_told_and_come_back(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step takes a second of this clock, and each delta what it says."""
    caplog.set_level(logging.INFO)
    running, checkpointer = started(script, every=4)
    clock, delta = Clock(), 0.5
    checkpointer._saver.delta_budget = measured = DeltaBudget(clock)
    took = measured.note_work
    monkeypatch.setattr(measured, "note_work", lambda _: took(delta))
    monkeypatch.setattr(measured, "note_wait", lambda _: None)
    checkpointer.restore()

    def steps(count: int, step: float = 1.0) -> set[int]:
        before = set(delta_sidecar.completed(Kind.DELTA))
        for _ in range(count):
            clock.now += step
            train(running, checkpointer, 1, wait=True)
        return set(delta_sidecar.completed(Kind.DELTA)) - before

    assert steps(60) == {*range(5, 61)}
    delta = 1.5
    assert max(steps(80)) == 119, "the second minute tells"
    (said,) = delta_sidecar.asked("no-deltas")
    assert "a delta takes 1.5 s, a step 1 s" in said.message
    assert said.step == 0, "those that there are are as good as any"
    assert said.message in caplog.text
    assert steps(60, step=2.0) == set(), "not much better"
    assert steps(60, step=5.0), "there is time again"
    assert [each.message for each in delta_sidecar.asked("no-deltas")] == [said.message, ""]
    assert "deltas are taken again" in caplog.text
    newest = max(delta_sidecar.completed(Kind.DELTA))
    assert newest == checkpointer.step_number
    delta_sidecar.offer(newest - newest % 4 - 4, newest)
    tensors = running.tensors()
    checkpointer.close()
    again, checkpointer = started(script, seed=7)
    assert checkpointer.restore() == newest
    assert {key: value.tolist() for key, value in again.tensors().items()} == {
        key: value.tolist() for key, value in tensors.items()
    }
    checkpointer.close()


def test_before_the_first_snapshot_there_is_no_chain() -> None:
    chain = DeltaChain()
    assert not chain.reaches(1)
    chain.snapshot(4)
    assert not chain.reaches(4)
    assert chain.reaches(5)


def test_restored_version_is_a_beginning() -> None:
    chain = DeltaChain()
    chain.restored(11)
    assert chain.reaches(12)


def test_gap_ends_it_until_the_next_snapshot() -> None:
    chain = DeltaChain()
    chain.snapshot(4)
    chain.delta_missing(6)
    assert not chain.reaches(7)
    chain.snapshot(8)
    assert chain.reaches(9)
    chain.snapshot_failed(8)
    assert not chain.reaches(9)


def test_snapshot_that_fails_does_no_harm_to_an_older_chain() -> None:
    chain = DeltaChain()
    chain.snapshot(4)
    chain.snapshot(8)
    chain.snapshot_failed(8)
    assert chain.reaches(9)


@given(st.lists(st.sampled_from(["snapshot", "failed", "both", "delta", "nothing"]), max_size=30))
def test_what_is_reached_is_always_rebuildable(events: list[str]) -> None:
    chain = DeltaChain()
    snapshots: set[int] = set()
    deltas: set[int] = set()
    for step, event in enumerate(events, start=1):
        if event in ("delta", "both") and chain.reaches(step):
            deltas.add(step)
            base = max(base for base in snapshots if base < step and set(range(base + 1, step)) <= deltas)
            assert base
        else:
            chain.delta_missing(step)
        if event in ("snapshot", "both", "failed"):
            chain.snapshot(step)
            if event == "failed":
                chain.snapshot_failed(step)
            else:
                snapshots.add(step)
