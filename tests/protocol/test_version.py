"""Every step has at most one owner, and what a rollback abandoned is never accepted again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.version import Branch, History, Version

LAST = 40
starts = st.lists(st.tuples(st.integers(1, 3), st.integers(0, LAST)), max_size=8)
"""(by how much the attempt grows, step it begins from), one per restart."""


def history_of(restarts: list[tuple[int, int]]) -> tuple[History, list[Branch]]:
    history, told, attempt = History(), [], 0
    for growth, base in restarts:
        attempt += growth
        history = history.after(attempt, base)
        told.append(Branch(attempt, base))
    return history, told


def owner_by_definition(told: list[Branch], step: int) -> int | None:
    """Attempt b owns the steps after its base up to the lowest base of any later attempt."""
    owners = [
        branch.attempt
        for index, branch in enumerate(told)
        if branch.base_step < step <= min((later.base_step for later in told[index + 1 :]), default=step)
    ]
    assert len(owners) <= 1  # the intervals are disjoint
    return owners[0] if owners else None


@given(starts)
def test_owner_is_the_one_that_the_definition_names(restarts: list[tuple[int, int]]) -> None:
    history, told = history_of(restarts)
    for step in range(LAST + 3):
        assert history.owner(step) == owner_by_definition(told, step)


lines = st.lists(
    st.builds(Branch, st.integers(1, 9), st.integers(0, 12), st.sampled_from((0, 2, 4))), max_size=9
)
"""As they may come from the wire: in any order, and more than once."""


@given(lines, st.integers(-1, 14), st.integers(0, 10))
def test_answers_are_those_of_a_walk_through_all_branches(
    branches: list[Branch], step: int, attempt: int
) -> None:
    history, version = History(tuple(branches)), Version(step, attempt)
    owners = [branch.attempt for branch in branches if step > branch.base_step]
    owner = owners[-1] if owners else None
    ranks = next((branch.ranks for branch in branches if branch.attempt == attempt), 0)
    now = history.ranks
    as_many = not now or attempt == history.attempt or ranks in (0, now)
    assert history.owner(step) == owner
    assert history.ranks_of(version) == ranks
    assert history.accepts(version) == (owner == attempt)
    assert history.continues(version) == (owner == attempt and as_many)
    first = next((n for n, branch in enumerate(branches) if branch.attempt == attempt), None)
    if first is None:
        assert history.steps_of(attempt) is None
    else:
        end = min((later.base_step for later in branches[first + 1 :]), default=None)
        assert history.steps_of(attempt) == (branches[first].base_step + 1, end)


@given(lines, st.integers(0, 14))
def test_shorter_history_says_the_same_of_all_that_is_kept_and_nothing_new_of_what_is_not(
    branches: list[Branch], oldest: int
) -> None:
    history = History(tuple(branches))
    shorter = history.since(oldest)
    assert set(shorter.branches) <= set(history.branches)
    for step in range(15):
        expected = history.owner(step)
        assert shorter.owner(step) in ((expected,) if step >= oldest else (expected, None))
    assert (shorter.attempt, shorter.ranks) == (history.attempt, history.ranks)
    assert shorter.since(oldest) == shorter


@given(starts, st.integers(0, LAST), st.data())
def test_shorter_history_goes_on_as_the_whole_one_would(
    restarts: list[tuple[int, int]], oldest: int, data: st.DataObject
) -> None:
    """Attempts that begin from what is kept change nothing of it."""
    history, _ = history_of(restarts)
    base = data.draw(st.integers(oldest, LAST))
    whole, shorter = (each.after(99, base) for each in (history, history.since(oldest)))
    for step in range(oldest, LAST + 3):
        assert shorter.owner(step) == whole.owner(step)


@given(starts)
def test_at_most_one_attempt_is_accepted_for_a_step(restarts: list[tuple[int, int]]) -> None:
    history, told = history_of(restarts)
    for step in range(LAST + 3):
        accepted = [branch.attempt for branch in told if history.accepts(Version(step, branch.attempt))]
        assert accepted == [owner for owner in [history.owner(step)] if owner is not None]


@given(starts, st.integers(0, LAST))
def test_rollback_rejects_everything_after_its_base_and_keeps_everything_up_to_it(
    restarts: list[tuple[int, int]], base: int
) -> None:
    history, told = history_of(restarts)
    after = history.after(history.attempt + 1, base)
    for step in range(1, LAST + 3):
        for branch in told:
            version = Version(step, branch.attempt)
            assert after.accepts(version) == (step <= base and history.accepts(version))
        assert after.accepts(Version(step, history.attempt + 1)) == (step > base)


@given(starts, st.integers(0, LAST))
def test_attempt_that_nobody_trained_in_gives_nothing_up(restarts: list[tuple[int, int]], base: int) -> None:
    history, _ = history_of(restarts)
    again = history.after(history.attempt + 1, base).without_newest
    for step in range(LAST + 3):
        assert again.owner(step) == history.owner(step)


@given(starts)
def test_branches_that_own_nothing_stay_for_one_attempt_only(restarts: list[tuple[int, int]]) -> None:
    history, _ = history_of(restarts)
    for line in (history, history.without_newest):
        owners = {line.owner(step) for step in range(LAST + 3)} - {None}
        kept = history.after(history.attempt + 1, LAST + 3).branches[:-1]
        assert owners <= {branch.attempt for branch in line.branches}
    assert [branch.attempt for branch in kept] == sorted(
        {history.owner(step) for step in range(LAST + 3)} - {None}  # type: ignore[type-var]
    )


@given(starts, st.integers(0, 30))
def test_attempt_that_is_not_newer_is_refused(restarts: list[tuple[int, int]], attempt: int) -> None:
    history, _ = history_of(restarts)
    if history.branches and attempt <= history.attempt:
        with pytest.raises(ValueError, match="not newer"):
            history.after(attempt, 0)
    else:
        assert history.after(attempt, 0).attempt == attempt


def test_job_that_never_ran_accepts_nothing() -> None:
    assert History().owner(1) is None
    assert not History().accepts(Version(0, 0))
    assert History().attempt == 0


def test_two_attempts_at_step_50_are_two_states_and_one_is_accepted() -> None:
    history = History().after(1, 0).after(2, 40)
    assert history.accepts(Version(40, 1))
    assert not history.accepts(Version(50, 1))
    assert history.accepts(Version(50, 2))


def test_version_reads_as_a_sentence_part_and_orders_by_step() -> None:
    assert str(Version(50, 2)) == "step 50 (attempt 2)"
    assert Version(40, 3) < Version(50, 1) < Version(50, 2)


def test_only_versions_of_as_many_ranks_are_gone_on_from_slot_by_slot() -> None:
    history = History().after(1, 0, 4).after(2, 8, 2).after(3, 16, 4)
    assert [history.ranks_of(Version(step, attempt)) for step, attempt in ((8, 1), (16, 2), (20, 3))] == [
        4,
        2,
        4,
    ]
    assert [history.continues(Version(step, attempt)) for step, attempt in ((8, 1), (16, 2), (20, 3))] == [
        True,
        False,
        True,
    ]
    assert not history.continues(Version(9, 1)), "it is not accepted at all"
    assert History().after(1, 0).after(2, 8, 2).continues(Version(8, 1)), (
        "not written down by an older operator"
    )
