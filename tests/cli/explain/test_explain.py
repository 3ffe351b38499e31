"""`explain` says why the last recovery took what it took, and what the next one would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli import recorded
from tests.cli.shown import FakeCluster, matches, rendered
from tiercheck.protocol.directive import Tier
from tiercheck_cli.events import recoveries
from tiercheck_cli.explain.command import what_if_screen, why_screen
from tiercheck_cli.explain.what_if import Estimate, WhatIf, answer, held_steps, losses
from tiercheck_cli.failure import CannotDo
from tiercheck_cli.layout import RACK_LABEL, layout_of, made_up_nodes, plan_layout, read_job
from tiercheck_cli.simulate.scenario import RecoveryTimes, measure, measured_recoveries

EXAMPLES = Path(__file__).parents[3] / "examples"


def answers(*asked: str, job: dict[str, Any] | None = None) -> list[WhatIf]:
    job = job or recorded.job()
    layout = layout_of(FakeCluster(), job)
    pods = {
        pod["metadata"]["name"]: int(pod["metadata"]["labels"]["tiercheck.io/worker"])
        for pod in recorded.pods()
    }
    found, state = losses(asked, layout, pods), held_steps(layout, job)
    return [answer(loss, layout, state, job) for loss in found]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_why_the_last_recovery_took_that_version_from_there(width: int) -> None:
    job = recorded.job()
    shown = rendered(why_screen(job, recoveries(job), recorded.NOW, width), width)
    assert max(map(len, shown.splitlines())) <= width
    matches(f"explain-{width}", shown)


def test_a_job_that_never_had_to_come_back_says_so() -> None:
    job = recorded.job()
    del job["status"]["lastRecovery"]
    assert "has not had to come back from anything" in rendered(
        why_screen(job, recoveries(job), recorded.NOW, 80), 80
    )


def test_a_recovery_under_way_is_told_before_the_last_one() -> None:
    job = recorded.job()
    job["status"]["recovery"] = {
        "cause": "PodEvicted",
        "message": "pod gpt-large-1-0 was evicted",
        "failedAt": recorded.at(12),
    }
    shown = rendered(why_screen(job, recoveries(job), recorded.NOW, 80), 80)
    assert shown.startswith(
        "team-a/gpt-large is on its way back now, for 12s\n  what failed   pod gpt-large-1-0 was evicted"
    )


def test_all_recoveries_that_the_status_keeps_are_known_newest_first() -> None:
    job = recorded.job()
    job["status"]["recoveries"] = [
        recorded.recovery(2, "TrainerCrash", 9000),
        recorded.recovery(3, "PodEvicted", 5000),
    ]
    assert [entry.attempt for entry in recoveries(job)] == [5, 3, 2]


def test_a_lost_rack_comes_from_peers_and_loses_what_they_lag_behind() -> None:
    (found,) = answers("rack=rack-1")
    assert found.resume_point.farthest is Tier.PEER
    assert (found.resume_point.step, found.lost_steps) == (12479, 1)
    assert found.peers == {1: (0,), 5: (4,)}
    time = found.without_training
    assert (time.measured, time.source) == (True, "as after NodeLost in attempt 5")
    assert time.seconds == pytest.approx(47.3 - 1.91)  # the first step is training


@pytest.mark.parametrize("asked", ["worker=2", "pod=gpt-large-2-1", "node=node-2", "host=node-2"])
def test_a_worker_can_be_named_by_its_pod_and_by_its_node(asked: str) -> None:
    (found,) = answers(asked)
    assert found.loss.workers == {2}


@pytest.mark.parametrize("asked", ["rack=rack-1", "rack=zone-a/rack-1"])
def test_a_domain_can_be_named_by_its_path_and_by_its_last_part(asked: str) -> None:
    (found,) = answers(asked)
    assert found.loss.name == "rack rack-1"
    assert found.loss.workers == {1, 5}


def test_domains_of_one_name_are_told_apart_by_their_paths() -> None:
    nodes = made_up_nodes("2x2x2")
    alike = tuple(
        replace(node, labels={**node.labels, RACK_LABEL: f"rack-{index // 2 % 2}"})
        for index, node in enumerate(nodes.nodes)
    )
    layout = plan_layout(read_job(str(EXAMPLES / "realistic.yaml")), replace(nodes, nodes=alike))
    paths = ["zone-0/rack-0", "zone-0/rack-1", "zone-1/rack-0", "zone-1/rack-1"]
    assert [loss.name for loss in losses(["rack"], layout)] == [f"rack {path}" for path in paths]
    with pytest.raises(CannotDo, match=r"several .*: zone-0/rack-1, zone-1/rack-1"):
        losses(["rack=rack-1"], layout)


def test_a_worker_and_its_only_holder_at_once_need_the_remote_tier() -> None:
    (found,) = answers("node=node-0", "worker=1")
    assert found.resume_point.farthest is Tier.REMOTE
    assert (found.resume_point.step, found.lost_steps) == (12000, 480)
    assert found.loss.name == "node node-0 and worker 1"


def test_without_anything_in_the_remote_tier_that_would_be_the_end() -> None:
    job = recorded.job()
    del job["status"]["tiers"]["remote"]
    (found,) = answers("zone=zone-a", job=job)
    assert found.resume_point.farthest is None
    shown = rendered(what_if_screen([found], layout_of(FakeCluster(), job)), 80)
    assert "back to    the beginning" in shown
    assert "12480 steps" in shown


def test_a_crash_costs_no_step() -> None:
    (found,) = answers("crash")
    assert (found.resume_point.farthest, found.lost_steps) == (Tier.LOCAL, 0)


NEVER = {"recovery": {"inProcess": "Never"}}
CHECKED = {"failurePolicy": {"healthCheck": {"command": ["true"]}}}
TODAY = recorded.condition("InProcess", "False", "ProcessesRestart", "worker 3: its loop is today's", 9)


@pytest.mark.parametrize(
    ("asked", "spec", "in_process", "processes"),
    [
        ("crash", {}, None, "63 stay, 1 starts anew"),
        ("crash", CHECKED, None, "56 stay, 8 start anew"),
        ("worker=2", {}, None, "56 stay, 8 start anew"),
        ("rack=rack-1", {}, None, "48 stay, 16 start anew"),
        ("all", {}, None, "all 64 start anew"),
        ("crash", NEVER, None, "all 64 start anew: spec.recovery.inProcess is Never"),
        ("worker=2", {}, TODAY, "all 64 start anew: worker 3: its loop is today's"),
        ("crash", {}, {}, "all 64 start anew: not every rank has made a step yet"),
    ],
)
def test_which_processes_stay_is_foretold_for_each_loss(
    asked: str, spec: dict[str, Any], in_process: dict[str, Any] | None, processes: str
) -> None:
    job = recorded.job()
    job["spec"] |= spec
    if in_process is not None:
        known = [each for each in job["status"]["conditions"] if each["type"] != "InProcess"]
        job["status"]["conditions"] = [*known, *filter(None, [in_process])]
    (found,) = answers(asked, job=job)
    assert str(found.processes) == processes
    shown = rendered(what_if_screen([found], layout_of(FakeCluster(), job)), 120)
    assert f"processes    {processes}" in shown


def test_where_nothing_is_left_to_go_on_from_no_process_stays() -> None:
    job = recorded.job()
    del job["status"]["tiers"]["remote"]
    (found,) = answers("zone=zone-a", job=job)
    assert str(found.processes) == "all 64 start anew: there is no version to go on from"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("asked", ["rack=rack-1", "zone", "all"])
def test_what_if_on_the_screen(asked: str, width: int) -> None:
    layout = layout_of(FakeCluster(), recorded.job())
    matches(
        f"explain-if-{asked.replace('=', '-')}-{width}",
        rendered(what_if_screen(answers(asked), layout), width),
    )


def test_a_job_that_is_only_a_file_is_asked_about_in_the_midst_of_its_life() -> None:
    layout = plan_layout(read_job(str(EXAMPLES / "parity.yaml")), made_up_nodes("4x4"))
    state = held_steps(layout, None)
    found = [answer(loss, layout, state) for loss in losses(["rack"], layout)]
    assert {entry.resume_point.farthest for entry in found} == {Tier.PEER}
    matches("explain-if-planned", rendered(what_if_screen(found, layout), 80))
    (one,) = losses(["rack=rack-2"], layout)
    assert "rebuilt from" in rendered(what_if_screen([answer(one, layout, state)], layout), 80)


# How long it would take.


def timed(*entries: tuple[str, str, float, float, float], **spec: Any) -> dict[str, Any]:
    """The job after these recoveries, newest first: cause, farthest tier, and seconds of their three parts up
    to the first step's beginning."""
    job = recorded.job()
    del job["status"]["lastRecovery"]
    job["spec"] |= spec
    job["status"]["progress"]["stepSeconds"] = 2.0
    job["status"]["recoveries"] = [
        {
            "attempt": len(entries) - index + 1, "cause": cause, "tiers": {"local": 3, tier: 1},
            "detectSeconds": detect, "restoreSeconds": restore,
            "totalSeconds": detect + restore + start + 2.0,
        }
        for index, (cause, tier, detect, restore, start) in enumerate(entries)
    ]  # fmt: skip
    return job


