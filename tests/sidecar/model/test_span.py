"""Spans say in a few words what sets of versions would say in many."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.version import Branch, History, Version
from tiercheck_sidecar.model.span import Span, intersect, newest, spans, unite

HISTORY = History((Branch(1, 0), Branch(3, 10), Branch(4, 17)))
accepted = st.integers(1, 30).map(lambda step: Version(step, HISTORY.owner(step) or 0))
sets = st.frozensets(accepted)


def versions(runs: Iterable[Span]) -> set[Version]:
    return {Version(step, run.attempt) for run in runs for step in range(run.first, run.last + 1)}


@given(sets)
def test_spans_have_exactly_the_versions(some: frozenset[Version]) -> None:
    assert versions(spans(some)) == some


@given(st.lists(sets, min_size=1, max_size=4))
def test_what_is_common_is_the_intersection(many: list[frozenset[Version]]) -> None:
    both = frozenset.intersection(*many)
    assert intersect(map(spans, many)) == spans(both)
    assert newest(spans(both), HISTORY) == max(both, default=None)


def test_runs_do_not_cross_attempts_and_nothing_is_common_to_nobody() -> None:
    assert spans({Version(10, 1), Version(11, 3), Version(12, 3)}) == (Span(1, 10, 10), Span(3, 11, 12))
    assert intersect([]) == ()


def test_versions_that_the_history_does_not_accept_are_not_the_newest() -> None:
    assert newest((Span(1, 8, 14),), HISTORY) == Version(10, 1)


@given(st.lists(sets, max_size=4))
def test_what_any_has_is_the_union(many: list[frozenset[Version]]) -> None:
    both = frozenset[Version]().union(*many)
    assert unite(run for each in many for run in spans(each)) == spans(both)
    assert newest(
        unite(map(lambda version: Span(version.attempt, version.step, version.step), both)), HISTORY
    ) == max(both, default=None)


def test_how_long_a_run_is_said_to_be_costs_nothing() -> None:
    """A sidecar that lies must not keep the coordinator busy for ever, and with it every rank of the job."""
    endless = Span(1, -(2**63), 2**63 - 1)
    assert newest((endless,), HISTORY) == Version(10, 1)
    assert newest((Span(2, 0, 2**63 - 1), Span(9, 0, 2**63 - 1)), HISTORY) is None
    assert newest(intersect([unite([endless, Span(1, 5, 2**62)]), (Span(1, 3, 2**62),)]), HISTORY) == Version(
        10, 1
    )
    assert newest((Span(4, 18, 2**63 - 1),), HISTORY) == Version(2**63 - 1, 4)
    assert unite([Span(1, 5, 4)]) == ()
