"""What the operator makes of the API's objects, its environment and its own status."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.crd.jobs import full_record
from tests.operator import kubelet_words
from tests.operator.world_in_memory import START, trained
from tiercheck.protocol.directive import HangLimits, HealthCheck
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_operator.config import Config
from tiercheck_operator.controller.attempt.readiness import add_summary
from tiercheck_operator.controller.reconciler import merge_patch
from tiercheck_operator.model import conditions
from tiercheck_operator.model.limits import LIMIT, bytes_of, fit_status, longest_cut
from tiercheck_operator.model.observed import ContainerState, ContainerView, PodView
from tiercheck_operator.model.parsing import parse_job, parse_node, parse_pod
from tiercheck_operator.model.saved_placement import (
    CodeGroup,
    Replanning,
    SavedMember,
    SavedPlacement,
    placement_data,
    read_placement_data,
)
from tiercheck_operator.model.spec import ExitCodes, FailureRule, RuleAction
from tiercheck_operator.model.status import (
    CheckpointRecord,
    Condition,
    Facts,
    FailedStartRecord,
    HangRecord,
    JobRecord,
    MemoryRecord,
    PlacementRecord,
    PlaceRecord,
    ProofRecord,
    Recovery,
    SizeRecord,
    SparesRecord,
    TierRecord,
    parse_record,
    parse_time,
    render_record,
    rfc3339,
)

LABELS = {"tiercheck.io/worker": "3", "tiercheck.io/job-uid": "u", "tiercheck.io/incarnation": "2"}


def pod(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    owned = {"labels": LABELS, "ownerReferences": kubelet_words.made_by("u")}
    return {"metadata": {"name": "p", "uid": "x", **owned, **metadata}, "spec": {}, "status": status or {}}


def view_of(raw: dict[str, Any]) -> PodView:
    found = parse_pod(raw)
    assert found is not None
    return found


def test_evicted_pod_tells_why_and_when() -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    deletion = {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}
    view = view_of(pod({"conditions": [target]}, **deletion))
    assert view.deleting
    assert view.disruption == "EvictionByEvictionAPI"
    assert view.deleted_at == parse_time("2026-01-01T00:00:00Z")


def test_unschedulable_pod_carries_the_schedulers_sentence() -> None:
    condition = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    view = view_of(pod({"conditions": [condition]}))
    assert view.message == "Unschedulable: 0/3 nodes are available"
    assert view.unschedulable_since == parse_time("2026-01-01T00:00:00Z")


def test_image_that_cannot_be_pulled_is_named() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    view = view_of(pod({"containerStatuses": [{"name": "trainer", "state": waiting}]}))
    assert view.message == "container trainer: ImagePullBackOff: Back-off pulling image"


@pytest.mark.parametrize("labels", [{}, {"tiercheck.io/worker": "x", "tiercheck.io/job-uid": "u"}])
def test_pod_of_nobody_is_ignored(labels: dict[str, str]) -> None:
    assert parse_pod({"metadata": {"labels": labels}}) is None


@pytest.mark.parametrize(
    ("node", "lost"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, False),
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "X"}]}}, True),
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, True),
        ({"spec": {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}}, True),
        ({"spec": {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}]}}, False),
        ({"spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}}, True),
        ({"spec": {"unschedulable": True}}, False),
        ({}, False),
    ],
)
def test_node_counts_as_lost_by_condition_or_taint_and_not_when_cordoned(
    node: dict[str, Any], lost: bool
) -> None:
    assert bool(parse_node({"metadata": {"name": "n"}, **node}).lost) is lost


def test_containers_last_end_is_read_whether_it_runs_again_or_not() -> None:
    end = {"terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-01T00:00:10Z"}}
    for state, status in (
        (ContainerState.STARTING, {"state": {"running": {}}, "lastState": end}),
        (ContainerState.ENDED, {"state": end, "lastState": {}}),
        (ContainerState.HELD_BACK, {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": end}),
    ):
        raw = pod({"containerStatuses": [{"name": "trainer", "restartCount": 2, **status}]})
        raw["spec"] = {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "64Gi"}}}]}
        view, ended = view_of(raw), parse_time("2026-01-01T00:00:10Z")
        assert view.trainer == ContainerView(2, "OOMKilled", ended, 137, "64Gi", state)
        assert view.trainer.oom_killed
        assert view.sidecar == ContainerView()


@pytest.mark.parametrize(
    ("status", "state", "restarting"),
    [
        (kubelet_words.not_made(), ContainerState.NOT_STARTED, False),
        (kubelet_words.not_made(reason="ImagePullBackOff"), ContainerState.NOT_STARTED, False),
        (kubelet_words.starting(5), ContainerState.STARTING, False),
        (kubelet_words.up(5), ContainerState.UP, False),
        (kubelet_words.ended(5), ContainerState.ENDED, True),
        (kubelet_words.held_back(5, 10), ContainerState.HELD_BACK, True),
        (kubelet_words.starting(5, restarts=1, last=kubelet_words.end(4)), ContainerState.STARTING, True),
        (kubelet_words.up(5, restarts=1, last=kubelet_words.end(4)), ContainerState.UP, False),
    ],
)
def test_sidecar_is_up_when_its_kubelet_says_started_and_not_when_it_says_running(
    status: dict[str, Any], state: ContainerState, restarting: bool
) -> None:
    view = kubelet_words.sidecar_view(status)
    assert (view.state, view.restarting) == (state, restarting)


@pytest.mark.parametrize("seconds", [10, 20, 40, 80, 160, 300])
def test_kubelets_word_for_how_long_it_waits_is_understood(seconds: int) -> None:
    view = kubelet_words.sidecar_view(kubelet_words.held_back(1_800_000_000, seconds))
    assert (view.back_off, view.ended_at) == (seconds, 1_800_000_000)


def test_trainer_that_its_pod_never_restarts_is_told_from_one_that_is_forgotten() -> None:
    assert kubelet_words.trainer_view(kubelet_words.ended(5, "trainer")).restartable
    assert not kubelet_words.trainer_view(kubelet_words.ended(5, "trainer"), policy="Never").restartable


def test_node_that_is_not_ready_is_told_from_one_that_an_admin_gave_up() -> None:
    unready = kubelet_words.node("n", {}, unready="Unknown", kubelet="v1.35.2")
    assert (bool(unready.lost), unready.out_of_service, unready.kubelet) == (True, False, "v1.35.2")
    assert kubelet_words.node("n", {}, out_of_service=True).out_of_service


def test_conditions_of_a_node_are_read_for_rules() -> None:
    told = [{"type": "Ready", "status": "True"}, {"type": "GpuEcc", "status": "False"}, {}]
    raw = {"metadata": {"name": "n"}, "status": {"conditions": told}}
    assert parse_node(raw).conditions == {"Ready": "True", "GpuEcc": "False"}


def test_what_the_user_says_about_failures_is_read() -> None:
    policy = {
        "maxRestarts": 3,
        "resetAfterSeconds": 60,
        "hang": {"mode": "Restart", "stepFactor": 5, "minSeconds": 7, "firstStepSeconds": 9},
        "healthCheck": {"command": ["sh", "-c", "true"], "timeoutSeconds": 8},
        "rules": [
            {"name": "a", "action": "Fail", "onExitCodes": {"operator": "NotIn", "values": [1, 2]}},
            {"name": "b", "action": "Restart", "onReasons": ["Hung"]},
            {"name": "c", "action": "RestartIgnoringLimit", "onNodeConditions": [{"type": "X"}]},
        ],
    }
    raw = {
        "metadata": {"name": "j", "namespace": "ns", "uid": "u"},
        "spec": {"workers": 1, "template": {}, "failurePolicy": policy, "activeDeadlineSeconds": 5},
    }
    spec = parse_job(raw).spec
    assert (spec.max_restarts, spec.reset_seconds, spec.active_deadline) == (3, 60.0, 5.0)
    assert spec.hang == HangLimits(5.0, 7.0, 9.0)
    assert spec.health_check == HealthCheck(("sh", "-c", "true"), 8.0)
    assert spec.rules == (
        FailureRule("a", RuleAction.FAIL, ExitCodes(frozenset({1, 2}), within=False)),
        FailureRule("b", RuleAction.RESTART, reasons=frozenset({"Hung"})),
        FailureRule("c", RuleAction.RESTART_IGNORING_LIMIT, node_conditions=(("X", "True"),)),
    )
    raw["spec"]["failurePolicy"] = {"hang": {"mode": "Off"}}  # type: ignore[index]
    assert (parse_job(raw).spec.hang, parse_job(raw).spec.health_check) == (None, None)


def test_status_means_the_same_after_a_round_trip() -> None:
    record = full_record()
    assert parse_record(render_record(record)) == record
    assert record.restored_version == Version(40, 1)


def anything(hint: Any) -> st.SearchStrategy[Any]:
    """Of a field of the status."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.none() | anything(inside[0])
    if origin is tuple:
        return st.lists(anything(inside[0]), max_size=2).map(tuple)
    if origin is Mapping:
        inner = st.integers() if inside[1] is Any else anything(inside[1])
        return st.dictionaries(st.sampled_from(["local", "peer"]), inner, min_size=1)
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: anything(inner) for name, inner in get_type_hints(hint).items()})
    return {bool: st.booleans(), int: st.integers(0, 2**53), float: st.floats(1, 4e9)}.get(
        hint, st.text("ab", min_size=1)
    )


