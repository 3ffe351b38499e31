"""Whatever the schedule and the accidents, what is committed is kept, and newer completes."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sidecar.versions.memory_model import Model
from tiercheck.protocol.version import Version

seeds = st.integers(0, 2**32)
worlds = st.integers(1, 5)
ACTIONS = 500
"""Per worker: about twenty steps."""


def play(model: Model, actions: int = ACTIONS) -> None:
    for _ in range(actions * model.world):
        model.act()
    model.check()


def announced(model: Model) -> Version:
    mark = model.standing.peer if model.parity or model.world > 1 else model.standing.local
    return mark or Version(0, 0)


def advances(model: Model) -> None:
    before = announced(model)
    play(model, 2 * ACTIONS)
    assert announced(model) > before, "versions stopped becoming complete"


@settings(max_examples=examples(20), deadline=None)
@given(seed=seeds, world=worlds, copies=st.integers(1, 2), skips=st.sampled_from([0.02, 0.3]))
def test_committed_is_kept_and_versions_complete_whatever_is_skipped(
    seed: int, world: int, copies: int, skips: float
) -> None:
    model = Model(world, random.Random(seed), copies=copies, skips=skips)
    play(model)
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 5), copies=st.integers(1, 2), skips=st.sampled_from([0.0, 0.05, 0.3]))
def test_newest_snapshot_that_all_holders_have_can_be_had_of_every_rank_when_a_worker_is_lost(
    seed: int, world: int, copies: int, skips: float
) -> None:
    """That is what fewer ranks can go on from. Where there is room: before a rank lets a gap be among its
    deltas, it gives up the snapshot."""
    play(Model(world, random.Random(seed), copies=copies, skips=skips, chains=9))


@settings(max_examples=examples(10), deadline=None)
@given(seed=seeds, world=worlds)
def test_committed_is_kept_with_two_snapshot_slots_too(seed: int, world: int) -> None:
    """Progress is not promised there: ranks that never stand at the same step can miss each other for
    long.
    """
    play(Model(world, random.Random(seed), slots=2, skips=0.1))


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 4), parity=st.integers(1, 2), skips=st.sampled_from([0.02, 0.2]))
def test_what_parity_protects_can_be_rebuilt_at_every_moment(
    seed: int, world: int, parity: int, skips: float
) -> None:
    model = Model(world, random.Random(seed), parity=parity, skips=skips)
    play(model)
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 4), copies=st.integers(1, 2))
def test_sidecars_that_restart_make_nobody_throw_away_what_is_committed(
    seed: int, world: int, copies: int
) -> None:
    rng = random.Random(seed)
    model = Model(world, rng, copies=copies)
    for _ in range(6):
        play(model, ACTIONS // 6)
        model.restart_sidecar(rng.randrange(world))
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(30), deadline=None)
@given(
    seed=seeds, world=st.integers(1, 4), cadence=st.sampled_from([2, 4]), skips=st.sampled_from([0.0, 0.05])
)
@example(seed=4859550, world=3, cadence=2, skips=0.0)  # a copy is freed, and its owner still counts upon it
def test_memory_that_rots_keeps_nothing_from_becoming_complete_for_ever(
    seed: int, world: int, cadence: int, skips: float
) -> None:
    """Of what can no longer be complete nobody keeps so much that no slot is left for what can."""
    rng = random.Random(seed)
    model = Model(world, rng, cadence=cadence, skips=skips)
    for _ in range(4):
        play(model, rng.randrange(ACTIONS // 2))
        model.rot(rng.randrange(world))
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 4), parity=st.integers(0, 1))
def test_lost_worker_costs_nothing_that_was_announced_and_its_attempt_protects_again(
    seed: int, world: int, parity: int
) -> None:
    rng = random.Random(seed)
    model = Model(world, rng, parity=parity, skips=0.05)
    for _ in range(4):
        play(model, rng.randrange(ACTIONS // 2))
        protected = model.standing.peer
        back = model.lose(rng.randrange(world))
        assert protected is None or (back is not None and back >= protected), (protected, back)
        model.check()
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 4))
def test_what_an_earlier_attempt_protected_is_kept_until_this_one_has_done_as_much(
    seed: int, world: int
) -> None:
    """All training processes end before new holders have anything; then a worker is lost that held nothing of
    it."""
    rng = random.Random(seed)
    model = Model(world, rng)
    play(model)
    protected = model.standing.peer
    model.lose()
    for _ in range(100 * world):
        model.act()
        if model.standing.peer is not None:
            return
    back = model.lose(rng.randrange(world))
    assert protected is None or (back is not None and back >= protected)