SMALL = {"checkpoint": {"stateSize": "1"}}
WITH_SPARES = {**SMALL, "spares": 8}


@pytest.mark.parametrize("asked", ["crash", "worker=2", "node=node-2", "rack=rack-1", "zone=zone-a", "all"])
@pytest.mark.parametrize("spec", [SMALL, WITH_SPARES])
def test_job_that_never_came_back_gets_a_guess_of_what_real_recoveries_take_and_is_told_so(
    asked: str, spec: dict[str, Any]
) -> None:
    """It said 5m45s where 15 to 60 s were measured."""
    (found,) = answers(asked, job=timed(**spec))
    assert 15 <= found.without_training.seconds <= 60
    assert not found.without_training.measured
    assert found.without_training.source.startswith("a guess")


def test_a_spare_saves_the_wait_for_a_pod() -> None:
    anew, spared = (answers("worker=2", job=timed(**spec))[0] for spec in (SMALL, WITH_SPARES))
    assert spared.without_training.seconds < anew.without_training.seconds


def test_recoveries_of_the_same_kind_answer_as_a_simulation_takes_them() -> None:
    job = timed(
        ("PodDeleted", "peer", 1, 9, 20), ("PodEvicted", "peer", 3, 13, 24),
        ("NodeSilent", "peer", 8, 10, 22),
        ("TrainerCrash", "local", 0, 2, 15), ("AllPodsLost", "remote", 1, 30, 30),
    )  # fmt: skip
    pod, node, crash, everything = (
        answers(asked, job=job)[0].without_training for asked in ("worker=2", "node=node-2", "crash", "all")
    )
    assert (pod.seconds, pod.source) == (35, "by the means of its last 3 recoveries like that")
    assert node == Estimate(40, True, pod.source)
    assert crash == Estimate(17, True, "as after TrainerCrash in attempt 3")
    assert everything.source == "as after AllPodsLost in attempt 2"
    assert everything.seconds == pytest.approx(61, abs=0.1)
    simulated = measure(measured_recoveries([job]), RecoveryTimes()).times.of("node")
    assert node.seconds == pytest.approx(
        simulated.detect + simulated.replace + simulated.restore.peer + simulated.restart
    )


