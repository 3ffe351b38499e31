"""What workers hold is asked for in a recovery alone, and no version is chosen before all have told."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.world_in_memory import World
from tiercheck.protocol.report import Report
from tiercheck_operator.model.actions import ProbeSidecar
from tiercheck_operator.model.observed import Observation, WorkerReport


def bare(known: WorkerReport) -> WorkerReport:
    report = known.report
    assert isinstance(report, Report)
    return replace(known, report=replace(report, holdings=(), tells_holdings=False))


class Terse(World):
    """Some sidecars answer, and do not say what they hold."""

    terse: frozenset[str] = frozenset()

    def observe(self) -> Observation:
        seen = super().observe()
        reports = {
            uid: bare(known) if uid in self.terse and known.report is not None else known
            for uid, known in seen.reports.items()
        }
        return replace(seen, reports=reports)


def test_no_attempt_begins_before_a_sidecar_that_answers_has_said_what_it_holds() -> None:
    world = Terse()
    world.until("Running")
    world.train(5)
    attempt, silent = world.status.attempt, world.member(0)
    world.terse = frozenset({silent})
    world.crash(1)
    for _ in range(10):
        world.tick()
    assert world.status.attempt == attempt
    assert ProbeSidecar(silent) in world.last.after
    world.terse = frozenset()
    world.recovered(attempt=attempt + 1)
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["lostSteps"] <= 1


def test_answer_counts_for_what_is_held_from_when_that_was_told() -> None:
    world = World()
    world.until("Running")
    known = world.reports[world.member(0)]
    assert known.holdings_at == known.answered_at
    later = replace(bare(known), held_at=known.answered_at, answered_at=(known.answered_at or 0.0) + 60)
    assert later.holdings_at == known.answered_at
    assert replace(later, held_at=None).holdings_at is None
