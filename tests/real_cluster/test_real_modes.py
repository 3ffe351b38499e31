"""Spares, node memory, attached pods, the orderly end and the release work on the real cluster."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import yaml
from play import Play, Report, Row
from stage import SYSTEM, TRAINING, Stage, indexed_job, job, policy, wait_until_gone
from testbed.cluster import Testbed
from testbed.processes import wait_for
from training import Begin, LossReader, Training

from tiercheck_local.stage import condition_is
from tiercheck_operator.model.conditions import Cause

PRIVILEGED = "memory-of-nodes"
"""A namespace that allows hostPath volumes, as NodeMemory needs them."""

NEIGHBOUR = "next-door"
"""Where another team works."""


def test_spare_takes_over(begin: Begin, report: Report) -> None:
    training = begin(TRAINING, job("spared", workers=2, spares=1))
    training.wait_until_protected()
    training.wait("the spare to be ready", lambda status: condition_is(status, "SparesReady"))
    Play(training, report).recover(
        "pod deleted, a spare waits", ("force delete", 1),
        causes=(Cause.POD_DELETED,), replaced={1}, bound=5, restarted=1,
    )  # fmt: skip
    assert "-spare-" in training.pod_of(1)


def test_spare_takes_over_from_a_node_without_power(begin: Begin, report: Report, healed: Testbed) -> None:
    """The other worker's process stays: nothing closes its connections to the lost one."""
    training = begin(TRAINING, job("unplugged", workers=2, spares=1))
    training.wait_until_protected()
    training.wait("the spare to be ready", lambda status: condition_is(status, "SparesReady"))
    Play(training, report).recover(
        "node, power cut, a spare waits", ("node", 1),
        causes=(Cause.NODE_SILENT, Cause.NODE_LOST), replaced={1}, bound=5, restarted=1,
    )  # fmt: skip
    assert "-spare-" in training.pod_of(1)


def test_memory_of_a_node_outlives_the_pod(stage: Stage, begin: Begin, report: Report) -> None:
    stage.make_namespace(PRIVILEGED, "privileged")
    manifest = job("kept", workers=2)
    manifest["spec"]["tiers"]["local"]["medium"] = "NodeMemory"
    training = begin(PRIVILEGED, manifest)
    training.wait_until_protected()
    row = Play(training, report).recover(
        "pod deleted, NodeMemory", ("force delete", 1),
        causes=(Cause.POD_DELETED,), replaced={1}, bound=10,
    )  # fmt: skip
    assert row.tiers == "2 local"


def test_node_that_fails_the_jobs_own_check_is_left_before_anybody_trains(begin: Begin) -> None:
    manifest = job("checked", workers=2)
    check = 'case "$HOSTNAME" in *-1-0) echo "no CUDA-capable device"; exit 1;; esac'
    manifest["spec"]["failurePolicy"] = {"healthCheck": {"command": ["sh", "-c", check]}}
    began = time.time()
    training = begin(TRAINING, manifest)
    training.wait_until_protected()
    places = {
        sighting.body["metadata"]["name"]: sighting.body["spec"].get("nodeName")
        for sighting in training.pods_seen
    }
    assert places["checked-1-0"] not in (None, training.node_of(1).name), (
        f"the worker went nowhere else: {places}"
    )
    assert training.pod_of(0) == "checked-0-0", "the worker whose check passed was moved too"
    said = training.told(began, "HealthCheckFailed")
    assert any("no CUDA-capable device" in message for message in said), said
    assert training.steps[0].step == 1
    assert not (training.status.get("restarts") or {}).get("counted"), "it counts as a restart"


def test_strangers_pod_that_says_it_is_a_worker_changes_nothing(stage: Stage, begin: Begin) -> None:
    """All of a worker's labels and annotations, in the job's own namespace and in another one. The chart's
    policy refuses such pods; where an admin left it out, they are nobody's."""
    training = begin(TRAINING, job("left-alone", workers=2))
    training.wait_until_protected()
    attempt, ours = training.attempt, [pod["metadata"]["uid"] for pod in training.pods()]
    stage.make_namespace(NEIGHBOUR, "restricted")
    strangers = [_stranger(training.pod(1), namespace) for namespace in (NEIGHBOUR, TRAINING)]
    for stranger in strangers:
        assert "operator alone" in _refusal(stage, stranger), "the policy let it in"
    stage.upgrade(reserved={"enabled": False})
    for stranger in strangers:
        wait_for(lambda stranger=stranger: not _refusal(stage, stranger), 60, "the policy to be gone")
    reached = training.step
    training.wait_for_step(reached + 60)
    assert training.attempt == attempt
    assert training.condition("Protected")["status"] == "True"
    assert not [
        pod
        for pod in training.pods()
        if pod["metadata"]["uid"] in ours and "deletionTimestamp" in pod["metadata"]
    ]
    for stranger in strangers:
        place = stranger["metadata"]["namespace"]
        stage.testbed.kubectl("-n", place, "delete", "pod", "stranger")  # fails if somebody else did
    stage.upgrade()


