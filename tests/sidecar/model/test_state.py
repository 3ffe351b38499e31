"""The state is fenced by attempts, looked at once per burst, and written by its own methods only.

A peer counts as lost at the first sign, and as well only after it answered for a while. All ranks have one
cadence, from the sizes of all. Spans say in a few words what sets of versions would say in many.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiercheck_sidecar
from tests.sidecar.stations import config_of
from tiercheck.protocol.directive import Peer
from tiercheck.protocol.report import ConnectionFailure
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_sidecar.model import state as state_module
from tiercheck_sidecar.model.fence import Fence
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import (
    UNDECIDED,
    WITHOUT_DELTAS,
    Cadence,
    Needs,
    Span,
    decide,
    intersect,
    newest,
    spans,
    unite,
)
from tiercheck_sidecar.model.watches import ANSWERS_TO_RECOVER, MOST, PeerWatch
from tiercheck_sidecar.versions.report_updates import heartbeat, min_report_interval, upload_report_interval

# The fence


@dataclass
class Followed:
    attempt: int


@pytest.mark.parametrize(
    ("attempt", "followed", "past", "future", "counted"),
    [
        (2, Followed(3), "attempt 2 is over, the job is at attempt 3", "", 2),
        (3, Followed(3), "", "", 0),
        (4, Followed(3), "", "attempt 4 is not known here yet", 0),
        (1, None, "", "attempt 1 is not known here yet", 0),
    ],
)
def test_only_what_is_past_is_counted(
    attempt: int, followed: Followed | None, past: str, future: str, counted: int
) -> None:
    counts: list[None] = []
    fence = Fence(lambda: counts.append(None))
    assert fence.refuse_past(attempt, followed) == past  # type: ignore[arg-type]
    assert fence.refuse_future(attempt, followed) == future  # type: ignore[arg-type]
    assert fence.refuse_other(attempt, followed) == past + future  # type: ignore[arg-type]
    assert len(counts) == counted


# Looks


class World:
    """A state whose pauses pass by themselves, with changes while they last."""

    def __init__(self) -> None:
        self.now, self.quiet, self.burst, self.paused = 1000.0, 0.0, 0, 0
        self.state = SidecarState(config_of(), clock=lambda: self.now)
        self.state.threads.pause = self.pause  # type: ignore[method-assign]
        self.state.wait = self.wait  # type: ignore[method-assign]

    def wait(self, seen: int, timeout: float) -> int:
        """The next change comes after a while."""
        self.now += self.quiet
        return SidecarState.wait(self.state, seen, timeout)

    def pause(self, seconds: float) -> bool:
        self.now, self.paused = self.now + seconds, self.paused + 1
        for _ in range(self.burst):
            self.state.bump()
        self.burst = 0
        return True


def test_change_that_comes_alone_is_looked_at_at_once() -> None:
    world = World()
    world.quiet = 1.0
    looks = world.state.looks(60.0)
    next(looks)
    for _ in range(3):
        world.state.bump()
        next(looks)
    assert world.paused == 0


def test_changes_of_a_burst_share_a_look_and_what_comes_after_it_has_its_own() -> None:
    world = World()
    looks, generations = world.state.looks(60.0), []
    for changes in (3, 5, 0):
        next(looks)
        generations.append(world.state._generation)
        world.burst = changes
        world.state.bump()  # while it looks
    assert world.paused == 2
    assert generations == [0, 4, 10], "each look comes after all changes that it stands for"


def test_clock_that_was_set_back_holds_up_nobody() -> None:
    world = World()
    looks = world.state.looks(60.0)
    next(looks)
    world.quiet = -3600.0
    world.state.bump()
    next(looks)
    assert world.now == 1000.0 - 3600.0 + 0.02


def test_looks_end_when_the_sidecar_stops() -> None:
    world = World()
    looks = world.state.looks(60.0)
    next(looks)
    world.state.stop()
    assert list(looks) == []


# Who writes


PRODUCT = Path(tiercheck_sidecar.__file__).parent


def written(tree: ast.AST) -> Iterator[tuple[ast.expr, str, int]]:
    """Each attribute that is set or deleted, or whose items are: of what, its name, and the line."""
    for node in ast.walk(tree):
        target = (
            node.value if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) else node
        )
        if isinstance(target, ast.Attribute) and not (target is node and isinstance(target.ctx, ast.Load)):
            yield target.value, target.attr, target.lineno


def is_self(of: ast.expr) -> bool:
    return isinstance(of, ast.Name) and of.id == "self"


def state_fields() -> set[str]:
    tree = ast.parse(Path(state_module.__file__).read_text())
    (state,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "SidecarState")
    return {name for of, name, _ in written(state) if is_self(of) and not name.startswith("_")}


def trespasses(source: str, fields: set[str]) -> list[str]:
    return [
        f"line {line}: {ast.unparse(of)}.{name}"
        for of, name, line in written(ast.parse(source))
        if name in fields and not is_self(of)
    ]


def test_no_module_writes_a_field_of_the_state() -> None:
    fields = state_fields()
    assert {"directive", "verdict", "restore", "remote"} <= fields
    found = {
        str(path.relative_to(PRODUCT)): trespasses(path.read_text(), fields) for path in PRODUCT.rglob("*.py")
    }
    assert not {path: lines for path, lines in found.items() if lines}


def test_each_way_to_write_a_field_is_seen() -> None:
    ways = [
        "self._state.verdict = None",
        "state.left_out &= gone",
        "state.reached[0] = version",
        "self.state.ending, rest = True, 1",
        "del state.remote",
        "state.proofs: tuple = ()",
    ]
    fields = {"verdict", "left_out", "reached", "ending", "remote", "proofs"}
    assert [len(trespasses(way, fields)) for way in ways] == [1] * len(ways)
    assert trespasses("self.verdict = state.verdict\nknown = state.reached[0]", fields) == []


ONE, OTHER = Peer(1, "10.0.0.1"), Peer(2, "10.0.0.2")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def watching(*peers: Peer) -> tuple[PeerWatch, Clock, list[None]]:
    clock, news = Clock(), list[None]()
    watch = PeerWatch(lambda: news.append(None), clock)
    watch.only(peers or (ONE, OTHER))
    news.clear()
    return watch, clock, news


def test_lost_peer_is_named_with_the_moment_of_its_last_answer() -> None:
    watch, clock, news = watching()
    watch.answered(ONE)
    clock.now += 4
    watch.broken(ONE, ConnectionFailure.SILENT)
    (lost,) = watch.unreachable()
    assert (lost.worker, lost.host, lost.since, lost.how) == (1, "10.0.0.1", 1000.0, ConnectionFailure.SILENT)
    assert len(news) == 1
    watch.broken(ONE, ConnectionFailure.SILENT)
    assert len(news) == 1, "the same again is no news"


def test_flapping_peer_stays_lost_until_it_is_calm() -> None:
    watch, clock, _ = watching()
    watch.broken(ONE, ConnectionFailure.SILENT)
    for _ in range(10):
        clock.now += 1
        watch.answered(ONE)
        watch.broken(ONE, ConnectionFailure.SILENT)
    assert watch.unreachable()[0].since == 1000.0
    for _ in range(ANSWERS_TO_RECOVER - 1):
        watch.answered(ONE)
    assert watch.unreachable()
    watch.answered(ONE)
    assert watch.unreachable() == ()


def test_late_peer_is_named_until_its_next_answer_and_never_isolates() -> None:
    watch, clock, news = watching()
    clock.now += 100
    watch.suspect(ONE)
    watch.suspect(OTHER)
    assert [(lost.worker, lost.since, lost.how) for lost in watch.unreachable()] == [
        (1, 1000.0, ConnectionFailure.SILENT),
        (2, 1000.0, ConnectionFailure.SILENT),
    ]
    assert not watch.all_lost(60)
    watch.answered(ONE)
    watch.answered(OTHER)
    assert watch.unreachable() == ()
    assert len(news) == 4
    watch.answered(ONE)
    assert len(news) == 4, "an answer in time is no news"


def test_peer_of_an_earlier_attempt_is_forgotten() -> None:
    watch, _, _ = watching()
    watch.broken(ONE, ConnectionFailure.REFUSED)
    watch.only([OTHER])
    watch.broken(ONE, ConnectionFailure.REFUSED)
    assert watch.unreachable() == ()


def test_isolation_needs_peers_and_all_of_them_lost_for_long() -> None:
    watch, clock, _ = watching()
    watch.broken(ONE, ConnectionFailure.SILENT)
    clock.now += 100
    assert not watch.all_lost(60)
    watch.broken(OTHER, ConnectionFailure.REFUSED)
    assert watch.all_lost(60)
    assert not watch.all_lost(100)
    watch.only([])
    assert not watch.all_lost(0), (
        "a job of one worker is never isolated: nobody could have gone on without it"
    )


def test_report_stays_small_however_many_are_lost() -> None:
    peers = [Peer(worker, f"10.0.1.{worker}") for worker in range(100)]
    watch, _, _ = watching(*peers)
    for peer in peers:
        watch.broken(peer, ConnectionFailure.SILENT)
    assert len(watch.unreachable()) == MOST


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_peer_is_reachable_exactly_if_it_was_never_lost_or_calm_since(events: list[tuple[bool, int]]) -> None:
    watch, clock, _ = watching()
    lost, calm = False, 0
    for answered, seconds in events:
        clock.now += seconds
        if answered:
            watch.answered(ONE)
            calm += 1
            lost = lost and calm < ANSWERS_TO_RECOVER
        else:
            watch.broken(ONE, ConnectionFailure.SILENT)
            lost, calm = True, 0
        assert bool(watch.unreachable()) == lost
        for each in watch.unreachable():
            assert each.since <= clock.now


def test_deltas_cost_as_much_as_a_snapshot_between_two_of_them() -> None:
    needs = {0: Needs(1200, 100, True), 1: Needs(1200, 300, True)}
    assert decide(2, needs, None) == Cadence(6, 6, True, 1200, 300)


def test_nothing_is_decided_before_every_rank_has_said_what_it_needs() -> None:
    assert decide(2, {0: Needs(1200, 100, True)}, None) == UNDECIDED
    assert decide(2, {0: Needs(1200, 100, True)}, 9).every == 9, "but for what the user wants"


def test_rank_without_deltas_makes_those_of_the_others_useless_but_not_the_room_for_them() -> None:
    needs = {0: Needs(1200, 100, True), 1: Needs(1200, 100, False)}
    assert decide(2, needs, None) == Cadence(WITHOUT_DELTAS, 12, False, 1200, 100)
    assert decide(2, needs, 7).every == 7


@given(st.lists(st.tuples(st.integers(1, 10**12), st.integers(0, 10**12)), min_size=1, max_size=5))
def test_cadence_is_always_within_its_bounds(sizes: list[tuple[int, int]]) -> None:
    needs = {rank: Needs(snapshot, delta, delta > 0) for rank, (snapshot, delta) in enumerate(sizes)}
    named = decide(len(sizes), needs, None)
    assert named.every == WITHOUT_DELTAS if not named.deltas else 2 <= named.every <= 32


def test_messages_about_every_step_become_rarer_as_the_job_grows_but_none_waits_for_long() -> None:
    """Or thousands of sidecars with news at every step would leave the coordinator no time for anything."""
    assert (min_report_interval(2), min_report_interval(5000)) == (0.05, 0.5)
    assert (upload_report_interval(2), upload_report_interval(512), upload_report_interval(4000)) == (
        0.05,
        0.512,
        4.0,
    )
    assert (heartbeat(2), heartbeat(4000)) == (1.0, 4.0)


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