@given(anything(JobRecord))
def test_status_that_was_read_back_is_written_as_it_was(record: JobRecord) -> None:
    raw = render_record(record)
    assert render_record(parse_record(raw)) == raw


MOMENTS = ("failed_at", "detected_at", "decided_at", "restored_at", "released_at", "noticed_at")


@given(st.lists(st.floats(1, 4e9), min_size=6, max_size=6), st.floats(1, 4e9))
def test_moments_survive_the_api_to_the_millisecond(times: list[float], room: float) -> None:
    written = dict(zip(MOMENTS, times, strict=True))
    record = JobRecord(recovery=Recovery("NodeLost", "m", **written), size=SizeRecord(3, room))  # type: ignore[arg-type]
    raw = render_record(record)
    spelled = [raw["recovery"][name] for name in ("failedAt", "detectedAt", "releasedAt")] + [
        raw["size"]["roomSince"]
    ]
    assert all(text.endswith("Z") for text in spelled)
    read = parse_record(raw)
    assert read.recovery is not None
    assert all(abs(getattr(read.recovery, name) - at) < 0.001 for name, at in written.items())
    assert parse_record(render_record(read)) == read


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("promised", [(), ("any one rack", "any one host")])
def test_what_a_placement_promises_is_kept_whether_it_is_true_yet_or_not(
    complete: bool, promised: tuple[str, ...]
) -> None:
    record = JobRecord(placement=PlacementRecord("h", "rack", promised, 0, complete=complete))
    raw = render_record(record)["placement"]
    assert raw["tolerates"] == (list(promised) if complete else [])
    assert raw.get("tolerance") == ((", ".join(promised) or "nothing") if complete else None)
    assert parse_record(render_record(record)) == record


