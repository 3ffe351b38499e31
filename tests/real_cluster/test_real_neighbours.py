"""What admins, other teams and the cluster's own services do beside a job: it comes back by itself."""

from __future__ import annotations

import time
import zlib

import faults
import pytest
from play import Play
from report import Report
from stage import TRAINING, Stage, job, label_nodes
from testbed.cluster import Testbed
from testbed.node import Node
from testbed.processes import wait_for
from training import Begin, Training
from unhurt import UnhurtRun

from tiercheck_operator.model import conditions
from tiercheck_operator.model.causes import Cause

DELETED = (Cause.POD_DELETED,)
EVICTED = (Cause.POD_EVICTED,)
COUNTED, DOOMED, UNSAFE = "counted", "doomed", "unsafe"
"""Namespaces of their own."""

pytestmark = pytest.mark.usefixtures("healed")


@pytest.fixture
def two(request: pytest.FixtureRequest, begin: Begin, report: Report) -> Play:
    """Two workers, on their way, under a name that no other test gives: else they would take up its run."""
    name = f"two-{zlib.crc32(request.node.name.encode()):x}"
    return started(begin(TRAINING, job(name, workers=2)), report)


def started(training: Training, report: Report) -> Play:
    play = Play(training, report)
    play.begin()
    return play


def test_containerd_that_is_away_until_its_node_is_not_ready_stops_no_training(
    two: Play, stage: Stage, unhurt: UnhurtRun
) -> None:
    node = two.training.node_of(1)

    def restart() -> None:
        node.kill_containerd()
        two.training.wait(lambda: reason(two.training) == conditions.NODE_NOT_READY, "it to be told")
        node.start_containerd()

    two.leave_alone("containerd of a node away until NotReady", restart, told=lambda: told(two.training))
    unhurt.assert_same(two.training, ranks=2)


def test_pod_deleted_just_before_the_api_server_restarts_is_replaced_once(
    two: Play, stage: Stage, unhurt: UnhurtRun
) -> None:
    training = two.training
    began, old = time.time(), training.pod(1)["metadata"]["name"]

    def hit() -> None:
        stage.testbed.kubectl("-n", TRAINING, "delete", "pod", old, "--wait=false")
        faults.restart_api_server(stage.testbed, 20)

    two.recover("pod deleted, then API server away for 20 s", hit, causes=DELETED, replaced={1})
    assert training.pods_deleted(began) == [old], "a new pod went because its kubelet came late"
    unhurt.assert_same(training, ranks=2)


def test_node_tainted_no_execute_is_left(two: Play, stage: Stage, unhurt: UnhurtRun) -> None:
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
    unhurt.assert_same(two.training, ranks=2)


def test_node_deleted_from_the_api_is_left_and_taken_again_when_it_is_back(
    two: Play, stage: Stage, unhurt: UnhurtRun
) -> None:
    """The machine is well all the time: as an autoscaler or an admin does it by mistake."""
    training, node = two.training, two.training.node_of(1)
    two.recover(
        "node object deleted, its kubelet alive",
        lambda: stage.testbed.kubectl("delete", "node", node.name),
        causes=(Cause.NODE_LOST, *DELETED), replaced={1},
    )  # fmt: skip
    assert training.node_of(1) is not node
    node.kill_kubelet()
    node.start_kubelet()
    wait_for(lambda: stage.testbed.is_ready(node), 120, "the node to be back")
    label_nodes(stage.testbed)
    stage.testbed.kubectl("cordon", *(other.name for other in stage.testbed.nodes if other is not node))
    name = training.pod(1)["metadata"]["name"]
    two.recover(
        "pod deleted, only the node that is back has room",
        lambda: stage.testbed.kubectl("-n", TRAINING, "delete", "pod", name, "--wait=false"),
        causes=DELETED, replaced={1},
    )  # fmt: skip
    assert training.node_of(1) is node
    unhurt.assert_same(training, ranks=2)


def test_node_deleted_and_registered_again_without_its_labels_is_left(
    two: Play, stage: Stage, unhurt: UnhurtRun
) -> None:
    """Its kubelet, which starts anew for that, fails the pods that may not be on such a node."""
    node = two.training.node_of(1)

    def hit() -> None:
        stage.testbed.kubectl("delete", "node", node.name)
        node.kill_kubelet()
        node.start_kubelet()

    two.recover(
        "node object deleted and made anew at once, labels lost", hit,
        causes=(Cause.POD_FAILED, Cause.NODE_LOST, *DELETED), replaced={1},
    )  # fmt: skip
    label_nodes(stage.testbed)
    unhurt.assert_same(two.training, ranks=2)


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
    stage.apply(quota, namespace)


def events(training: Training, since: float, reason: str) -> list[str]:
    return [event["message"] for event in training.events(since) if event["reason"] == reason]


def reason(training: Training) -> str:
    """Of the condition Placed."""
    return str(training.condition(conditions.PLACED).get("reason"))


def told(training: Training) -> str:
    """What Placed says of a node that is not ready; empty: nothing."""
    found = training.condition(conditions.PLACED)
    return f"{found['reason']}: {found['message']}" if reason(training) == conditions.NODE_NOT_READY else ""
