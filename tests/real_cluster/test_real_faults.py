"""A job of four workers in two racks survives everything, one fault after the other.

Its losses, over all attempts, are those of a job that nothing happened to, bit for bit: the last test.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import faults
import pytest
from play import Play, Report, Row, trained_again
from stage import REMOTE_EVERY, SYSTEM, TRAINING, Stage, job, leader, wait_until_gone
from testbed.cluster import Testbed
from testbed.processes import wait_for
from training import WORKER, LossReader, Training, UnhurtRun

from tiercheck_local.stage import tier_step
from tiercheck_operator.model.conditions import Cause

PROCESS, POD, RACK = 5.0, 10.0, 15.0
"""Seconds of a recovery that may be ours, on an idle cluster."""
DELETED = (Cause.POD_DELETED,)


@pytest.fixture(scope="module")
def play(stage: Stage, losses: LossReader, report: Report) -> Iterator[Play]:
    training = Training(stage.testbed, losses, TRAINING, "gpt")
    training.apply(job("gpt"))
    training.wait_until_protected()
    yield Play(training, report)
    training.stop_watching()
    stage.testbed.kubectl("-n", TRAINING, "delete", "tcj", "gpt", "--ignore-not-found", "--wait=false")


@pytest.fixture(autouse=True)
def on_its_way(play: Play, healed: Testbed) -> None:
    play.begin()


def protected(play: Play) -> str:
    """The reason for which the job says that it is not."""
    condition = play.training.condition("Protected")
    return (
        f"Protected={condition['status']} {condition['reason']}" if condition.get("status") == "False" else ""
    )


def test_killed_rank_comes_back_in_place(play: Play) -> None:
    play.recover("rank, kill -9", ("crash", 2), causes=(Cause.TRAINER_CRASH,), bound=PROCESS, restarted=1)
    assert "worker 2" in play.training.status["lastRecovery"]["message"]


def test_rank_out_of_memory_comes_back_in_place(play: Play) -> None:
    play.recover("OOM kill of a rank", ("out of memory", 1), causes=(Cause.OOM_KILLED,), bound=PROCESS)


def test_deleted_pod_is_replaced(play: Play) -> None:
    play.recover("kubectl delete pod", ("delete", 1), causes=DELETED, replaced={1}, bound=POD, restarted=1)


def test_pod_deleted_by_force_is_replaced(play: Play) -> None:
    play.recover("kubectl delete pod --force", ("force delete", 2), causes=DELETED, replaced={2}, bound=POD)


def test_drained_node_is_left(play: Play, stage: Stage) -> None:
    play.recover(
        "drain of a node",
        lambda: faults.drain(stage.testbed, play.training.node_of(3)),
        causes=(Cause.POD_EVICTED, Cause.NODE_LEAVING), replaced=workers_on(play, 3), bound=POD,
    )  # fmt: skip


def test_two_drained_nodes_are_left_one_after_the_other(play: Play, stage: Stage) -> None:
    first, second = play.training.node_of(0), play.training.node_of(2)
    play.recover(
        "drain of two nodes at once",
        lambda: faults.drain(stage.testbed, first, second),
        causes=(Cause.POD_EVICTED, Cause.NODE_LEAVING), replaced=workers_on(play, 0, 2),
        attempts=(1, 2, 3, 4),
    )  # fmt: skip


def test_power_cut_of_a_node(play: Play) -> None:
    play.recover(
        "node, power cut", ("node", 1),
        causes=(Cause.NODE_SILENT, Cause.NODE_LOST), replaced=workers_on(play, 1), bound=POD,
    )  # fmt: skip


def test_node_whose_processes_died_is_not_chosen_again(play: Play) -> None:
    node = play.training.node_of(2)
    play.recover(
        "node, all processes dead, kernel alive (RST)", node.kill_userland,
        causes=(Cause.NODE_SILENT, Cause.SIDECAR_SILENT, Cause.NODE_LOST), replaced=workers_on(play, 2),
        bound=POD,
    )  # fmt: skip
    assert node.name not in {pod["spec"]["nodeName"] for pod in play.training.pods()}


def test_node_cut_off_the_network(play: Play) -> None:
    play.recover(
        "node, network cut, tasks alive", play.training.node_of(3).cut,
        causes=(Cause.NODE_SILENT, Cause.NODE_LOST), replaced=workers_on(play, 3), bound=POD,
    )  # fmt: skip


def test_stopped_kubelet_stops_no_training(play: Play, stage: Stage) -> None:
    """Its node turns NotReady after 50 s; the tasks on it are well."""
    node = play.training.node_of(1)

    def stop() -> None:
        node.kill_kubelet()
        wait_for(lambda: not stage.testbed.is_ready(node), 120, "the node to be NotReady")
        time.sleep(15)
        node.start_kubelet()

    play.leave_alone("kubelet of a node stopped for 70 s, tasks alive", stop)


def test_all_kubelets_silent_stop_no_training(play: Play, stage: Stage) -> None:
    def silence() -> None:
        faults.stop_kubelets(stage.testbed)
        time.sleep(75)
        assert not any(stage.testbed.is_ready(node) for node in stage.testbed.nodes[:-1])
        faults.continue_kubelets(stage.testbed)

    play.leave_alone("all kubelets silent for 75 s", silence)


def test_restarted_kubelet_stops_no_training(play: Play) -> None:
    def restart() -> None:
        play.training.node_of(0).kill_kubelet()
        play.training.node_of(0).start_kubelet()

    play.leave_alone("kubelet restarted", restart)


def test_killed_sidecar_stops_no_training(play: Play) -> None:
    play.leave_alone(
        "sidecar, kill -9", lambda: play.training.inject_fault("sidecar", 1), told=lambda: protected(play)
    )


def test_sidecar_killed_thrice_stops_no_training(play: Play) -> None:
    """From the second time on the kubelet waits 10, 20, 40 s before it starts the sidecar again."""

    def kill() -> None:
        for _ in range(3):
            wait_for(lambda: sidecar_is_well(play, 3), 120, "the sidecar to run")
            play.training.inject_fault("sidecar", 3)
            wait_for(lambda: not sidecar_is_well(play, 3), 30, "the kubelet to notice")

    play.leave_alone("sidecar, kill -9, three times", kill, told=lambda: protected(play))


def test_lost_rack_comes_back_from_the_other_one(play: Play, stage: Stage) -> None:
    nodes = stage.testbed.nodes[2:4]
    lost = {worker for worker in range(4) if play.training.node_of(worker) in nodes}

    def cut() -> None:
        for node in nodes:
            node.cut()
        for node in nodes:
            node.power_off()

    play.recover(
        "rack, power cut", cut,
        causes=(Cause.DOMAIN_LOST, Cause.NODE_SILENT, Cause.NODE_LOST, Cause.ALL_PODS_LOST),
        replaced=lost, bound=RACK,
    )  # fmt: skip


def test_all_pods_come_back_from_the_bucket(play: Play) -> None:
    play.recover(
        "all pods deleted", ("delete every pod", 0),
        causes=(Cause.ALL_PODS_LOST, *DELETED), replaced=range(4), again_at_most=REMOTE_EVERY + 10,
    )  # fmt: skip


def test_leader_killed_in_mid_recovery_spends_no_second_attempt(play: Play, stage: Stage) -> None:
    leading = leader(stage)

    def hit() -> None:
        play.training.inject_fault("force delete", 3)
        play.training.wait("the recovery to begin", lambda status: "recovery" in status)
        faults.kill_operator(stage.testbed, leading)

    play.recover("pod deleted, then the operator's leader killed", hit, causes=DELETED, replaced={3})


def test_rank_killed_while_no_operator_runs_is_mended_when_it_is_back(play: Play, stage: Stage) -> None:
    def hit() -> None:
        scale = ("-n", SYSTEM, "scale", "deployment/tiercheck-operator")
        stage.testbed.kubectl(*scale, "--replicas=0")
        wait_until_gone(stage.testbed, SYSTEM, "pods")
        play.training.inject_fault("crash", 0)
        time.sleep(60)
        stage.testbed.kubectl(*scale, "--replicas=2")
        stage.wait_for_operators()

    play.recover("both operators away for 60 s, rank killed", hit, causes=(Cause.TRAINER_CRASH,))
    assert "worker 0" in play.training.status["lastRecovery"]["message"]


def test_silent_bucket_stops_no_training(play: Play, stage: Stage) -> None:
    def silence() -> None:
        stage.s3.pause()
        time.sleep(64)
        stage.s3.go_on()

    play.leave_alone("S3 does not answer for 64 s", silence, told=lambda: protected(play))
    uploads_go_on(play)


def test_full_bucket_stops_no_training(play: Play, stage: Stage) -> None:
    def fill() -> None:
        quota = ("--uid=tiercheck", "--quota-scope=user")
        stage.s3.admin("quota", "set", *quota, "--max-size=1K")
        stage.s3.admin("quota", "enable", *quota)
        wait_for(lambda: protected(play), 120, "the job to tell it")
        stage.s3.admin("quota", "disable", *quota)

    play.leave_alone("S3 full", fill, told=lambda: protected(play))
    uploads_go_on(play)


def test_forbidden_bucket_stops_no_training(play: Play, stage: Stage) -> None:
    def forbid() -> None:
        stage.s3.admin("user", "suspend", "--uid=tiercheck")
        wait_for(lambda: protected(play), 120, "the job to tell it")
        stage.s3.admin("user", "enable", "--uid=tiercheck")

    play.leave_alone("S3 forbidden", forbid, told=lambda: protected(play))
    uploads_go_on(play)


def test_upgrade_and_rollback_stop_no_training(play: Play, stage: Stage) -> None:
    def upgrade() -> None:
        stage.upgrade(podAnnotations={"example.com/changed": "yes"})
        stage.helm.rollback("tiercheck")
        stage.wait_for_operators()

    play.leave_alone("helm upgrade, then rollback", upgrade)


def test_suspended_job_ends_within_seconds_and_goes_on_where_it_was(play: Play, stage: Stage) -> None:
    training = play.training
    began, before = time.time(), training.attempt
    training.suspend(90)
    ended, last = time.time() - began, training.step
    status = training.status
    # Snapshots alone go to the bucket: at most those steps are made again that lead up to the next one.
    owed, most = (
        status["progress"]["step"] - status["tiers"]["remote"]["step"],
        status["checkpoint"]["snapshotEverySteps"] - 1,
    )
    assert 0 <= owed <= most, "the last snapshot is in the bucket"
    assert abs(status["progress"]["step"] - last) <= 1

    training.patch({"suspend": False})
    training.wait("the job to go on", lambda _: training.attempt > before and training.step > last)
    training.wait_until_protected()
    again = trained_again(training.steps, before)
    first = next(entry for entry in training.steps if entry.attempt > before)
    play.report.add(
        Row(
            fault=f"suspend ({ended:.0f} s until all pods were gone), resume", told="Suspended, Resumed",
            tiers="4 remote", again=again, lost_told=training.status["lastRecovery"].get("lostSteps"),
            ours=ended, next_step=first.time - began - ended, replaced=4, bound=30,
        )
    )  # fmt: skip
    assert again <= owed + 1, "nothing but what was not in the last snapshot is made again"
    assert training.status["lastRecovery"]["lostSteps"] == owed
    assert training.attempt == before + 1, (
        f"{training.attempt - before} attempts were spent on one resumption"
    )


def test_losses_of_the_whole_run_are_those_of_a_run_without_faults(
    play: Play, stage: Stage, unhurt: UnhurtRun, report: Report
) -> None:
    training = play.training
    stage.testbed.kubectl("-n", TRAINING, "delete", "tcj", training.name)
    wait_until_gone(stage.testbed, TRAINING, "tcj,pods,services,poddisruptionbudgets")
    last = max(entry.step for entry in training.steps)  # it trained on until it was deleted
    secrets = stage.testbed.kubectl("-n", TRAINING, "get", "secrets", "-o", "name").split()
    assert secrets == ["secret/bucket"], "nothing of a deleted job stays"

    trained = training.steps
    wrong, missing = unhurt.compare(trained, ranks=4)
    report.verdicts.append(
        f"{len(trained)} steps were trained in {training.attempt} attempts, "
        f"{len(trained) - len({s.step for s in trained})} of them "
        f"twice; {len(wrong)} losses differ from those of an uninterrupted run of {last} steps, "
        f"{len(missing)} are missing."
    )
    assert not wrong
    assert not missing


def workers_on(play: Play, *workers: int) -> set[int]:
    """All workers on the nodes of these."""
    nodes = {play.training.node_of(worker).name for worker in workers}
    return {
        int(pod["metadata"]["labels"][WORKER])
        for pod in play.training.pods()
        if pod["spec"].get("nodeName") in nodes
    }


def sidecar_is_well(play: Play, worker: int) -> bool:
    sidecar = play.training.sidecar(worker)
    return bool(sidecar.get("started")) and "running" in sidecar["state"]


def uploads_go_on(play: Play) -> None:
    before = tier_step(play.training.status, "remote")
    play.training.wait("the next upload", lambda status: tier_step(status, "remote") > before)
