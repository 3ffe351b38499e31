"""The connection between a sidecar and the coordinator, between real ends over TLS."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue

import pytest

from tests.sidecar.versions.reports import RankTiers, TierReport, written
from tests.sidecar.world import JOB_UID, World, until
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Break
from tiercheck.protocol.version import Version
from tiercheck_sidecar.decoding import Malformed
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.span import Span
from tiercheck_sidecar.versions.tier_line import PATH, AnswerLate, CallFailed, Messages, TierLine, framed
from tiercheck_sidecar.versions.words import TierAnswer

MakeWorld = Callable[..., World]


class Far:
    """Worker 1's end; its own process is not there."""

    def __init__(self, world: World, token: str | None = None) -> None:
        config = SidecarConfig.from_env(world.env(1))
        config = config if token is None else replace(config, token=token)
        self.heard: SimpleQueue[TierAnswer] = SimpleQueue()
        self.world, self.line = world, TierLine(config, world.host(0), self.heard.put)

    def say(self, step: int, number: int, attempt: int | None = None) -> TierAnswer:
        tiers = RankTiers(1, (Span(1, step, step),), (Version(step, 1),), reached=Version(step, 1))
        report = TierReport(JOB_UID, attempt or self.world.attempt, 1, (tiers,))
        try:
            return self.line.tell(written(report, number), number)
        except AnswerLate:
            return until(self.waited, "an answer")

    def waited(self) -> TierAnswer | None:
        with contextlib.suppress(AnswerLate):
            return self.line.wait()
        return None


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    world = make_world(workers=2)
    world.start(0)
    world.begin()
    return world


def test_what_is_said_is_answered_and_verdicts_come_on_their_own(world: World) -> None:
    far = Far(world)
    assert far.say(4, 1) == TierAnswer(1)
    assert far.heard.get(timeout=10).verdict is not None
    assert far.say(5, 2) == TierAnswer(2)
    far.line.close()


def test_dead_coordinator_is_noticed_and_the_next_one_is_found(world: World) -> None:
    far = Far(world)
    far.say(4, 1)
    world.kill(0)
    until(lambda: not far.line.is_open, "the end of the connection is seen")
    with pytest.raises(CallFailed) as failed:
        far.say(5, 2)
    assert failed.value.how is Break.REFUSED
    world.start(0)
    world.direct(Phase.RELEASE)
    assert far.say(5, 3) == TierAnswer(3)
    far.line.close()


def test_without_the_token_there_is_no_connection(world: World) -> None:
    with pytest.raises(CallFailed, match="401"):
        Far(world, token="guessed").say(4, 1)
    assert world.call(0, "GET", PATH, token="wrong")[0] == 401
    assert world.call(0, "GET", PATH)[0] == 426, "nothing else is spoken there"


def test_message_without_end_ends_the_connection_alone(world: World) -> None:
    far, other = Far(world), Far(world)
    far.say(4, 1), other.say(4, 1)
    with pytest.raises(CallFailed):
        far.line.tell(b"x" * (20 << 20), 2)
    assert other.say(5, 2) == TierAnswer(2)
    assert world.is_ready(0)
    other.line.close()


def test_report_of_an_attempt_that_is_over_is_refused(world: World) -> None:
    far = Far(world)
    world.begin()
    assert far.say(4, 1, attempt=1).refused == "attempt 1 is over, the job is at attempt 2"
    far.line.close()


def test_messages_come_in_pieces_of_any_size() -> None:
    said = [b"", b"a", b"bc" * 1000]
    stream = b"".join(map(framed, said))
    for size in (1, 3, len(stream)):
        messages = Messages()
        found = [text for at in range(0, len(stream), size) for text in messages.feed(stream[at : at + size])]
        assert found == said
    with pytest.raises(Malformed):
        Messages().feed(b"\xff\xff\xff\xff")
