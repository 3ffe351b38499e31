"""Promise: a proven peer whose report is senseless is refused, and the others go on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.sidecar.stations import MakeStations
from tests.sidecar.versions.reports import Copy, RankTiers, TierReport, tell, told, word_of, written
from tests.sidecar.world import JOB_UID, MakeWorld, until
from tiercheck.protocol.version import RankArtifact, Version
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import Needs, Span, TierVerdict
from tiercheck_sidecar.versions import coordinator as coordinating
from tiercheck_sidecar.versions.coordinator import BAD_REPORT, Coordinator
from tiercheck_sidecar.versions.tally import validate_report
from tiercheck_sidecar.versions.tier_line import CoordinatorClient

HUGE = 2**62


def report(worker: int, step: int = 4, **changes: Any) -> TierReport:
    """Of a worker with one rank, which has one snapshot here and at its holder."""
    version = Version(step, 1)
    tiers = RankTiers(
        worker, local=(Span(1, step, step),), snapshots=(version,), reached=version,
        copied=(Span(1, step, step),),
        copied_snapshots=(version,), holders=((worker + 1) % 3,), needs=Needs(1000, 100, True),
    )  # fmt: skip
    return TierReport(JOB_UID, 1, worker, (replace(tiers, **changes),))


def copies(*found: Copy) -> TierReport:
    return replace(report(1), copies=found)


SENSELESS = {
    "worker": replace(report(1), worker=7),
    "negative worker": replace(report(1), worker=-1),
    "other's rank": report(1, rank=0),
    "no such rank": report(1, rank=-5),
    "endless span": report(1, local=(Span(1, 0, HUGE),)),
    "endless copied span": report(1, copied=(Span(1, 0, 2**40),)),
    "backward span": report(1, local=(Span(1, 9, 3),)),
    "negative span": report(1, local=(Span(1, -(2**40), 3),)),
    "many spans": report(1, local=tuple(Span(1, 0, 9999) for _ in range(100))),
    "endless copies": copies(Copy((0,), versions=(Span(1, 0, HUGE),))),
    "copies of nobody": copies(Copy((2**30,), versions=(Span(1, 0, 1),))),
    "huge step": report(1, snapshots=(Version(HUGE, 1),)),
    "negative attempt": report(1, unfinished=(Version(3, -1),)),
    "no sizes": report(1, needs=Needs(0, 0, True)),
    "negative sizes": report(1, needs=Needs(10, -1, True)),
    "other's upload": report(1, uploaded=(RankArtifact(2, Version(4, 1), "k", size=5, digest="d"),)),
    "senseless upload": report(1, uploaded=(RankArtifact(1, Version(4, 1), "k", size=-5, digest="d"),)),
}


@pytest.fixture
def state(stations: MakeStations) -> SidecarState:
    return stations(workers=3)[0].state


def complete_at(coordinator: Coordinator, step: int, *workers: int) -> TierVerdict:
    for worker in workers:
        assert not tell(coordinator, report(worker, step)).refused
    return told(coordinator)


def test_what_honest_workers_say_is_never_objected_to(state: SidecarState) -> None:
    assert state.directive is not None
    for worker in range(3):
        assert validate_report(word_of(report(worker)), state.directive) == ""
    long = report(1, local=(Span(1, 0, 5000),), copied=(Span(1, 0, 5000),))
    assert validate_report(word_of(long), state.directive) == ""


@pytest.mark.parametrize("bad", SENSELESS.values(), ids=SENSELESS)
def test_senseless_report_is_refused_counted_and_shown_and_the_last_good_one_stands(
    state: SidecarState, bad: TierReport, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Coordinator(state)
    complete_at(coordinator, 4, 0, 1, 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert "the report is refused" in tell(coordinator, bad).refused
    assert len(caplog.records) == 1, "it comes every second"
    assert f"worker {bad.worker}" in caplog.text
    assert state.counters.refused_reports == 3
    (problem,) = state.problems
    assert problem.reason == BAD_REPORT
    assert problem.message.startswith(f"the report of worker {bad.worker} is refused: ")
    news = coordinator.next_verdict()
    assert news is not None
    assert news.watermarks.peer == Version(4, 1)


def test_worker_that_comes_to_its_senses_is_heard_again(state: SidecarState) -> None:
    coordinator = Coordinator(state)
    complete_at(coordinator, 4, 0, 1, 2)
    assert tell(coordinator, SENSELESS["endless span"]).refused
    complete_at(coordinator, 6, 0, 1, 2)
    news = coordinator.next_verdict()
    assert news is not None
    assert news.watermarks.peer == Version(6, 1)
    assert state.problems == ()


def test_sidecar_of_worker_0_lives_on_beside_a_peer_that_only_talks_nonsense(make_world: MakeWorld) -> None:
    world = make_world(workers=3)
    world.start(0, 2)
    world.begin()
    line = CoordinatorClient(SidecarConfig.from_env(world.env(1)), world.host(0), lambda answer: None)
    for number, name in enumerate(("worker", "endless span", "endless copies", "no sizes"), 1):
        answer = line.send(written(SENSELESS[name], number), number)
        assert "the report is refused" in answer.refused
    line.close()
    assert world.is_ready(0)
    until(lambda: any(each.reason == BAD_REPORT for each in world.report(0).problems), "it is told")
    assert not [each for each in world.report(0).problems if each.reason == "InternalError"]
    assert world.report(0).counters.refused_reports == 4


def test_reckoning_that_fails_ends_nothing(state: SidecarState, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that reckons is a vital one: what it raises again and again ends the process."""
    coordinator = Coordinator(state)
    complete_at(coordinator, 4, 0, 1, 2)
    known = coordinator.next_verdict()
    assert known is not None
    monkeypatch.setattr(coordinating, "compute_watermarks", lambda *_: 1 / 0)
    for step in range(5, 20):
        assert complete_at(coordinator, step, 0, 1, 2) == known
        assert coordinator.next_verdict() == known
    assert not any(each.reason == "InternalError" for each in state.problems)