def test_what_never_happened_is_put_together_from_the_parts_of_what_did() -> None:
    """Its script takes two minutes to its first step, whatever it comes back from."""
    job = timed(("TrainerCrash", "local", 0, 2, 120), ("OOMKilled", "local", 0, 2, 122), **SMALL)
    time = answers("worker=2", job=job)[0].without_training
    assert 121 < time.seconds < 150
    assert (time.measured, time.source) == (
        False,
        "an estimate from the parts of its last 2 recoveries, none of which was like that",
    )


def test_resuming_a_job_says_nothing_about_how_fast_a_loss_is_noticed() -> None:
    time = answers("worker=2", job=timed(("Resumed", "remote", 0, 500, 20), **SMALL))[0].without_training
    assert time.seconds < 60


def test_state_that_is_large_takes_its_time_on_the_way() -> None:
    small, large = (
        answers("all", job=timed(checkpoint={"stateSize": size}))[0].without_training.seconds
        for size in ("1", "5000Mi")
    )
    assert large == pytest.approx(small + 8 * 5000 / 200, abs=0.1)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ("rack=r9", 'the job has no rack "r9": rack-0, rack-1, rack-2, rack-3'),
        ("worker=8", 'the job has no worker "8": 0, 1, 2, 3, 4, 5, 6, 7'),
        ("worker=x", 'the job has no worker "x"'),
        ("node=node-77", 'the job has no node "node-77": node-0, node-1'),
        ("pod=gpt-large-2-0", 'the job has no pod "gpt-large-2-0": gpt-large-0-0'),
        (
            "lunch",
            '"lunch" is nothing that can be lost: say zone=NAME, rack=NAME, host=NAME, node=NAME, pod=NAME',
        ),
        ("lunch=3", '"lunch=3" is nothing that can be lost'),
    ],
)
def test_what_cannot_be_lost_is_refused_with_what_can(asked: str, complaint: str) -> None:
    with pytest.raises(CannotDo, match=complaint) as refusal:
        answers(asked)
    assert refusal.value.status == 2