def test_status_that_is_not_there_yet_is_a_new_job() -> None:
    assert parse_record({}) == JobRecord()


_JSON = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
_OBJECT = st.dictionaries(st.sampled_from("abcd"), _JSON, max_size=4)


def _apply(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7396."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            before = target.get(key)
            target[key] = _apply(before if isinstance(before, dict) else {}, value)
        else:
            target[key] = value
    return target


@given(old=_OBJECT, new=_OBJECT)
def test_merge_patch_turns_the_old_status_into_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert _apply(copy.deepcopy(old), merge_patch(old, new)) == new


def test_settings_come_from_the_environment() -> None:
    config = Config.from_env(
        {
            "TIERCHECK_NAMESPACES": "a, b",
            "TIERCHECK_METRICS_ADDRESS": "127.0.0.1:9999",
            "TIERCHECK_SETTLE_SECONDS": "0.5",
            "TIERCHECK_SIDECAR_IMAGE": "",
        }
    )
    assert config.namespaces == ("a", "b")
    assert (config.metrics_host, config.metrics_port) == ("127.0.0.1", 9999)
    assert config.patience.settle == 0.5
    assert config.patience.suspect == 10.0
    assert config.sidecar_image == Config().sidecar_image


@pytest.mark.parametrize(
    ("name", "value"), [("TIERCHECK_SETTLE_SECONDS", "soon"), ("TIERCHECK_METRICS_ADDRESS", "localhost")]
)
def test_setting_that_cannot_be_understood_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Config.from_env({name: value})


def test_a_tainted_node_is_not_cordoned_and_a_cordoned_one_is() -> None:
    """GPU nodes carry taints all their life; only `kubectl cordon` says that somebody means to empty one."""
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    tainted = parse_node({"metadata": {"name": "n"}, "spec": {"taints": [taint]}})
    assert (tainted.schedulable, tainted.cordoned) == (False, False)
    assert parse_node({"metadata": {"name": "n"}, "spec": {"unschedulable": True}}).cordoned


def test_device_that_its_kubelet_calls_unhealthy_is_named() -> None:
    devices = [{"resourceID": "gpu-6", "health": "Healthy"}]
    allocated = [{"name": "nvidia.com/gpu", "resources": devices}]
    raw = pod(
        {"containerStatuses": [{"name": "trainer"}, {"name": "x", "allocatedResourcesStatus": allocated}]}
    )
    assert view_of(raw).ill == ""
    devices.append({"resourceID": "gpu-7", "health": "Unhealthy"})
    assert view_of(raw).ill == "device gpu-7 (nvidia.com/gpu) is Unhealthy"


@pytest.mark.parametrize(
    ("phase", "ready", "anew"),
    [("Running", "False", True), ("Running", "True", False), ("Pending", "False", False)],
)
def test_pod_whose_sandbox_is_made_anew_is_told_from_one_that_starts(
    phase: str, ready: str, anew: bool
) -> None:
    conditions = [{"type": "PodReadyToStartContainers", "status": ready}]
    view = view_of(pod({"phase": phase, "conditions": conditions}))
    assert (view.remade_since is not None) is anew


# A placement is read back as it was written.


MOVING = SavedPlacement(
    3,
    (SavedMember(0, "j-0-0", "u0", 0, "n0", (2, 1)), SavedMember(1, "j-1-2", "u1", 2, "n1", (0,))),
    leaving=((0, (1,)),),
    replanning=Replanning("c", "w", 17.5, 4.0),
)


@pytest.mark.parametrize(
    "placement", [MOVING, SavedPlacement(1, MOVING.members[1:], groups=(CodeGroup((0, 1), (2,)),))]
)
def test_it_is_read_as_it_was_written(placement: SavedPlacement) -> None:
    assert read_placement_data(placement_data(placement)) == placement


def test_one_from_before_copies_could_move_is_read_as_one_that_stands_still() -> None:
    data = placement_data(MOVING)
    old = {key: data[key] for key in ("attempt", "workers", "groups")}
    assert read_placement_data(old) == SavedPlacement(3, MOVING.members)


def test_holders_that_leave_are_not_the_lasting_ones() -> None:
    assert MOVING.holders() == {0: (2, 1), 1: (0,)}
    assert MOVING.lasting() == {0: (2,), 1: (0,)}


@pytest.mark.parametrize("broken", ["{", "[1]", '{"since": "soon"}'])
def test_what_is_no_placement_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="not a placement"):
        read_placement_data({**placement_data(MOVING), "replanning": broken})


