"""`explain` says why the last recovery took what it took, and what the next one would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli import recorded
from tests.cli.shown import FakeCluster, matches, rendered
from tiercheck.protocol.directive import Tier
from tiercheck_cli.events import PastRecovery, recoveries
from tiercheck_cli.explain.command import what_if_screen, why_screen
from tiercheck_cli.explain.what_if import (
    AssumedFailure,
    Estimate,
    WhatIf,
    answer,
    estimate,
    held_steps,
    losses,
)
from tiercheck_cli.failure import CannotDo
from tiercheck_cli.layout import layout_of, made_up_nodes, plan_layout, read_job

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
    assert found.comeback.farthest is Tier.PEER
    assert (found.comeback.step, found.lost_steps) == (12479, 1)
    assert found.from_whom == {1: (0,), 5: (4,)}
    assert found.without_training == Estimate(47.3, True, "as after NodeLost in attempt 5")


@pytest.mark.parametrize("asked", ["worker=2", "pod=gpt-large-2-1", "node=node-2", "host=node-2"])
def test_a_worker_can_be_named_by_its_pod_and_by_its_node(asked: str) -> None:
    (found,) = answers(asked)
    assert found.loss.workers == {2}


def test_a_worker_and_its_only_holder_at_once_need_the_remote_tier() -> None:
    (found,) = answers("node=node-0", "worker=1")
    assert found.comeback.farthest is Tier.REMOTE
    assert (found.comeback.step, found.lost_steps) == (12000, 480)
    assert found.loss.name == "node node-0 and worker 1"


def test_without_anything_in_the_remote_tier_that_would_be_the_end() -> None:
    job = recorded.job()
    del job["status"]["tiers"]["remote"]
    (found,) = answers("zone=zone-a", job=job)
    assert found.comeback.farthest is None
    shown = rendered(what_if_screen([found], layout_of(FakeCluster(), job)), 80)
    assert "back to    the beginning" in shown
    assert "12480 steps" in shown


def test_a_crash_costs_no_step() -> None:
    (found,) = answers("crash")
    assert (found.comeback.farthest, found.lost_steps) == (Tier.LOCAL, 0)


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
    assert {entry.comeback.farthest for entry in found} == {Tier.PEER}
    matches("explain-if-planned", rendered(what_if_screen(found, layout), 80))
    (one,) = losses(["rack=rack-2"], layout)
    assert "rebuilt from" in rendered(what_if_screen([answer(one, layout, state)], layout), 80)


# How long it would take.


def past(*entries: tuple[str, str, float, float, float]) -> tuple[PastRecovery, ...]:
    """Recoveries, newest first: cause, farthest tier, and seconds of their three parts."""
    return tuple(
        PastRecovery(
            attempt=len(entries) - index + 1,
            cause=cause,
            message="",
            reason="",
            step=10,
            lost_steps=0,
            tiers={"local": 3, tier: 1},
            deltas=0,
            rebuilt=0,
            detect=detect,
            restore=restore,
            total=detect + restore + start,
            ended=None,
        )
        for index, (cause, tier, detect, restore, start) in enumerate(entries)
    )


@pytest.mark.parametrize("farthest", [None, Tier.LOCAL, Tier.PEER, Tier.REMOTE])
@pytest.mark.parametrize("pods_lost", [True, False])
@pytest.mark.parametrize("spare", [True, False])
def test_job_that_never_came_back_gets_a_guess_of_what_real_recoveries_take_and_is_told_so(
    farthest: Tier | None, pods_lost: bool, spare: bool
) -> None:
    """It said 5m45s where 15 to 60 s were measured."""
    found = estimate((), AssumedFailure(farthest, pods_lost, spare))
    assert 15 <= found.seconds <= 60
    assert not found.measured
    assert found.source.startswith("a guess")


def test_recoveries_of_the_same_kind_answer_by_their_median() -> None:
    known = past(
        ("PodDeleted", "peer", 1, 9, 20), ("NodeSilent", "peer", 8, 10, 22),
        ("PodEvicted", "peer", 1, 60, 29),
        ("TrainerCrash", "local", 0, 2, 15), ("AllPodsLost", "remote", 1, 30, 30),
    )  # fmt: skip
    assert estimate(known, AssumedFailure(Tier.PEER, pods_lost=True)) == Estimate(
        40, True, "the median of its last 3 recoveries like that"
    )
    assert estimate(known, AssumedFailure(Tier.LOCAL, pods_lost=False)).seconds == 17
    assert (
        estimate(known, AssumedFailure(Tier.REMOTE, pods_lost=True)).source
        == "as after AllPodsLost in attempt 2"
    )


def test_what_never_happened_is_put_together_from_the_parts_of_what_did() -> None:
    """Its script takes two minutes to its first step, whatever it comes back from."""
    known = past(("TrainerCrash", "local", 0, 2, 120), ("OOMKilled", "local", 0, 2, 122))
    found = estimate(known, AssumedFailure(Tier.PEER, pods_lost=True))
    assert 121 < found.seconds < 150
    assert (found.measured, found.source) == (
        False,
        "an estimate from the parts of its last 2 recoveries, none of which was like that",
    )


def test_resuming_a_job_says_nothing_about_how_fast_a_loss_is_noticed() -> None:
    known = past(("Resumed", "remote", 0, 500, 20))
    assert estimate(known, AssumedFailure(Tier.PEER, pods_lost=True)).seconds < 60
    assert estimate(known, AssumedFailure(Tier.REMOTE, pods_lost=True)).seconds > 500


def test_state_that_is_large_takes_its_time_on_the_way() -> None:
    small, large = (
        estimate((), AssumedFailure(Tier.REMOTE, True, carry_seconds=seconds)).seconds for seconds in (0, 200)
    )
    assert large == small + 200


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ("rack=r9", 'no worker is in a rack "r9": there are rack-0, rack-1, rack-2, rack-3'),
        ("worker=8", "there is no worker 8: workers are 0 to 7"),
        ("worker=x", "there is no worker x"),
        ("node=node-77", 'no worker is on a node "node-77"; see: tiercheck plan gpt-large'),
        ("pod=gpt-large-2-0", 'the job has no pod "gpt-large-2-0"'),
        ("lunch", '"lunch" is nothing that can be lost'),
    ],
)
def test_what_cannot_be_lost_is_refused_with_what_can(asked: str, complaint: str) -> None:
    with pytest.raises(CannotDo, match=complaint) as refusal:
        answers(asked)
    assert refusal.value.status == 2
