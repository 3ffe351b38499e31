"""A node that one job had to leave is shunned by all, longer each time, and forgiven in the end."""

from __future__ import annotations

from tiercheck_operator.planning.placement.replacement import FIRST, LONGEST, SuspectNodes


def test_suspected_node_is_shunned_for_a_while_after_the_last_suspicion() -> None:
    nodes = SuspectNodes()
    for second in range(20):
        nodes.note(["n1"], 1000.0 + second)
    assert nodes.unwelcome(1019 + FIRST - 1) == {"n1"}, "one suspicion, however often it is told"
    assert nodes.unwelcome(1019 + FIRST) == frozenset()


def test_flapping_node_is_shunned_longer_each_time_but_not_for_ever() -> None:
    nodes, now, spans = SuspectNodes(), 0.0, []
    for _ in range(8):
        nodes.note(["n1"], now)
        span = next(seconds for seconds in range(0, 10_000, 100) if not nodes.unwelcome(now + seconds))
        spans.append(span)
        now += 600
    assert spans == sorted(spans)
    assert spans[0] == FIRST
    assert spans[-1] == LONGEST


def test_node_that_was_well_for_long_starts_anew() -> None:
    nodes = SuspectNodes()
    for now in (0.0, 600.0, 1200.0):
        nodes.note(["n1"], now)
    later = 1200 + 3 * LONGEST
    assert nodes.unwelcome(later) == frozenset()
    nodes.note(["n1"], later)
    assert nodes.unwelcome(later + FIRST) == frozenset()