# A status never outgrows its object, and what decisions rest on is never cut.


TYPES = [
    conditions.PLACED, conditions.PROTECTED, conditions.RESTORING, conditions.RUNNING, conditions.SUSPENDED,
    conditions.COMPLETED, conditions.FAILED, conditions.DELTAS_ACTIVE, conditions.SPARES_READY,
    conditions.EVICTABLE,
    conditions.THROTTLED, conditions.REMOTE_SAFE,
    "Another",
]  # fmt: skip
BIG = 2**31 - 1


def worst(letter: str = "\N{GREEK SMALL LETTER OMEGA}") -> JobRecord:
    """A job of 10,000 workers with every field at its limit at once."""
    summary = {
        "attempt": BIG, "cause": "C" * 64, "message": letter * 1000, "rule": "r" * 63,
        "reason": letter * 1000,
        "tiers": {"local": 640_000, "peer": 640_000, "remote": 640_000}, "deltas": BIG, "rebuilt": 640_000,
        "step": BIG,
        "lostSteps": BIG, "detectSeconds": 123456.789, "restoreSeconds": 123456.789,
        "totalSeconds": 123456.789,
        "time": rfc3339(START),
    }  # fmt: skip
    history: tuple[object, ...] = ()
    for _ in range(20):
        history = add_summary(history, summary)  # type: ignore[arg-type, assignment]
    tier = TierRecord(BIG, rfc3339(START), BIG)
    return JobRecord(
        observed_generation=BIG, attempt=BIG, phase="Restoring", members="m" * 64, sidecar_image="i" * 1024,
        history=History(tuple(Branch(BIG + n, BIG + n) for n in range(100))),
        crashes=BIG, counted=BIG, crash_step=BIG, disruptions=BIG, step=BIG, step_seconds=123456.789012,
        tiers=dict.fromkeys(("local", "peer", "remote"), tier),
        proofs=dict.fromkeys(("local", "peer", "remote"), ProofRecord(BIG, rfc3339(START))),
        placement=PlacementRecord("h" * 64, "l" * 32, tuple("t" * 40 for _ in range(16)), 10_000, "u" * 512),
        spares=SparesRecord(256, 256), checkpoint=CheckpointRecord(BIG, "EveryStep", letter * 1000),
        memory=MemoryRecord(*[2**60] * 4), hang=HangRecord(9999, "n" * 253, BIG),
        places=tuple(PlaceRecord("n" * 253, BIG, letter * 300, START, START) for _ in range(8)),
        failed_start=FailedStartRecord(9999, "n" * 253, BIG, (9999,) * 32),
        recovery=Recovery(
            "C" * 64, letter * 1000, START, START, BIG, letter * 1000, BIG, BIG, BIG, START, START, START,
            tuple(Version(BIG, BIG) for _ in range(16)),
            Facts(255, tuple("R" * 64 for _ in range(16)), tuple("n" * 63 for _ in range(16))), "r" * 63, BIG,
            BIG, START, undone=True,
        ),
        last_recovery=summary, recoveries=history,  # type: ignore[arg-type]
        started=rfc3339(START), completed=rfc3339(START),
        conditions=tuple(Condition(kind, True, "R" * 24, letter * 4000, rfc3339(START),
            BIG) for kind in TYPES),
    )  # fmt: skip