def _stranger(worker: dict[str, Any], namespace: str) -> dict[str, Any]:
    known = worker["metadata"]
    pod = job("x")["spec"]["template"]["spec"]
    container = {**pod["containers"][0], "command": ["sleep", "infinity"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "stranger", "namespace": namespace, "labels": known["labels"],
            "annotations": known.get("annotations", {}),
        },
        "spec": {**pod, "containers": [container], "terminationGracePeriodSeconds": 0},
    }  # fmt: skip


def _refusal(stage: Stage, manifest: dict[str, Any]) -> str:
    """Why the API server does not make it; empty: it does."""
    command = ["kubectl", f"--kubeconfig={stage.testbed.kubeconfig}", "create", "-f", "-"]
    done = subprocess.run(
        command, input=yaml.safe_dump(manifest), text=True, capture_output=True, check=False
    )
    return done.stderr


def test_completed_job_leaves_its_last_step_in_the_bucket_and_ends_within_seconds(
    begin: Begin, report: Report, losses: LossReader
) -> None:
    training = begin(TRAINING, job("finite", workers=3, steps=60))
    training.wait("the last step", lambda _: losses.digest(training.key))
    ended = time.time()
    training.wait_for_phase("Completed")
    training.wait("every pod to end", lambda _: all(_has_ended(pod) for pod in training.pods()), 60)
    seconds = time.time() - ended
    assert training.status["tiers"]["remote"]["step"] == 60
    assert training.status["progress"]["step"] == 60
    row = Row("completion, with a remote tier", "Completed", again=0, lost_told=0, ours=seconds, bound=20)
    report.add(row)


def test_pods_of_a_job_that_is_not_ours_come_back(stage: Stage, losses: LossReader, report: Report) -> None:
    """Attach mode, with the real Job controller, the real webhook and the Eviction API."""
    testbed = stage.testbed
    stage.upgrade(attach={"enabled": True})
    training = Training(testbed, losses, TRAINING, "job-attached", logs="attached")
    training.apply(policy())
    testbed.apply(indexed_job("attached", steps=400), TRAINING)
    training.wait_until_protected()
    Play(training, report).recover(
        "pod evicted, attach mode", ("evict", 1),
        causes=(Cause.POD_EVICTED, Cause.POD_DELETED), replaced={1},
    )  # fmt: skip
    training.wait_for_phase("Completed")
    done = '{.status.conditions[?(@.type=="Complete")].status}'
    training.wait(
        "the Job to be complete",
        lambda _: (
            testbed.kubectl("-n", TRAINING, "get", "job", "attached", "-o", f"jsonpath={done}") == "True"
        ),
    )
    testbed.kubectl("-n", TRAINING, "delete", "job", "attached")
    wait_until_gone(testbed, TRAINING, "pods,tcj")
    training.stop_watching()
    stage.upgrade()
    assert not testbed.kubectl("get", "mutatingwebhookconfigurations", "-o", "name").strip()
    owner = "jsonpath={.metadata.ownerReferences[*].kind}"
    kept = testbed.kubectl("-n", SYSTEM, "get", "secret", "tiercheck-attach", "-o", owner)
    assert kept == "Deployment", "its Secret goes with the operator"


def _has_ended(pod: dict[str, Any]) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


# The release goes and comes back while a job trains, and at the end nothing is left of it: in no other file
# may a test come later.

_DEFINITIONS = "tiercheckjobs.tiercheck.io", "tiercheckpolicies.tiercheck.io"


def test_uninstalled_release_leaves_jobs_training_and_nothing_of_its_own(
    stage: Stage, losses: LossReader, report: Report
) -> None:
    training = Training(stage.testbed, losses, TRAINING, "orphan")
    training.apply(job("orphan", workers=2))

    def uninstall() -> None:
        stage.helm.uninstall("tiercheck")
        wait_until_gone(stage.testbed, SYSTEM, "pods")
        kinds = "leases.coordination.k8s.io,secrets,configmaps,services"
        left = stage.testbed.kubectl("-n", SYSTEM, "get", kinds, "-o", "name").split()
        assert not [name for name in left if "tiercheck" in name], left
        at = training.step
        training.wait_for_step(at + 10)
        stage.install()

    Play(training, report).leave_alone("helm uninstall (definitions are kept), then install", uninstall)
    stage.testbed.kubectl("-n", TRAINING, "delete", "tcj", "orphan")
    training.stop_watching()
    wait_until_gone(stage.testbed, TRAINING, "pods,tcj")


def test_definitions_go_when_they_are_deleted(stage: Stage) -> None:
    stage.helm.uninstall("tiercheck")
    stage.testbed.kubectl("delete", "crd", *_DEFINITIONS)
    left = stage.testbed.kubectl(
        "get", "crd,clusterroles,clusterrolebindings,validatingwebhookconfigurations", "-o", "name"
    )
    assert "tiercheck" not in left
