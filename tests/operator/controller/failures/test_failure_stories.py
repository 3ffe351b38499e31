"""Every class of failure has a name, a cost and a user's rule, by the pure decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.directive import DeltaMode, HangLimits
from tiercheck.protocol.report import Exact, RankFailure, ResumeProof, TrainerState
from tiercheck_operator.controller.failures.exits import first_match
from tiercheck_operator.controller.failures.trigger import update_recovery
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.model.observed import ContainerView
from tiercheck_operator.model.serialization import from_api
from tiercheck_operator.model.spec import ExitCodes, FailureRule, RuleAction
from tiercheck_operator.model.status import Facts, Recovery


def on_codes(name: str, action: str, *values: int, operator: str = "In") -> dict[str, Any]:
    return {"name": name, "action": action, "onExitCodes": {"operator": operator, "values": list(values)}}


def on_reasons(name: str, action: str, *reasons: str) -> dict[str, Any]:
    return {"name": name, "action": action, "onReasons": list(reasons)}


def rules(*raw: dict[str, Any]) -> tuple[FailureRule, ...]:
    return tuple(from_api(FailureRule, entry) for entry in raw)


# The user's rules.


def test_exit_code_that_a_rule_calls_final_fails_the_job_at_once_and_names_the_rule() -> None:
    world = trained(rules=rules(on_codes("bad-data", "Fail", 42)))
    world.crash(1, code=42)
    world.until("Failed")
    world.assert_told("Failed", "FailurePolicyRule", "bad-data", "exit code 42")
    assert world.status.attempt == 1, "no attempt was spent on it"


def test_restart_that_ignores_the_limit_is_not_counted_however_often_it_happens() -> None:
    listed = rules(on_codes("flaky-disk", "RestartIgnoringLimit", 75), on_codes("second", "Fail", 75))
    world = trained(max_restarts=1, rules=listed)
    for attempt in (2, 3, 4):
        world.crash(0, code=75)
        summary = world.recovered(attempt)
        assert summary["rule"] == "flaky-disk"
        assert "rule flaky-disk" in summary["message"]
        world.train(4)
    assert (world.status.crashes, world.status.disruptions, world.status.counted) == (0, 3, 0)


def test_eviction_counts_if_a_rule_says_so() -> None:
    world = trained(max_restarts=1, rules=rules(on_reasons("evicted", "Restart", "PodEvicted")))
    world.evict(world.member(1))
    assert world.recovered()["rule"] == "evicted"
    assert (world.status.crashes, world.status.disruptions, world.status.counted) == (1, 0, 1)
    world.train(4)
    world.evict(world.member(1))
    world.until("Failed")
    world.assert_told("Failed", "MaxRestartsExceeded", "evicted")


def test_pods_own_reason_is_still_known_when_the_pod_is_gone() -> None:
    world = trained(rules=rules(on_reasons("preempted", "Fail", "EvictionByEvictionAPI")))
    world.evict(world.member(1))
    world.until("Failed")
    assert world.condition("Failed").reason == "FailurePolicyRule"


def test_condition_of_the_node_makes_a_crash_the_hardwares_fault() -> None:
    rule = {"name": "gpu", "action": "RestartIgnoringLimit", "onNodeConditions": [{"type": "GpuEcc"}]}
    world = trained(rules=rules(rule))
    node = world.home(2)
    world.change_nodes(node, conditions={"GpuEcc": "True"})
    world.crash(2, code=1)
    assert world.recovered()["rule"] == "gpu"
    assert world.status.counted == 0
    world.train(4)
    world.crash(1, code=1)
    assert "rule" not in world.recovered(3), "another node's condition says nothing about this one"


@pytest.mark.parametrize("noticed", [True, False])
def test_lost_node_behind_a_crash_is_waited_for_and_the_echos_exit_code_decides_nothing(
    noticed: bool,
) -> None:
    world = trained(rules=rules(on_codes("final", "Fail", 1)))
    if noticed:
        world.change_nodes(world.home(3), lost="node is not ready")
        world.sidecar(3).reachable = False
    else:
        world.kill_node(world.home(3))
    world.crash(0, code=1)
    summary = world.recovered()
    assert summary["cause"] in (("NodeLost",) if noticed else ("NodeLost", "NodeSilent", "SidecarSilent"))
    assert "rule" not in summary


def test_failed_restore_is_no_matter_for_rules() -> None:
    assert first_match(rules(on_reasons("r", "Fail", "NodeLost")), Cause.RESTORE_FAILED, Facts(), {}) is None


def test_origin_of_a_crash_is_the_end_that_is_no_echo_even_if_clocks_differ() -> None:
    world = trained(rules=rules(on_codes("bad-data", "Fail", 42)))
    world.crash(0, code=1)
    sidecar = world.sidecar(2)
    sidecar.trainer = replace(
        sidecar.trainer, state=TrainerState.FAILED, exit_code=42, reason="Crashed", ended_at=world.now + 1
    )
    world.until("Failed")
    assert "worker 2" in world.condition("Failed").message


@given(
    code=st.one_of(st.none(), st.integers(0, 255)),
    values=st.frozensets(st.integers(1, 255), min_size=1, max_size=5),
)
def test_in_and_not_in_share_out_the_failures_and_success_is_neither(
    code: int | None, values: frozenset[int]
) -> None:
    within, without = ExitCodes(values).match(code), ExitCodes(values, within=False).match(code)
    assert within + without == (1 if code else 0)
    assert within is bool(code and code in values)


@given(
    actions=st.lists(st.sampled_from(list(RuleAction)), max_size=6),
    code=st.integers(1, 5),
    codes=st.lists(st.integers(1, 5), min_size=6, max_size=6),
)
def test_no_rule_behind_the_one_that_matches_is_ever_asked(
    actions: list[RuleAction], code: int, codes: list[int]
) -> None:
    listed = [
        FailureRule(f"r{place}", action, ExitCodes(frozenset({codes[place]})))
        for place, action in enumerate(actions)
    ]
    found = first_match(listed, Cause.TRAINER_CRASH, Facts(code), {})
    expected = next(
        (rule for rule in listed if code in (rule.exit_codes or ExitCodes(frozenset())).values), None
    )
    assert found == expected


# What is usual.


def test_shell_that_does_not_find_the_command_ends_the_job_before_it_spends_restarts() -> None:
    world = World(make_spec())
    world.stillborn, world.stillborn_code = True, 127
    world.until("Failed")
    assert world.status.attempt == 1
    assert world.condition("Failed").reason == "CannotStart"


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        (127, "Crashed", "127"),
        (137, "Signalled", "137 (Signalled)"),
        (135, "Signalled", "/dev/shm"),
        (43, "Crashed", "43"),
    ],
    ids=["a shell's", "a kill names its signal", "advice for a bus error", "a rule for other codes"],
)
def test_exit_in_the_middle_of_training_is_a_crash(code: int, reason: str, said: str) -> None:
    world = trained(rules=rules(on_codes("bad-data", "Fail", 42)))
    world.crash(1, code, reason)
    world.recovered_from("TrainerCrash", said)
    assert (world.status.crashes, world.status.counted) == (1, 1)


def test_process_that_the_kernel_killed_for_memory_is_told_from_other_kills_with_numbers() -> None:
    world = trained()
    uid = world.member(1)
    world.change_pod(uid, trainer=ContainerView(memory_limit="64Gi"))
    world.crash(1, code=137, reason="OOMKilled")
    world.recovered_from("OOMKilled", "64Gi", "resources.limits.memory")
    assert "OOMKilled" in world.notices
    assert (world.status.crashes, world.status.counted) == (1, 1), "to try again forever would not help"


def test_container_that_the_kernel_killed_for_memory_is_told_from_one_that_was_restarted() -> None:
    world = trained()
    uid = world.member(1)
    ended = ContainerView(1, "OOMKilled", world.now, 137, "64Gi")
    world.change_pod(uid, trainer=ended)
    world.crash(1, code=137, reason="ContainerRestarted")
    assert world.recovered()["cause"] == "OOMKilled"
    world.train(5)
    world.crash(1, code=137, reason="ContainerRestarted")
    assert world.recovered(3)["cause"] == "TrainerCrash", (
        "the container's last end is one of an earlier attempt"
    )


def test_crash_is_told_once_with_the_commands_last_lines_and_where_its_log_is() -> None:
    world = trained()
    pod = world.pods[world.member(1)].name
    world.crash(1, code=3, reason="Crashed", message="CUDA error: out of memory")
    assert world.recovered()["message"] == (
        "the training command of worker 1 ended with exit code 3: CUDA error: out of memory. "
        f"Its log: kubectl logs {pod} -c trainer"
    )
    world.train(4)
    world.crash(1, code=3, reason="Crashed", message="x" * 5000)
    message = world.recovered(3)["message"]
    assert len(message) <= 1000
    assert message.endswith("-c trainer")


def say(world: World, worker: int, reason: str, message: str, exit_code: int = 1) -> None:
    """What a rank of the worker says before it ends."""
    sidecar = world.sidecar(worker)
    sidecar.trainer = replace(sidecar.trainer, failure=RankFailure(worker, reason, message, exit_code))


def test_ranks_own_words_are_in_the_message_and_its_own_exit_code_goes_before_torchruns() -> None:
    world = trained(rules=rules(on_codes("bad-data", "Fail", 42)))
    say(world, 2, "Exited", "SystemExit: 42", 42)
    world.crash(2, code=1)
    world.until("Failed")
    world.assert_told("Failed", "FailurePolicyRule", "rank 2: SystemExit: 42 (exit code 42)")


def test_broken_collective_is_an_echo_of_the_exception_elsewhere_even_if_it_ended_first() -> None:
    world = trained()
    say(world, 0, "CollectiveFailed", "RuntimeError: Connection closed by peer")
    world.crash(0)
    sidecar = world.sidecar(3)
    say(world, 3, "UncaughtException", "ValueError: bad sample")
    sidecar.trainer = replace(sidecar.trainer, state=TrainerState.FAILED, exit_code=1, ended_at=world.now + 2)
    summary = world.recovered()
    assert "rank 3: ValueError: bad sample" in summary["message"]


def test_rule_can_ask_for_the_ranks_reason() -> None:
    world = trained(rules=rules(on_reasons("too-big", "Fail", "OutOfGPUMemory")))
    say(world, 1, "OutOfGPUMemory", "OutOfMemoryError: CUDA out of memory")
    world.crash(1)
    world.until("Failed")
    assert "too-big" in world.condition("Failed").message


def test_worker_with_a_broken_gpu_moves_and_nobody_is_blamed() -> None:
    world = trained(max_restarts=0)
    node = world.home(2)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    say(world, 2, "GPUFault", "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    world.crash(2)
    summary = world.recovered_from("GPUFault", "uncorrectable ECC")
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert world.home(2) != node
    assert survivors <= set(world.pods)
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


@pytest.mark.parametrize(
    ("copies", "ill"), [(0, [2]), (1, [0, 1, 2, 3])], ids=["nobody shares its memory", "all"]
)
def test_gpus_that_complain_move_nobody_whose_memory_would_be_lost_nor_all(
    copies: int, ill: list[int]
) -> None:
    world = trained(copies=copies)
    pods = set(world.pods)
    for worker in ill:
        say(world, worker, "GPUFault", "RuntimeError: CUDA error: hardware stack error")
        world.crash(worker)
    assert world.recovered()["cause"] == "TrainerCrash"
    assert set(world.pods) == pods


WHY = "step 11 is suspected: two runs of it differ"


def suspecting(*workers: int, **spec: object) -> World:
    """Back after these have suspected step 11, of which they have kept nothing; their processes stay."""
    world = trained(snapshot_every=4, delta=DeltaMode.AUTO, **spec)
    world.staying = True
    world.skipped = {(worker, 11) for worker in workers}
    world.train(1)
    for worker in workers:
        say(world, worker, "StepSuspected", WHY)
    world.hung = (1, None)  # the others wait for these
    world.recovered()
    return world


def made_again(world: World, *differs: int) -> None:
    """All have compared step 11: at these it gave other bits, having been suspected there."""
    for worker in range(4):
        sidecar, own = world.sidecar(worker), worker in differs
        message = "step 11 was suspected, and differs from the life before" if own else ""
        exact = Exact.DIFFERS if own else Exact.PROVEN
        sidecar.trainer = replace(sidecar.trainer, resume=ResumeProof(worker, 10, exact, 1, message, own))
    world.train(1)


def test_suspected_step_is_made_again_by_the_same_processes_from_a_version_before_it() -> None:
    world = suspecting(2)
    pods = set(world.pods)
    summary = world.summary
    assert (summary["cause"], summary["message"]) == ("StepSuspected", f"worker 2, rank 2: {WHY}")
    assert (summary["step"], summary["lostSteps"]) == (10, 1)
    assert (summary["inProcess"], summary["restarted"]) == (4, 0)
    assert world.status.counted == 1
    made_again(world)
    world.train(10)
    assert (world.status.attempt, set(world.pods)) == (2, pods), "both times the same: nobody moves"


def test_worker_alone_whose_suspected_step_gives_other_bits_is_named_and_moves() -> None:
    world = suspecting(2, max_restarts=1)
    node, survivors = world.home(2), {world.member(worker) for worker in (0, 1, 3)}
    made_again(world, 2)
    summary = world.recovered_from("StepDiffered", "worker 2 on node", "rank 2: step 11", attempt=3)
    assert "worker 2, rank 2, back at step 10" in world.status.recoveries[1]["exactMessage"]
    assert {"StepSuspected", "Differs", "StepDiffered", "NodeAvoided"} <= set(world.notices)
    assert world.home(2) != node
    assert survivors <= set(world.pods)
    assert (summary["inProcess"], summary["restarted"]) == (3, 1)
    assert (world.status.counted, world.status.disruptions) == (1, 1)


@pytest.mark.parametrize(
    ("copies", "differs"), [(1, [1, 2]), (0, [2])], ids=["several", "its memory would be lost"]
)
def test_nobody_moves_whom_the_bits_do_not_single_out_or_whom_nobody_can_replace(
    copies: int, differs: list[int]
) -> None:
    world = suspecting(*differs, copies=copies)
    pods = set(world.pods)
    made_again(world, *differs)
    world.train(10)
    assert (world.status.attempt, set(world.pods)) == (2, pods)
    assert world.told("Exact")[:2] == (False, "Differs")


def test_step_that_is_suspected_each_time_spends_the_restarts_and_the_end_says_why() -> None:
    world = suspecting(2, max_restarts=2)
    for again in (3, 4):
        say(world, 2, "StepSuspected", f"{WHY}; made again, it gave the same bits")
        world.tick_until(lambda: world.status.recovery is not None or world.status.holds("Failed"))
        if again == 3:
            world.recovered(again)
    world.assert_told("Failed", "MaxRestartsExceeded", "made again, it gave the same bits")


def test_lost_pod_explains_a_suspected_step_and_an_echo_does_not() -> None:
    world = trained(10)
    say(world, 1, "CollectiveFailed", "RuntimeError: Connection closed by peer")
    world.crash(1)
    say(world, 2, "StepSuspected", WHY)
    world.crash(2)
    assert world.recovered()["cause"] == "StepSuspected"
    world.train(4)
    say(world, 2, "StepSuspected", WHY)
    world.evict(world.member(3))
    assert world.recovered(3)["cause"] == "PodEvicted"


# How restarts are counted.


def test_crashes_far_apart_do_not_end_a_long_run() -> None:
    world = trained(max_restarts=2, reset_seconds=50)
    for attempt in range(2, 8):
        world.crash(attempt % 4, code=1)
        world.recovered(attempt)
        world.train(60)
        assert world.status.counted == 0
    assert world.status.crashes == 6


def test_crashes_at_the_same_step_spend_the_restarts_however_long_each_takes() -> None:
    world = trained(max_restarts=2, reset_seconds=5, snapshot_every=1000)
    for attempt in (2, 3):
        world.crash(0, code=1)
        world.recovered(attempt)
        world.tick_until(lambda: world.newest_step() >= 9)
    world.crash(0, code=1)
    world.until("Failed")
    assert world.condition("Failed").reason == "MaxRestartsExceeded"


def test_node_loss_neither_counts_nor_forgives() -> None:
    world = trained(max_restarts=2)
    world.crash(0, code=1)
    world.recovered()
    world.train(4)
    world.evict(world.member(1))
    world.recovered(3)
    assert (world.status.crashes, world.status.disruptions, world.status.counted) == (1, 1, 1)


def test_command_that_never_makes_a_step_is_held_back_even_if_no_limit_counts() -> None:
    world = World(make_spec(rules=rules(on_codes("again", "RestartIgnoringLimit", 1))))
    world.until("Starting")
    world.stillborn = True
    world.train(120)
    assert 3 <= world.status.attempt <= 9, "1, 2, 4, 8 ... seconds between them"
    assert world.status.counted == 0


# Hangs.


def hanging_world(worker: int | None, **changes: object) -> World:
    world = trained(hang=HangLimits(steps=2, seconds=20.0), **changes)
    world.hung = (1, worker)
    return world


def test_job_that_makes_no_step_is_restarted_in_place_and_the_one_behind_is_named() -> None:
    world = hanging_world(2)
    pods = set(world.pods)
    world.train(15)
    assert world.status.attempt == 1, "not before its time"
    summary = world.recovered_from("Hung", "worker 2 (rank 2) is at step")
    assert summary["tiers"] == {"local": 4, "peer": 0, "remote": 0}
    assert summary["detectSeconds"] >= 20
    assert set(world.pods) == pods
    assert world.status.counted == 1
    assert "Hung" in world.notices


def ended_early(worker: int) -> World:
    """Back in training; the command of this worker has ended with 0, and the others cannot make a step."""
    world = trained(hang=HangLimits(steps=2, seconds=20.0))
    sidecar = world.sidecar(worker)
    sidecar.trainer = replace(sidecar.trainer, state=TrainerState.SUCCEEDED, exit_code=0)
    return world


def test_worker_whose_command_had_ended_well_is_named_where_others_fail_or_hang_for_it() -> None:
    said = "the training command of worker 1 had ended with exit code 0 before: all ranks must make the same"
    world = ended_early(1)
    world.crash(0, message="Connection closed by peer")
    world.recovered_from("TrainerCrash", "worker 0 ended with exit code 1: Connection closed by peer", said)
    assert world.status.failed_start is None
    world = ended_early(1)
    for worker in (0, 2, 3):
        sidecar = world.sidecar(worker)
        sidecar.trainer = replace(sidecar.trainer, stalled_since=world.now)
    world.recovered_from("Hung", said)
    world = ended_early(1)
    world.crash(0, code=43, message="bad data")
    assert said not in world.recovered()["message"], "that is a reason of its own"


def test_hang_without_a_laggard_sends_the_reader_to_the_stacks() -> None:
    world = hanging_world(None)
    summary = world.recovered()
    assert "no single worker is behind" in summary["message"]
    assert "stacks" in summary["message"]
    assert world.status.hang is None


def test_worker_that_holds_the_others_up_again_moves_to_another_node() -> None:
    world = hanging_world(2)
    node = world.home(2)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    world.recovered()
    world.train(4)
    world.hung = (2, 2)
    summary = world.recovered_from("Hung", "again", attempt=3)
    assert world.home(2) != node
    assert survivors <= set(world.pods)
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}


def test_another_worker_that_hangs_the_next_time_stays() -> None:
    world = hanging_world(2)
    world.recovered()
    world.train(4)
    world.hung = (2, 1)
    pods = set(world.pods)
    world.recovered(3)
    assert set(world.pods) == pods
    assert world.status.hang is not None
    assert (world.status.hang.worker, world.status.hang.times) == (1, 1)


def test_hang_can_be_ruled_no_fault_of_training() -> None:
    world = hanging_world(
        None, max_restarts=0, rules=rules(on_reasons("fabric", "RestartIgnoringLimit", "Hung"))
    )
    assert world.recovered()["rule"] == "fabric"
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


def test_job_whose_owner_wants_no_hang_detection_is_left_alone() -> None:
    world = trained(hang=None)
    world.hung = (1, 2)
    world.train(500, attempt=1)


def test_lost_node_explains_a_hang() -> None:
    world = hanging_world(2)
    world.train(18)
    world.kill_node(world.home(3))
    assert world.recovered()["cause"] in ("NodeLost", "SidecarSilent")


def test_hang_that_passes_before_anything_was_decided_is_forgotten() -> None:
    world = hanging_world(2)
    for sidecar in world.sidecars.values():
        sidecar.trainer = replace(
            sidecar.trainer, stalled_since=world.now - 30, slowest_rank=0, slowest_step=1
        )
    obs = replace(
        world.observe(),
        job=replace(
            world.job, status=replace(world.status, recovery=Recovery("Hung", "m", world.now, world.now))
        ),
    )
    assert update_recovery(Situation.of(obs), None) is None


# Sidecars.


def test_sidecar_that_ended_is_told_until_a_version_is_complete_again_and_training_goes_on() -> None:
    world = trained(snapshot_every=20)
    world.tick_until(lambda: world.newest_step() >= 22)
    uid = world.member(1)
    world.change_pod(uid, sidecar=ContainerView(1, "Error", world.now, 137))
    world.train(3)
    world.assert_told(
        "Protected", (False, "SidecarRestarted"), "worker 1 ended (Error, exit code 137)", "--previous"
    )
    world.train(20)
    assert world.told("Protected")[:2] == (True, "CopiesComplete")
    assert world.status.attempt == 1
    assert world.notices.count("SidecarRestarted") == 1


def test_sidecar_without_enough_memory_says_which_number_to_raise() -> None:
    world = trained(snapshot_every=20)
    uid = world.member(1)
    world.change_pod(uid, sidecar=ContainerView(1, "OOMKilled", world.now, 137, "1342177280"))
    world.tick()
    world.assert_told("Protected", "", "limit of 1342177280", "tiers.local.sizeLimit")


# Pods.


def test_pod_that_fails_for_no_known_reason_is_replaced_alone() -> None:
    world = trained(rules=rules(on_reasons("odd", "RestartIgnoringLimit", "UnexpectedAdmissionError")))
    survivors = {world.member(worker) for worker in (0, 2, 3)}
    uid = world.member(1)
    world.change_pod(uid, phase="Failed", disruption="UnexpectedAdmissionError")
    summary = world.recovered_from("PodFailed")
    assert summary["rule"] == "odd"
    assert survivors <= set(world.pods)


# Failure domains.


def lose(world: World, *names: str) -> None:
    for name in names:
        world.kill_node(name)
        world.change_nodes(name, lost="node is not ready")


@pytest.mark.parametrize("rule", [False, True])
def test_lost_rack_is_called_by_its_name_and_a_rule_on_lost_nodes_means_it_as_well(rule: bool) -> None:
    world = trained(rules=rules(*([on_reasons("nodes", "Restart", "NodeLost")] if rule else [])))
    lose(world, "n00", "n01")
    summary = world.recovered()
    workers = sorted(pod.worker for pod in world.pods.values() if pod.incarnation)
    assert (summary["cause"], summary.get("rule")) == ("DomainLost", "nodes" if rule else None)
    assert summary["message"].startswith(f"rack r0 lost: workers {workers[0]}, {workers[1]}")
    assert (world.status.crashes, world.status.disruptions) == ((1, 0) if rule else (0, 1))


@pytest.mark.parametrize(
    ("racks", "spec", "lost"), [(2, {}, ["n00"]), (3, {"workers": 6, "copies": 2}, ["n00", "n10"])]
)
def test_nodes_that_are_no_whole_rack_are_lost_nodes(
    racks: int, spec: dict[str, Any], lost: list[str]
) -> None:
    world = trained(racks=racks, **spec)
    lose(world, *lost)
    summary = world.recovered_from("NodeLost")
    assert "rack" not in summary["message"]


def test_rack_of_which_a_node_is_well_is_said_to_have_lost_what_the_job_had_there() -> None:
    world = World(make_spec(), racks=2, nodes_per_rack=3)
    world.change_nodes("n02", schedulable=False)
    world.change_nodes("n12", schedulable=False)
    world.running()
    lose(world, "n00", "n01")
    summary = world.recovered_from("NodeLost")
    assert summary["message"].startswith("all nodes of the job in rack r0 lost: workers ")


def test_zone_is_named_where_more_than_one_rack_of_it_is_gone() -> None:
    world = World(make_spec(workers=8, copies=1, spread_level="zone"), racks=4, nodes_per_rack=2)
    for name, node in world.nodes.items():
        zone = "east" if name[1] in "01" else "west"
        world.nodes[name] = replace(node, labels={**node.labels, "topology.kubernetes.io/zone": zone})
    world.running()
    lose(world, "n00", "n01", "n10", "n11")
    assert world.recovered()["message"].startswith("zone east lost: workers ")


# activeDeadlineSeconds.


def test_job_that_takes_longer_than_it_may_fails_restarts_or_not_and_its_pods_go() -> None:
    world = trained(active_deadline=60.0)
    began = world.now
    world.evict(world.member(1))
    world.recovered()
    world.until("Failed")
    assert world.now - began < 60
    world.assert_told("Failed", "DeadlineExceeded", "60 s")
    world.train(60)
    assert all(pod.terminal or pod.deleting for pod in world.pods.values())


def test_time_in_suspension_is_not_held_against_the_job() -> None:
    world = trained(active_deadline=60.0, remote=REMOTE)
    world.suspended()
    world.train(200)
    assert not world.status.holds("Failed")
    world.change(suspend=False)
    world.until("Running", attempt=2)
    world.train(20)
    assert not world.status.holds("Failed")
    world.until("Failed")
    assert world.condition("Failed").reason == "DeadlineExceeded"


def test_job_that_was_created_suspended_has_not_started() -> None:
    world = World(make_spec(suspend=True, active_deadline=30.0))
    world.train(100)
    assert world.status.started is None
    world.change(suspend=False)
    world.until("Running")
    assert world.status.started is not None