def test_worst_case_of_every_field_fits_and_keeps_what_decisions_rest_on() -> None:
    for letter in ("x", "\N{GREEK SMALL LETTER OMEGA}"):
        before = worst(letter)
        assert bytes_of(render_record(before)) > 3 * LIMIT
        after, raw = fit_status(before)
        assert bytes_of(raw) <= LIMIT
        assert parse_record(render_record(after)) == parse_record(
            json.loads(json.dumps(render_record(after)))
        )
        assert after.history == before.history
        assert before.recovery is not None
        assert after.recovery is not None
        sentences = {"message": "", "reason": ""}
        assert dataclasses.replace(after.recovery, **sentences) == dataclasses.replace(
            before.recovery, **sentences
        )
        assert [(c.type, c.status, c.reason) for c in after.conditions] == [
            (c.type, c.status, c.reason) for c in before.conditions
        ]
        assert all(len(c.message) >= 40 for c in after.conditions)
        assert after.last_recovery is not None


def test_one_long_message_is_left_whole_and_a_usual_status_is_not_touched() -> None:
    world = trained(0)
    assert fit_status(world.status)[0] == world.status
    long = Condition(conditions.PLACED, False, "R", "m" * 4000, rfc3339(START))
    record = dataclasses.replace(world.status, conditions=(long, *world.status.conditions[1:]))
    assert fit_status(record)[0] == record


def test_what_was_bounded_is_not_cut_again() -> None:
    once, _ = fit_status(worst())
    assert fit_status(once)[0] == once


@given(st.lists(st.integers(0, 5000), max_size=16), st.integers(0, 20_000))
def test_room_is_shared_so_that_only_the_long_ones_give_way(lengths: list[int], total: int) -> None:
    most = longest_cut(lengths, total)
    assert sum(min(length, most) for length in lengths) <= total or sum(lengths) <= total
    if sum(lengths) > total:
        assert sum(min(length, most + 1) for length in lengths) > total
    else:
        assert all(length <= most for length in lengths)


def test_every_condition_tells_which_generation_of_the_spec_it_is_about() -> None:
    world = trained(0)
    world.job = dataclasses.replace(world.job, generation=7)
    world.tick()
    assert {entry.observed_generation for entry in world.status.conditions} == {7}
