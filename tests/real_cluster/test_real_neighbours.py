"""What admins, other teams and the cluster's own services do beside a job: it comes back by itself."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import faults
import pytest
from play import Play, Report
from stage import SYSTEM, TRAINING, Stage, indexed_job, job, label_nodes, policy, wait_until_gone
from testbed.cluster import Testbed
from testbed.node import DEVICE, SYSCTL, Node
from testbed.processes import wait_for
from training import WORKER, Begin, LossReader, Training, UnhurtRun

from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.model.observed import ANNOTATION_AVOIDED

DELETED = (Cause.POD_DELETED,)
EVICTED = (Cause.POD_EVICTED,)
COUNTED, DOOMED, UNSAFE = "counted", "doomed", "unsafe"
"""Namespaces of their own."""

pytestmark = pytest.mark.usefixtures("healed")


Start = Callable[[str, dict[str, Any]], Play]
"""Begins a job in a namespace; it is on its way."""


@pytest.fixture
def start(request: pytest.FixtureRequest, begin: Begin, report: Report, unhurt: UnhurtRun) -> Iterator[Start]:
    """After a test that was passed, the losses of its jobs of two workers are those of an unhurt run."""
    begun: list[Play] = []
    failed = request.session.testsfailed

    def started(namespace: str, manifest: dict[str, Any]) -> Play:
        begun.append(Play(begin(namespace, manifest), report))
        begun[-1].begin()
        return begun[-1]

    yield started
    for play in begun if request.session.testsfailed == failed else ():
        unhurt.assert_same(play.training, ranks=2)


@pytest.fixture
def two(request: pytest.FixtureRequest, start: Start) -> Play:
    """Two workers, on their way, under a name that no other test gives: else they would take up its run."""
    return start(TRAINING, job(f"two-{zlib.crc32(request.node.name.encode()):x}", workers=2))


def test_containerd_that_is_away_until_its_node_is_not_ready_stops_no_training(two: Play) -> None:
    node = two.training.node_of(1)

    def restart() -> None:
        node.kill_containerd()
        two.training.wait("it to be told", lambda _: two.training.reason() == conditions.NODE_NOT_READY)
        node.start_containerd()

    two.leave_alone("containerd of a node away until NotReady", restart, told=lambda: told(two.training))


def test_api_server_that_is_away_stops_no_training(two: Play, stage: Stage) -> None:
    two.leave_alone("API server away for 45 s", lambda: faults.restart_api_server(stage.testbed, 45))


def test_pod_deleted_just_before_the_api_server_restarts_is_replaced_once(two: Play, stage: Stage) -> None:
    training = two.training
    began, old = time.time(), training.pod_of(1)

    def hit() -> None:
        training.inject_fault("delete", 1)
        faults.restart_api_server(stage.testbed, 20)

    two.recover("pod deleted, then API server away for 20 s", hit, causes=DELETED, replaced={1})
    assert training.pods_deleted(began) == [old], "a new pod went because its kubelet came late"


def test_node_tainted_no_execute_is_left(two: Play, stage: Stage) -> None:
    node = two.training.node_of(1)
    taint = "example.com/maintenance"
    try:
        two.recover(
            "taint NoExecute",
            lambda: stage.testbed.kubectl("taint", "node", node.name, f"{taint}=now:NoExecute"),
            causes=EVICTED, replaced={1},
        )  # fmt: skip
        assert two.training.node_of(1) is not node
    finally:
        stage.testbed.kubectl("taint", "node", node.name, f"{taint}-", check=False)


def test_node_deleted_from_the_api_is_left_and_taken_again_when_it_is_back(two: Play, stage: Stage) -> None:
    """The machine is well all the time: as an autoscaler or an admin does it by mistake."""
    training, node = two.training, two.training.node_of(1)
    two.recover(
        "node object deleted, its kubelet alive",
        lambda: stage.testbed.kubectl("delete", "node", node.name),
        causes=(Cause.NODE_LOST, *DELETED, *EVICTED), replaced={1},
    )  # fmt: skip
    assert training.node_of(1) is not node
    node.kill_kubelet()
    node.start_kubelet()
    wait_for(lambda: stage.testbed.is_ready(node), 120, "the node to be back")
    label_nodes(stage.testbed)
    stage.testbed.kubectl("cordon", *(other.name for other in stage.testbed.nodes if other is not node))
    two.recover(
        "pod deleted, only the node that is back has room", ("delete", 1), causes=DELETED, replaced={1}
    )
    assert training.node_of(1) is node


def test_node_deleted_and_registered_again_without_its_labels_is_left(two: Play, stage: Stage) -> None:
    """Its kubelet, which starts anew for that, fails the pods that may not be on such a node."""
    node = two.training.node_of(1)

    def hit() -> None:
        stage.testbed.kubectl("delete", "node", node.name)
        node.kill_kubelet()
        node.start_kubelet()

    two.recover(
        "node object deleted and made anew at once, labels lost", hit,
        causes=(Cause.POD_FAILED, Cause.NODE_LOST, *DELETED), replaced={1},
        attempts=(1, 2),  # a slow kubelet says seconds after the other rank's crash that it failed the pod
    )  # fmt: skip
    label_nodes(stage.testbed)


def test_node_whose_kubelet_refuses_pods_is_avoided(stage: Stage, start: Start) -> None:
    """As after a driver that fails: the scheduler sees room on it, and every pod there fails at once."""
    manifest = job("refused", workers=2)
    manifest["spec"]["template"]["spec"]["securityContext"]["sysctls"] = [{"name": SYSCTL, "value": "65536"}]
    stage.make_namespace(UNSAFE, "privileged")
    play = start(UNSAFE, manifest)
    training, testbed = play.training, stage.testbed
    old = training.node_of(1)
    bad, other = (node for node in testbed.nodes[:-1] if node not in (training.node_of(0), old))
    began = time.time()

    def avoided() -> bool:
        return bad.name in {place["node"] for place in training.status.get("avoidedNodes") or ()}

    def hit() -> None:
        testbed.kubectl("cordon", old.name, other.name)
        training.inject_fault("delete", 1)
        training.wait("the node to be avoided", lambda _: avoided())
        testbed.kubectl("uncordon", old.name, other.name)

    bad.allow_sysctl(False)
    wait_for(lambda: testbed.is_ready(bad), 120, "the node to be Ready")
    try:
        play.recover("a node's kubelet refuses the new pod", hit, causes=DELETED, replaced={1})
    finally:
        bad.allow_sysctl(True)
    assert training.node_of(1) in (old, other)
    assert any(bad.name in said and "SysctlForbidden" in said for said in training.told(began, "NodeAvoided"))


def test_quota_that_is_full_delays_a_new_pod_until_the_old_one_is_gone(stage: Stage, start: Start) -> None:
    limit_pods(stage, COUNTED, 2)
    play = start(COUNTED, job("exact", workers=2))
    began = time.time()
    play.recover("pod deleted, quota full until it is gone", ("delete", 1), causes=DELETED, replaced={1})
    assert any("exceeded quota" in said for said in play.training.told(began, conditions.REFUSED))


def test_spare_that_the_quota_refuses_stops_nothing_else(
    stage: Stage, begin: Begin, report: Report, unhurt: UnhurtRun
) -> None:
    limit_pods(stage, COUNTED, 2)
    training = begin(COUNTED, job("luxury", workers=2, spares=1))
    training.wait_for_step(20)
    refused = training.condition(conditions.SPARES_READY)
    assert (refused["status"], refused["reason"]) == ("False", conditions.REFUSED)
    assert "exceeded quota" in refused["message"]
    before = training.attempt
    training.inject_fault("crash", 1)
    training.wait("a restart in place", lambda _: training.steps[-1].attempt > before)
    before = training.attempt
    training.inject_fault("delete", 1)
    training.wait("another pod", lambda _: training.steps[-1].attempt > before)
    limit_pods(stage, COUNTED, 3)
    training.wait("a spare", lambda _: training.condition(conditions.SPARES_READY)["status"] == "True")
    unhurt.assert_same(training, ranks=2)


def test_worker_that_a_more_important_pod_displaces_goes_elsewhere(two: Play, stage: Stage) -> None:
    training, node = two.training, two.training.node_of(1)
    important = {
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "important"},
        "value": 1000,
    }  # fmt: skip
    pod = job("x")["spec"]["template"]["spec"]
    container = {**pod["containers"][0], "command": ["sleep", "infinity"]}
    container["resources"] = {"requests": {"cpu": "1900m"}}
    intruder = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "important"},
        "spec": {**pod, "containers": [container], "nodeSelector": {"kubernetes.io/hostname": node.name},
            "priorityClassName": "important", "terminationGracePeriodSeconds": 0},
    }  # fmt: skip
    stage.testbed.apply(important, TRAINING)
    try:
        two.recover(
            "preempted by a higher priority",
            lambda: stage.testbed.apply(intruder, TRAINING),
            causes=EVICTED,
            replaced={1},
        )
        assert training.node_of(1) is not node
    finally:
        stage.testbed.kubectl("-n", TRAINING, "delete", "pod", "important", "--ignore-not-found")
        stage.testbed.kubectl("delete", "priorityclass", "important")


def test_operator_upgraded_in_mid_recovery_spends_no_second_attempt(two: Play, stage: Stage) -> None:

    def hit() -> None:
        two.training.inject_fault("force delete", 1)
        two.training.wait("the recovery to begin", lambda status: "recovery" in status)
        stage.upgrade(podAnnotations={"example.com/changed": "in mid-recovery"})

    two.recover("pod deleted, then helm upgrade", hit, causes=DELETED, replaced={1})
    stage.upgrade()


def test_deleted_namespace_takes_its_job_with_it_and_no_other(two: Play, stage: Stage, begin: Begin) -> None:
    stage.make_namespace(DOOMED)
    doomed = begin(DOOMED, job("doomed", workers=2))
    doomed.wait_until_protected()
    pods = ("-n", SYSTEM, "get", "pods", "-o", "jsonpath={..restartCount}")
    restarts = stage.testbed.kubectl(*pods)

    def delete() -> None:
        stage.testbed.kubectl("delete", "namespace", DOOMED, "--timeout=600s")

    two.leave_alone("namespace of another job deleted", delete)
    assert stage.testbed.kubectl(*pods) == restarts, "an operator ended"
    assert not stage.testbed.kubectl("get", "namespace", DOOMED, "--ignore-not-found")


def test_owner_that_is_scaled_stops_no_training_and_comes_back(
    stage: Stage, losses: LossReader, unhurt: UnhurtRun
) -> None:
    """A batch/v1 Job with elastic indexes: one worker more, as before, one less, as before."""
    testbed = stage.testbed
    stage.upgrade(attach={"enabled": True})
    training = Training(testbed, losses, TRAINING, "job-scaled", logs="scaled")
    training.apply(policy())
    testbed.apply(indexed_job("scaled"), TRAINING)

    def scale(size: int) -> None:
        change = f'{{"spec": {{"completions": {size}, "parallelism": {size}}}}}'
        testbed.kubectl("-n", TRAINING, "patch", "job", "scaled", "-p", change)

    try:
        training.wait("training to be on its way", lambda _: training.is_on_its_way())
        before, began, workers = training.attempt, time.time(), [training.pod(n) for n in range(2)]
        scale(3)
        training.wait("the size to be told", lambda _: training.reason() == conditions.OWNER_RESIZED)
        assert "3 workers now" in training.condition(conditions.PLACED)["message"]
        training.wait("the Event", lambda _: training.told(began, conditions.OWNER_RESIZED))
        reached = training.step
        training.wait_for_step(reached + 20)
        scale(2)
        training.wait("the old size to be told", lambda _: training.reason() != conditions.OWNER_RESIZED)
        training.wait_until_protected()
        assert training.attempt == before, "a healthy training was stopped"
        uids = [pod["metadata"]["uid"] for pod in workers]
        assert [training.pod(n)["metadata"]["uid"] for n in range(2)] == uids
        scale(1)
        training.wait("the size to be told", lambda _: training.reason() == conditions.OWNER_RESIZED)
        scale(2)
        training.wait("an attempt", lambda _: training.attempt > before)
        training.wait_until_protected()
        failed = testbed.kubectl("-n", TRAINING, "get", "job", "scaled", "-o", "jsonpath={.status.failed}")
        assert failed in ("", "0"), "pods of the owner were counted as failed"
    finally:
        testbed.kubectl("-n", TRAINING, "delete", "job", "scaled", "--ignore-not-found")
        wait_until_gone(testbed, TRAINING, "pods,tcj")
        training.stop_watching()
        stage.upgrade()
    unhurt.assert_same(training, ranks=2)


def test_node_that_reboots_quickly_is_taken_again_where_no_other_fits(stage: Stage, start: Start) -> None:
    testbed = stage.testbed
    testbed.kubectl("cordon", "node-2", "node-4")
    manifest = job("rebooted", workers=2)
    manifest["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "1100m"
    play = start(TRAINING, manifest)
    training, node, began = play.training, play.training.node_of(1), time.time()

    def reboot() -> None:
        node.power_off()
        testbed.power_on(node)

    causes = (Cause.NODE_SILENT, Cause.NODE_LOST, Cause.SIDECAR_SILENT, Cause.POD_FAILED, *DELETED)
    play.recover("quick reboot, no other node fits", reboot, causes=causes, replaced={1}, attempts=(1, 2))
    assert training.node_of(1) is node
    made = {  # a watch that begins anew tells of them again
        seen.body["metadata"]["uid"]: seen.body["metadata"]
        for seen in training.pods_seen
        if seen.at > began and seen.body["metadata"]["labels"].get(WORKER) == "1"
    }
    avoided = [(pod.get("annotations") or {}).get(ANNOTATION_AVOIDED, "") for pod in made.values()]
    assert avoided in (["", node.name, ""], ["", ""], [""]), f"a pod was made in vain: {avoided}"
    said = [seen.body.get("status", {}).get("conditions", ()) for seen in training.seen]
    messages = {each["message"] for found in said for each in found if each["type"] == conditions.PLACED}
    waited = [message for message in messages if "have no node" in message]
    assert all(f"It avoids {node.name} until" in message for message in waited), waited


def test_pod_evicted_for_its_own_storage_counts_as_a_crash(stage: Stage, start: Start) -> None:
    manifest = job("full", workers=2)
    limits = manifest["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["ephemeral-storage"] = "20Mi"
    play = start(TRAINING, manifest)
    play.recover(
        "own ephemeral-storage limit exceeded", lambda: faults.fill_disk(play.training, 1, 60 << 20),
        causes=(Cause.STORAGE_EXCEEDED,), replaced={1},
    )  # fmt: skip
    assert play.training.status["restarts"]["counted"] == 1
    assert "Raise that limit" in play.training.status["lastRecovery"]["message"]


def test_ca_that_is_rotated_at_once_stops_no_training_and_no_recovery(two: Play, stage: Stage) -> None:
    """Without a time in which both are trusted: operators read the new one as soon as their pods have it."""
    pods = ("-n", SYSTEM, "get", "pods", "-o", "jsonpath={..metadata.name}")
    operators = stage.testbed.kubectl(*pods)
    old: dict[str, bytes] = {}
    try:
        two.leave_alone("CA rotated", lambda: old.update(faults.renew_certificate(stage.testbed)))
        two.recover("pod deleted after the CA was rotated", ("delete", 1), causes=DELETED, replaced={1})
        assert stage.testbed.kubectl(*pods) == operators
    finally:
        faults.renew_certificate(stage.testbed, old)  # other clients here read it once
        stage.testbed.kubectl("-n", SYSTEM, "rollout", "restart", "deployment/tiercheck-operator")
        stage.wait_for_operators()


def test_device_that_turns_unhealthy_is_told_avoided_and_taken_again_when_it_is_well(
    stage: Stage, start: Start
) -> None:
    testbed, nodes = stage.testbed, stage.testbed.nodes[:-1]
    try:
        for node in nodes:
            node.offer_device("Healthy")
        for node in nodes:
            wait_for(lambda node=node: devices(testbed, node) == "1", 60, f"the device of {node.name}")
        manifest = job("gpu", workers=2)
        manifest["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"][DEVICE] = "1"
        play = start(TRAINING, manifest)
        training, node, began = play.training, play.training.node_of(1), time.time()

        def turn_ill_and_well() -> None:
            node.offer_device("Unhealthy")
            training.wait("it to be told", lambda _: training.reason() == conditions.DEVICE_UNHEALTHY)
            node.offer_device("Healthy")
            training.wait("its end to be told", lambda _: training.reason() != conditions.DEVICE_UNHEALTHY)

        play.leave_alone("a device turns unhealthy, and well again", turn_ill_and_well)
        assert any(DEVICE in said for said in training.told(began, conditions.DEVICE_UNHEALTHY))
        node.offer_device("Unhealthy")
        training.wait("it to be told", lambda _: training.reason() == conditions.DEVICE_UNHEALTHY)
        play.recover("pod with an unhealthy device deleted", ("delete", 1), causes=DELETED, replaced={1})
        assert training.node_of(1) is not node
    finally:
        for node in nodes:
            node.take_device_away()


def devices(testbed: Testbed, node: Node) -> str:
    """How many the kubelet offers."""
    path = "jsonpath={.status.allocatable.example\\.com/device}"
    return testbed.kubectl("get", "node", node.name, "-o", path)


def limit_pods(stage: Stage, namespace: str, pods: int) -> None:
    if not stage.testbed.kubectl("get", "namespace", namespace, "--ignore-not-found"):
        stage.make_namespace(namespace)
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": str(pods)}},
    }  # fmt: skip
    stage.testbed.apply(quota, namespace)


def told(training: Training) -> str:
    """What Placed says of a node that is not ready; empty: nothing."""
    found = training.condition(conditions.PLACED)
    unready = training.reason() == conditions.NODE_NOT_READY
    return f"{found['reason']}: {found['message']}" if unready else ""
