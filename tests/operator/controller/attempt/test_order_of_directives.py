"""Directives of one attempt may arrive in any order, and twice."""

from __future__ import annotations

from tests.operator.world_in_memory import World
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.observed import Observation


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
