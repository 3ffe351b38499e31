"""One replica leads, whatever clocks, lost calls and stopped processes do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.api_model import AnsweringServer, ApiModel
from tiercheck.failpoints import Struck
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.kubernetes.election import Candidate, Elector, LeaseMove, Record, Terms, parse_lease
from tiercheck_operator.kubernetes.owned_objects import DEPLOYMENTS

TERMS = Terms(8.0, 5.0, 1.0)


LEASE = "/apis/coordination.k8s.io/v1/namespaces/system/leases/lease"


@dataclass
class Replica:
    """An elector that is driven by hand. Its clock may begin anywhere."""

    server: ApiModel
    name: str
    offset: float = 0.0
    reachable: bool = True
    alive: bool = True
    lose_answers: bool = False
    told: list[bool] = field(default_factory=list)
    time: float = 0.0

    def __post_init__(self) -> None:
        self.elector = Elector(
            AnsweringServer(self.call),
            ("system", "lease"),
            self.name,
            TERMS,
            changed=self.told.append,
            alive=lambda: self.alive,
            clock=lambda: self.time + self.offset,
        )

    def call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        if not self.reachable:
            raise ApiFailure(0, "no answer")
        answer = self.server.call(method, path, body)
        if self.lose_answers:
            raise ApiFailure(0, "the answer was lost")
        return answer

    def round(self, now: float) -> None:
        self.time = now
        self.elector.look()
        self.elector._notify_if_changed()

    def leads(self, now: float) -> bool:
        self.time = now
        return self.elector.leads()


def led_by_the_first() -> tuple[Replica, Replica]:
    server = ApiModel()
    first, second = Replica(server, "a"), Replica(server, "b", offset=-500)
    first.round(0.0)
    return first, second


def holder(server: ApiModel) -> str:
    return parse_lease(server.objects[LEASE]).holder


def test_lease_belongs_to_the_deployment_of_its_name_if_there_is_one() -> None:
    """So Kubernetes removes it when the operator is uninstalled."""
    deployment = DEPLOYMENTS.path("system", "lease")
    server = ApiModel({deployment: {"metadata": {"name": "lease", "uid": "u-7"}}})
    replica = Replica(server, "a")
    for moment in range(3):
        replica.round(moment)
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "lease", "uid": "u-7"}
    assert server.objects[LEASE]["metadata"]["ownerReferences"] == [owner]
    by_hand = ApiModel()
    Replica(by_hand, "a").round(0.0)
    assert "ownerReferences" not in by_hand.objects[LEASE]["metadata"]


def test_first_replica_leads_and_the_second_one_waits() -> None:
    server = ApiModel()
    first, second = Replica(server, "a"), Replica(server, "b", offset=1e6)
    for second_ in range(60):
        first.round(second_)
        second.round(second_ + 0.5)
    assert (first.told, second.told) == ([True], [])
    assert server.objects[LEASE]["spec"]["leaseTransitions"] == 0


def test_leader_that_was_killed_is_replaced_once_its_record_has_stood_still_for_the_duration() -> None:
    first, second = led_by_the_first()
    taken = None
    for tick in range(1, 30):
        second.round(tick * 0.5)
        if second.leads(tick * 0.5):
            taken = tick * 0.5
            break
    assert taken is not None
    assert TERMS.duration <= taken <= TERMS.duration + TERMS.retry
    assert first.server.objects[LEASE]["spec"]["leaseTransitions"] == 1


def test_leader_that_ends_gives_the_lease_back_and_the_next_look_takes_it() -> None:
    first, second = led_by_the_first()
    second.round(0.5)
    first.time = 1.0
    first.elector.release()
    assert not first.leads(1.0)
    second.round(1.5)
    assert second.leads(1.5)


def test_leader_that_cannot_renew_stops_before_anybody_else_may_begin() -> None:
    first, second = led_by_the_first()
    first.reachable = False
    second.round(0.01)
    assert first.leads(TERMS.renew_within - 0.01)
    assert not first.leads(TERMS.renew_within)
    second.round(TERMS.duration)
    assert not second.leads(TERMS.duration)
    second.round(TERMS.duration + 0.01)
    assert second.leads(TERMS.duration + 0.01)


def test_stopped_leader_that_wakes_up_knows_at_once_that_its_time_is_over() -> None:
    first, second = led_by_the_first()
    second.round(0.5)
    second.round(9.0)
    assert second.leads(9.0)
    assert not first.leads(30.0), "before it has asked anybody"
    for now in (30.0, 31.0, 32.0):
        second.round(now)
        first.round(now)
        assert not first.leads(now)
    assert first.told == [True, False]
    assert holder(first.server) == "b"


def test_leader_whose_event_loop_is_stuck_does_not_renew() -> None:
    first, second = led_by_the_first()
    first.alive = False
    for tick in range(1, 12):
        first.round(float(tick))
        second.round(tick + 0.5)
    assert not first.leads(11.0)
    assert second.leads(11.5)


def test_renewal_whose_answer_was_lost_is_found_and_renewed() -> None:
    server = ApiModel()
    first = Replica(server, "a")
    first.round(0.0)
    first.lose_answers = True
    first.round(1.0)
    first.lose_answers = False
    first.round(2.0)
    first.round(3.0)
    assert first.leads(7.9)
    assert first.told == [True]


def test_look_that_fails_in_a_way_that_nobody_thought_of_is_not_the_last_one() -> None:
    server, leading = ApiModel(), threading.Event()

    looks = itertools.count(1)

    def fail_at_first(method: str, path: str, body: Any) -> dict[str, Any]:
        if next(looks) <= 3:
            raise Struck("nobody thought of it")
        return server.call(method, path, body)

    terms = Terms.of(60.0)
    elector = Elector(
        AnsweringServer(fail_at_first),
        ("system", "lease"),
        "one",
        replace(terms, retry=0.01),
        changed=lambda leads: leads and leading.set(),
    )
    elector.start()
    assert leading.wait(30)
    assert not elector.died
    elector.release()


class _Turns(threading.Event):
    """Ends the elector after `left` pauses, which take no time but that of `passing`."""

    def __init__(self, passing: Callable[[float], None], left: int) -> None:
        super().__init__()
        self._passing, self._left = passing, left

    def wait(self, timeout: float | None = None) -> bool:
        self._passing(timeout or 0.0)
        self._left -= 1
        if not self._left:
            self.set()
        return self.is_set()


@pytest.mark.parametrize("seconds", [0.0, 1.5, 2.0, 2.4])
def test_api_server_that_takes_seconds_for_every_call_costs_no_leader_its_lead(seconds: float) -> None:
    replica, gaps = Replica(ApiModel(), "a"), []

    def passing(passed: float) -> None:
        replica.time += passed
        if replica.told and not replica.elector.leads():
            gaps.append(replica.time)

    def call_slowly(method: str, path: str, body: Any) -> dict[str, Any]:
        answer = replica.call(method, path, body)
        passing(seconds)
        return answer

    assert seconds <= TERMS.call
    replica.elector._api = AnsweringServer(call_slowly)
    replica.elector._ending = _Turns(passing, 20)
    replica.elector.run()
    assert replica.told == [True]
    assert gaps == []
    assert replica.time >= 20 * TERMS.retry, "the API server is not asked all the time"


def test_lease_that_cannot_be_renewed_in_time_names_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    first, _ = led_by_the_first()
    first.reachable = False
    first.round(1.0)
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "later than in 2.5 s" in said
    assert "settings.leaseSeconds" in said


def test_lease_that_somebody_deleted_or_annotated_is_no_reason_to_lead_twice() -> None:
    first, second = led_by_the_first()
    second.round(0.1)
    first.server.put(LEASE, first.server.objects[LEASE])
    first.round(1.0)
    first.round(2.0)
    assert first.leads(2.0)
    first.server.objects.clear()
    second.round(2.1)  # takes it, as nobody holds it
    first.round(3.0)
    first.round(4.0)
    assert not first.leads(4.0)
    assert second.leads(4.0)


def test_longer_terms_of_the_other_side_are_respected() -> None:
    candidate = Candidate("b", TERMS)
    held = Record("a", 60.0, "x")
    assert candidate.see(held, 0.0) is LeaseMove.WAIT
    assert candidate.see(held, 59.0) is LeaseMove.WAIT
    assert candidate.see(held, 60.0) is LeaseMove.TAKE


STEPS = st.lists(
    st.tuples(
        st.floats(0.05, 4.0),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["round", "round", "round", "cut", "heal", "lose", "keep", "release"]),
    ),
    max_size=120,
)


@settings(max_examples=examples(300), deadline=None)
@given(STEPS, st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_never_two_leaders(steps: list[tuple[float, str, str]], one: float, other: float) -> None:
    """Whatever calls are lost, in whatever order replicas run or stand still, and wherever their clocks
    begin."""
    server = ApiModel()
    replicas = {
        name: Replica(server, name, offset) for name, offset in (("a", 0.0), ("b", one), ("c", other))
    }
    now = 0.0
    for pause, name, what in steps:
        now += pause
        replica = replicas[name]
        replica.time = now
        match what:
            case "round":
                replica.round(now)
            case "cut" | "heal":
                replica.reachable = what == "heal"
            case "lose" | "keep":
                replica.lose_answers = what == "lose"
            case "release":
                replica.elector.release()
                replicas[name] = Replica(server, name + "'", replica.offset)
        assert sum(each.leads(now) for each in replicas.values()) <= 1


@pytest.mark.parametrize("text", ["lease", "/lease", "a/", "a/b/c"])
def test_lease_that_cannot_be_understood_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="TIERCHECK_LEASE"):
        Config.from_env({"TIERCHECK_LEASE": text})


@pytest.mark.parametrize("seconds", ["0", "-3", "soon"])
def test_terms_that_make_no_sense_are_named(seconds: str) -> None:
    with pytest.raises(ValueError, match="TIERCHECK_LEASE_SECONDS"):
        Config.from_env({"TIERCHECK_LEASE_SECONDS": seconds})
    assert Config.from_env({"TIERCHECK_LEASE": "ns/n", "TIERCHECK_LEASE_SECONDS": "16"}).terms == Terms(
        16, 10, 2
    )
