"""A container finds the environment, the paths and the volumes that a kubelet would give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck_local.node.environment import (
    BadReference,
    PathTranslation,
    PodFacts,
    Roots,
    command_line,
    environment,
    expand,
)
from tiercheck_local.node.process import BackOff, go_duration
from tiercheck_local.node.status import PodSituation, pod_status

POD = {
    "metadata": {
        "name": "w-0", "namespace": "team", "uid": "u-1",
        "labels": {"tiercheck.io/worker": "3"}, "annotations": {"note": "n"},
    },
    "spec": {},
}  # fmt: skip
FACTS = PodFacts(POD, "node-1", "127.9.1.2", "127.9.1.1", {"cpu": "64", "memory": "8Gi"})
STORED = {("Secret", "s"): {"token": b"t"}, ("ConfigMap", "c"): {"A": b"1", "B": b"2"}}


def lookup(kind: str, name: str) -> Mapping[str, bytes] | None:
    return STORED.get((kind, name))


def value_from(source: dict[str, Any], container: dict[str, Any] | None = None) -> str | None:
    spec = {**(container or {}), "env": [{"name": "X", "valueFrom": source}]}
    return environment(spec, FACTS, lookup).get("X")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.name", "w-0"),
        ("metadata.namespace", "team"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['tiercheck.io/worker']", "3"),
        ("metadata.annotations['note']", "n"),
        ("metadata.labels['absent']", ""),
        ("spec.nodeName", "node-1"),
        ("status.podIP", "127.9.1.2"),
        ("status.hostIP", "127.9.1.1"),
    ],
)
def test_field_of_the_pod(path: str, expected: str) -> None:
    assert value_from({"fieldRef": {"fieldPath": path}}) == expected


def test_keys_of_secret_and_config_map() -> None:
    assert value_from({"secretKeyRef": {"name": "s", "key": "token"}}) == "t"
    assert value_from({"configMapKeyRef": {"name": "c", "key": "B"}}) == "2"


def test_missing_optional_reference_leaves_the_variable_out() -> None:
    assert value_from({"secretKeyRef": {"name": "absent", "key": "k", "optional": True}}) is None
    assert value_from({"secretKeyRef": {"name": "s", "key": "absent", "optional": True}}) is None


@pytest.mark.parametrize(
    "source",
    [
        {"secretKeyRef": {"name": "absent", "key": "k"}},
        {"configMapKeyRef": {"name": "c", "key": "absent"}},
        {"fieldRef": {"fieldPath": "spec.nonsense"}},
    ],
)
def test_missing_reference_is_an_error_that_names_it(source: dict[str, Any]) -> None:
    with pytest.raises(BadReference, match=r"absent|nonsense"):
        value_from(source)


def test_limits_are_numbers_and_fall_back_to_the_node() -> None:
    container = {"resources": {"limits": {"memory": "1Gi", "cpu": "1500m"}}}
    assert value_from({"resourceFieldRef": {"resource": "limits.memory"}}, container) == str(1024**3)
    assert (
        value_from({"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}, container) == "1024"
    )
    assert value_from({"resourceFieldRef": {"resource": "limits.cpu"}}, container) == "2"
    assert value_from({"resourceFieldRef": {"resource": "limits.memory"}}) == str(8 * 1024**3)


def test_env_overrides_env_from_and_refers_to_it() -> None:
    container = {
        "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "P_"}],
        "env": [{"name": "P_A", "value": "x"}, {"name": "Y", "value": "$(P_A)-$(P_B)-$(NONE)-$$(P_A)"}],
    }
    assert environment(container, FACTS, lookup) == {"P_A": "x", "P_B": "2", "Y": "x-2-$(NONE)-$(P_A)"}


def test_command_needs_no_image_but_must_be_there() -> None:
    assert command_line({"command": ["sh"], "args": ["-c", "$(A)"]}, {"A": "1"}) == ["sh", "-c", "1"]
    with pytest.raises(BadReference, match="needs a command"):
        command_line({"args": ["x"]}, {})


def test_expansion_leaves_shell_syntax_alone() -> None:
    assert expand("${HOME} $HOME $(HOME)", {"HOME": "/h"}) == "${HOME} $HOME /h"


MOUNTS = {
    "/tiercheck/memory": "/dev/shm/p",
    "/tiercheck/run": "/tmp/r",
    "/data": "/host/d",
    "/data/sub": "/host/s",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/tiercheck/memory", "/dev/shm/p"),
        ("/tiercheck/memory/slot-0", "/dev/shm/p/slot-0"),
        ("--directory=/data", "--directory=/host/d"),
        ("/tiercheck/run:/opt/lib:/data/x", "/tmp/r:/opt/lib:/host/d/x"),
        ("echo x > /data/out; cat '/data/out'", "echo x > /host/d/out; cat '/host/d/out'"),
        ("file:///data/x", "file:///host/d/x"),
        ('{"path":"/data"}', '{"path":"/host/d"}'),
        ("/data/sub/y /data/subway", "/host/s/y /host/d/subway"),
        ("see /data.", "see /host/d."),
    ],
)
def test_mount_path_is_replaced_wherever_it_begins_a_path(text: str, expected: str) -> None:
    assert PathTranslation(MOUNTS)(text) == expected


@pytest.mark.parametrize(
    "text", ["/database", "/srv/data", "/data-2", "/data.bak", "./data", "data", "~/data", "/tiercheck"]
)
def test_what_only_looks_like_a_mount_path_stays(text: str) -> None:
    assert PathTranslation(MOUNTS)(text) == text


def test_without_mounts_nothing_changes() -> None:
    assert PathTranslation({})("/data") == "/data"


@given(st.text(alphabet="ab/:=. -", max_size=40))
def test_text_without_mount_path_is_unchanged(text: str) -> None:
    assert PathTranslation({"/mnt/volume": "/host"})(text) == text


segment = st.text(alphabet="abcxyz0", min_size=1, max_size=6)


@given(st.lists(st.lists(segment, max_size=3), min_size=1, max_size=4))
def test_every_entry_of_a_path_list_is_translated(tails: list[list[str]]) -> None:
    def joined(root: str) -> str:
        return ":".join("/".join([root, *tail]) for tail in tails)

    assert PathTranslation({"/mnt/v": "/host/v"})(joined("/mnt/v")) == joined("/host/v")


@given(st.dictionaries(segment.map("/m/{}".format), segment.map("/m/{}".format), min_size=1, max_size=4))
def test_result_is_not_translated_again(mounts: dict[str, str]) -> None:
    translate = PathTranslation(mounts)
    assert all(translate(path) == host for path, host in mounts.items())


def roots(tmp_path: Path, node: str) -> Roots:
    return Roots(memory=tmp_path / node, scratch=tmp_path / "scratch" / node, claims=tmp_path / "claims")


def test_node_memory_is_each_nodes_own_and_gone_when_it_is_killed(tmp_path: Path) -> None:
    one, other = roots(tmp_path, "one"), roots(tmp_path, "other")
    for path in (Path("/dev/shm/tiercheck/job"), Path("/run/tiercheck/job")):
        assert one.on_node(path) != other.on_node(path)
        assert one.on_node(path).is_relative_to(one.memory)
        one.on_node(path).mkdir(parents=True)
    one.remove_all()
    assert not one.on_node(Path("/run/tiercheck/job")).exists()


def test_node_memory_outlives_the_pods_of_a_node(tmp_path: Path) -> None:
    node = roots(tmp_path, "one")
    folder = node.on_node(Path("/dev/shm/tiercheck/job"))
    folder.mkdir(parents=True)
    node.remove("0b0e1b9e-6ad5-4a43-9d0c-6b2c4d9f7a10")
    assert folder.exists()


def test_any_other_host_path_is_the_machines(tmp_path: Path) -> None:
    node = roots(tmp_path, "one")
    for path in (tmp_path / "store", Path("/srv/data"), Path("/dev/shmx"), Path("/running")):
        assert node.on_node(path) == path


# A pod has the status that its containers give it, and they start again as a kubelet would do it.

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
