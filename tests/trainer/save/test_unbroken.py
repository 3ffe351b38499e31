"""Promise: a delta is taken if and only if it continues a chain that begins with a snapshot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.trainer.save.chain import Unbroken


def test_before_the_first_snapshot_there_is_no_chain() -> None:
    chain = Unbroken()
    assert not chain.reaches(1)
    chain.snapshot(4)
    assert not chain.reaches(4)
    assert chain.reaches(5)


def test_restored_version_is_a_beginning() -> None:
    chain = Unbroken()
    chain.restored(11)
    assert chain.reaches(12)


def test_gap_ends_it_until_the_next_snapshot() -> None:
    chain = Unbroken()
    chain.snapshot(4)
    chain.delta_missing(6)
    assert not chain.reaches(7)
    chain.snapshot(8)
    assert chain.reaches(9)
    chain.snapshot_failed(8)
    assert not chain.reaches(9)


def test_snapshot_that_fails_does_no_harm_to_an_older_chain() -> None:
    chain = Unbroken()
    chain.snapshot(4)
    chain.snapshot(8)
    chain.snapshot_failed(8)
    assert chain.reaches(9)


@given(st.lists(st.sampled_from(["snapshot", "failed", "both", "delta", "nothing"]), max_size=30))
def test_what_is_reached_is_always_rebuildable(events: list[str]) -> None:
    chain = Unbroken()
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
