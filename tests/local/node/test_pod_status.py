"""A pod has the status that its containers give it, and they start again as a kubelet would do it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tiercheck_local.node.process import BackOff, go_duration
from tiercheck_local.node.status import PodSituation, pod_status

NOW = "2026-01-02T03:04:05Z"
RUNNING = {"running": {"startedAt": NOW}}
WAITING = {"waiting": {"reason": "PodInitializing"}}


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code}}


@dataclass
class Container:
    name: str
    state: dict[str, Any]
    is_sidecar: bool = False
    ready: bool = False
    restarts: int = 0
    last_state: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=lambda: {"image": "i"})

    @property
    def running(self) -> bool:
        return "running" in self.state

    @property
    def is_started(self) -> bool:
        return self.running

    @property
    def exit_code(self) -> int | None:
        return self.state["terminated"]["exitCode"] if "terminated" in self.state else None


def situation(*mains: Container, inits: tuple[Container, ...] = (), **more: Any) -> PodSituation:
    facts: dict[str, Any] = {"initialized": True, "over": False, **more}
    return PodSituation(
        inits=inits, mains=mains, pod_ip="127.2.1.2", host_ip="127.2.1.1", started_at=NOW, **facts
    )


@pytest.mark.parametrize(
    ("facts", "phase"),
    [
        (situation(Container("m", WAITING), initialized=False), "Pending"),
        (
            situation(Container("m", WAITING), inits=(Container("s", RUNNING, True),), initialized=False),
            "Pending",
        ),
        (situation(Container("m", RUNNING)), "Running"),
        (situation(Container("m", WAITING, last_state=ended(1))), "Running"),
        (situation(Container("m", ended(0)), inits=(Container("s", RUNNING, True),)), "Running"),
        (
            situation(Container("m", ended(0)), inits=(Container("s", ended(143), True),), over=True),
            "Succeeded",
        ),
        (situation(Container("m", ended(0)), Container("n", ended(2)), over=True), "Failed"),
        (situation(Container("m", WAITING), inits=(Container("i", ended(1)),), over=True), "Failed"),
        (situation(Container("m", ended(137)), over=True, failure=("PodLost", "gone")), "Failed"),
    ],
)
def test_phase(facts: PodSituation, phase: str) -> None:
    assert pod_status(facts, {}, NOW)["phase"] == phase


def conditions(status: dict[str, Any]) -> dict[str, str]:
    return {entry["type"]: entry["status"] for entry in status["conditions"]}


def test_pod_is_ready_only_if_sidecars_are_too() -> None:
    main = Container("m", RUNNING, ready=True)
    sidecar = Container("s", RUNNING, True)
    assert conditions(pod_status(situation(main, inits=(sidecar,)), {}, NOW))["Ready"] == "False"
    sidecar.ready = True
    assert conditions(pod_status(situation(main, inits=(sidecar,)), {}, NOW))["Ready"] == "True"


def test_failed_pod_says_why_and_is_not_ready() -> None:
    main = Container("m", RUNNING, ready=True)
    status = pod_status(situation(main, over=True, failure=("PodLost", "memory is gone")), {}, NOW)
    assert (status["reason"], status["message"]) == ("PodLost", "memory is gone")
    assert conditions(status)["Ready"] == "False"


def test_transition_time_moves_only_when_the_condition_does() -> None:
    earlier = "2026-01-01T00:00:00Z"
    main = Container("m", RUNNING)
    before = pod_status(situation(main), {}, earlier)
    main.ready = True
    after = pod_status(situation(main), before, NOW)
    times = {entry["type"]: entry["lastTransitionTime"] for entry in after["conditions"]}
    assert (times["Initialized"], times["Ready"]) == (earlier, NOW)


def test_conditions_of_others_stay() -> None:
    foreign = {"type": "DisruptionTarget", "status": "True"}
    status = pod_status(situation(Container("m", RUNNING)), {"conditions": [foreign]}, NOW)
    assert foreign in status["conditions"]


def test_same_situation_gives_the_same_status_again() -> None:
    facts = situation(Container("m", RUNNING, ready=True))
    once = pod_status(facts, {}, NOW)
    assert pod_status(facts, once, "2027-01-01T00:00:00Z") == once


def test_init_containers_are_reported_in_the_manifests_order() -> None:
    inits = (Container("b", ended(0), ready=True), Container("a", RUNNING, True), Container("c", WAITING))
    status = pod_status(situation(Container("m", WAITING), inits=inits, initialized=False), {}, NOW)
    assert [entry["name"] for entry in status["initContainerStatuses"]] == ["b", "a", "c"]
    assert "[c]" in next(entry["message"] for entry in status["conditions"] if entry["type"] == "Initialized")


def test_first_end_costs_nothing_and_every_further_one_twice_the_last_up_to_five_minutes() -> None:
    container = BackOff()
    assert [container.after(life=1.0) for _ in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]


def test_life_of_more_than_ten_minutes_makes_the_next_end_the_first_again() -> None:
    container = BackOff()
    assert [container.after(life) for life in (1, 1, 599, 601, 1)] == [0, 10, 20, 0, 10]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "500ms"), (10, "10s"), (40, "40s"), (80, "1m20s"), (160, "2m40s"), (300, "5m0s")],
)
def test_waits_are_written_as_kubelets_write_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text
