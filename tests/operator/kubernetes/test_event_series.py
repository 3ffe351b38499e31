"""An Event that happens again is counted, so that a bad night does not bury the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.operator.world_in_memory import START, World
from tiercheck_operator.kubernetes.client import ApiFailure
from tiercheck_operator.kubernetes.events import EventPoster
from tiercheck_operator.model.actions import Notice

JOB = World().job


@dataclass
class Server:
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: int = 0
    failure: ApiFailure | None = None

    async def create(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        self._called()
        self.events[body["metadata"]["name"]] = dict(body)
        return dict(body)

    async def merge(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        self._called()
        if names["name"] not in self.events:
            raise ApiFailure(404, "not found")
        self.events[names["name"]] |= body
        return self.events[names["name"]]

    def _called(self) -> None:
        self.calls += 1
        if self.failure is not None:
            raise self.failure

    def told(self) -> list[tuple[str, int]]:
        return [(event["message"], event["count"]) for event in self.events.values()]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def poster(server: Server) -> EventPoster:
    return EventPoster(server)  # type: ignore[arg-type]


def lost(what: str = "the node is gone") -> Notice:
    return Notice("Warning", "NodeLost", what)


async def test_what_happens_again_raises_the_count_and_makes_no_new_event(
    server: Server, poster: EventPoster
) -> None:
    for turn in range(5):
        await poster.post(JOB, [lost()], START + 60 * turn)
    assert server.told() == [("the node is gone", 5)]
    (event,) = server.events.values()
    assert event["firstTimestamp"] < event["lastTimestamp"]


async def test_a_burst_is_one_call_and_is_told_in_full_later(server: Server, poster: EventPoster) -> None:
    for turn in range(50):
        await poster.post(JOB, [lost()], START + turn / 10)
    assert server.calls == 1
    await poster.post(JOB, [], START + 20)
    assert server.told() == [("the node is gone", 50)]
    assert server.calls == 2
    await poster.post(JOB, [], START + 40)
    assert server.calls == 2


async def test_event_that_the_cluster_has_forgotten_is_posted_anew(
    server: Server, poster: EventPoster
) -> None:
    await poster.post(JOB, [lost()], START)
    server.events.clear()
    await poster.post(JOB, [lost()], START + 60)
    assert server.told() == [("the node is gone", 2)]


async def test_many_similar_events_become_one(server: Server, poster: EventPoster) -> None:
    for number in range(200):
        await poster.post(JOB, [lost(f"node {number} is gone")], START + number / 100)
    assert len(server.events) == 11
    assert server.calls == 11
    await poster.post(JOB, [], START + 30)
    assert ("(combined from similar events): node 199 is gone", 190) in server.told()


async def test_event_after_a_long_time_is_a_new_one(server: Server, poster: EventPoster) -> None:
    await poster.post(JOB, [lost()], START)
    await poster.post(JOB, [lost()], START + 3600)
    assert server.told() == [("the node is gone", 1), ("the node is gone", 1)]


async def test_event_that_cannot_be_posted_is_no_failure(server: Server, poster: EventPoster) -> None:
    server.failure = ApiFailure(403, "forbidden")
    await poster.post(JOB, [lost()], START)
    assert server.calls == 1
