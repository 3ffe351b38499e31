"""Sidecars end in any order, keep the last version if it can be kept, and do not stay."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sidecar.versions.ending_model import Model, Plan
from tiercheck.protocol.version import Version
from tiercheck_sidecar.versions.ending import GONE, WorkerEnd, may_go, owes_nothing

MOMENT = 3.0
"""Seconds: a word to the coordinator, one back."""
HORIZON = 600.0


@st.composite
def plans(draw: st.DrawFn, most: int = 5, kills: bool = False) -> list[Plan]:
    """Trainers end after they were told to; each had its snapshots, or skipped them."""
    seconds = st.integers(0, 40).map(lambda half: half / 2)
    found = []
    for _ in range(draw(st.integers(1, most))):
        finish = draw(seconds)
        trainer_ends = finish + draw(seconds)
        saves = {
            draw(seconds) % (trainer_ends + 0.5): step for step in (10, 20, 30) if draw(st.integers(0, 5))
        }
        killed = draw(st.none() | seconds.map(lambda later: later * 2)) if kills else None
        found.append(
            Plan(
                finish=finish,
                trainer_ends=trainer_ends,
                asked=trainer_ends + draw(seconds),
                saves=saves,
                upload=draw(seconds),
                killed=float("inf") if killed is None else killed,
            )
        )
    return found


@given(plans(), st.integers(0, 2**32))
@settings(max_examples=examples(300), deadline=None)
def test_last_version_is_in_the_remote_tier_and_all_are_gone_a_moment_later(
    those: list[Plan], seed: int
) -> None:
    model = Model(those, random.Random(seed))
    model.run(HORIZON)
    newest = model.newest_common()
    assert newest is None or model.remote[-1] == newest
    last = max(model.last_change, *(max(plan.asked, plan.finish) for plan in those))
    for worker in model.workers:
        assert worker.gone_at is not None
        assert worker.gone_at <= last + MOMENT


@given(plans(), st.integers(0, 2**32), st.floats(0.05, 0.4))
@settings(max_examples=examples(150), deadline=None)
def test_calls_that_get_no_answer_cost_no_version_and_little_time(
    those: list[Plan], seed: int, losses: float
) -> None:
    model = Model(those, random.Random(seed), losses)
    model.run(HORIZON)
    newest = model.newest_common()
    assert newest is None or model.remote[-1] == newest
    last = max(model.last_change, *(max(plan.asked, plan.finish) for plan in those))
    assert all(
        worker.gone_at is not None and worker.gone_at <= last + 2 * GONE + MOMENT for worker in model.workers
    )


@given(plans(kills=True), st.integers(0, 2**32))
@settings(max_examples=examples(300), deadline=None)
def test_who_is_killed_at_the_end_keeps_nobody_for_long(those: list[Plan], seed: int) -> None:
    model = Model(those, random.Random(seed))
    model.run(HORIZON)
    last = max(model.last_change, *(max(plan.asked, plan.finish) for plan in those))
    kills = [plan.killed for plan in those if plan.killed < HORIZON]
    uploads = sum(plan.upload for plan in those)
    for worker in model.workers:
        assert worker.gone_at is not None
        assert worker.gone_at <= max(last, *kills, 0.0) + uploads + 2 * GONE + MOMENT


def test_worker_whose_version_is_stored_does_not_wait_for_one_that_still_trains() -> None:
    quick = Plan(finish=0, trainer_ends=2, asked=2, saves={0.0: 10}, upload=1)
    slow = Plan(finish=0, trainer_ends=100, asked=100, saves={0.0: 10}, upload=1)
    model = Model([quick, quick, slow], random.Random(1))
    model.run(HORIZON)
    assert model.remote == [Version(10, 1)]
    coordinator, done, _ = (worker.gone_at or 0.0 for worker in model.workers)
    assert 2 <= done < 10
    assert coordinator >= 100, "who writes the manifest stays"


def end(**more: object) -> WorkerEnd:
    plain = {"final": True, "done": False, "told": False, "over": False, "unanswered": None}
    return WorkerEnd(**{**plain, **more})  # type: ignore[arg-type]


def test_nobody_goes_whose_trainer_may_still_add_something() -> None:
    assert not may_go(end(final=False, done=True, told=True, over=True, unanswered=1000.0))


def test_what_only_the_coordinator_knows_is_waited_for_until_the_coordinator_is_gone() -> None:
    assert not may_go(end())
    assert not may_go(end(unanswered=GONE - 1))
    assert may_go(end(unanswered=GONE))
    assert may_go(end(over=True))


def test_who_owes_nothing_tells_the_coordinator_or_finds_it_gone() -> None:
    assert not may_go(end(done=True))
    assert may_go(end(done=True, told=True))
    assert may_go(end(done=True, unanswered=0.0))


def test_worker_owes_nothing_if_one_of_its_ranks_has_nothing_newer_than_what_is_stored() -> None:
    assert owes_nothing([Version(7, 1), Version(8, 1)], Version(7, 1)), "8 can never be complete"
    assert owes_nothing([None, Version(8, 1)], None), "nor can it here"
    assert not owes_nothing([Version(8, 1)], Version(7, 1))
    assert not owes_nothing([Version(8, 1)], None)
