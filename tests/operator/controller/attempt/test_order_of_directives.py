"""Directives may arrive in any order, and what workers hold is asked for in a recovery alone."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.world_in_memory import World
from tiercheck.protocol.report import Report
from tiercheck_operator.model.actions import ProbeSidecar, Push
from tiercheck_operator.model.observed import Observation, WorkerReport


class Listening(World):
    """Keeps what was sent, with what was known of the sidecar then."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Push] = []

    def observe(self) -> Observation:
        self.known = super().observe()
        return self.known

    def _do(self, item: object) -> None:
        if isinstance(item, Push):
            known = self.known.reports[item.pod_uid].report
            assert known is not None
            assert (item.directive.instance, item.directive.number) == (known.instance, known.followed + 1)
            self.sent.append(item)
        super()._do(item)  # type: ignore[arg-type]


def test_each_directive_follows_what_the_sidecar_has_said_whoever_leads() -> None:
    world = Listening()
    world.until("Running")
    world.crash(1)
    world.recovered()
    world.evict(world.member(2))
    world.forget()  # the operator was started again
    world.recovered(attempt=3)
    uid = world.member(0)
    told = [push.directive for push in world.sent if push.pod_uid == uid]
    assert [each.number for each in told] == list(range(1, len(told) + 1))
    assert len(told) >= 5


def test_directive_is_the_same_however_often_it_is_decided_upon() -> None:
    """The answer to it may have been lost."""
    world = Listening()
    while not world.sent:
        world.tick()
    told = list(world.sent)
    world.reconcile()  # nothing was heard since
    assert world.sent == [*told, *told]


# No version is chosen before all have said what they hold.


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
    world = Terse().running(5)
    attempt, silent = world.status.attempt, world.member(0)
    world.terse = frozenset({silent})
    world.crash(1)
    world.train(10)
    assert world.status.attempt == attempt
    assert ProbeSidecar(silent) in world.last.after
    world.terse = frozenset()
    world.recovered(attempt=attempt + 1)
    assert world.summary["lostSteps"] <= 1


def test_answer_counts_for_what_is_held_from_when_that_was_told() -> None:
    world = World()
    world.until("Running")
    known = world.reports[world.member(0)]
    assert known.holdings_at == known.answered_at
    later = replace(bare(known), held_at=known.answered_at, answered_at=(known.answered_at or 0.0) + 60)
    assert later.holdings_at == known.answered_at
    assert replace(later, held_at=None).holdings_at is None
