"""The user's other containers stay as they are, or are refused before there is a pod."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from tests.operator.attach import attach_shapes as shapes
from tests.operator.manifests.test_pod_manifest import container, make_job, with_pod
from tests.operator.manifests.test_pod_resources import attached
from tiercheck.protocol import names
from tiercheck_operator.attach.owners import Unattachable
from tiercheck_operator.controller.decide import decide
from tiercheck_operator.controller.status.status import with_refusal
from tiercheck_operator.manifests.pod import build_pod
from tiercheck_operator.manifests.resources import limits_advice
from tiercheck_operator.manifests.template import deadline_problem, pod_problem
from tiercheck_operator.model import conditions
from tiercheck_operator.model.observed import JobView, Observation
from tiercheck_operator.model.parsing import parse_pod
from tiercheck_operator.model.status import Condition, JobRecord

Object = dict[str, Any]
OURS = {names.LIBRARY_CONTAINER, names.NODE_MEMORY_CONTAINER, names.SIDECAR_CONTAINER}
HOOK = {"exec": {"command": ["sh", "-c", "true"]}}
PROBE = {"exec": {"command": ["true"]}, "periodSeconds": 10}

RICH: Object = {
    "shareProcessNamespace": True,
    "terminationGracePeriodSeconds": 77,
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "serviceAccountName": "trainer",
    "schedulerName": "kai",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "hostAliases": [{"ip": "10.0.0.9", "hostnames": ["data"]}],
    "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
    "enableServiceLinks": False,
    "imagePullSecrets": [{"name": "registry"}],
    "overhead": {"cpu": "10m"},
    "preemptionPolicy": "Never",
    "readinessGates": [{"conditionType": "example.com/ready"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    ],
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "initContainers": [
        {
            "name": "fetch",
            "image": "f",
            "command": ["fetch"],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        },
        {
            "name": "proxy",
            "image": "p",
            "restartPolicy": "Always",
            "livenessProbe": PROBE,
            "startupProbe": PROBE,
        },
        {"name": "check", "image": "c", "command": ["check"]},
    ],
    "containers": [
        {
            "name": "logger",
            "image": "l",
            "livenessProbe": PROBE,
            "ports": [{"containerPort": 9090, "name": "http"}],
        },
        {
            "name": "trainer",
            "image": "train:1",
            "command": ["torchrun"],
            "args": ["train.py"],
            "workingDir": "/app",
            "lifecycle": {"preStop": HOOK, "postStart": HOOK},
            "readinessProbe": PROBE,
            "ports": [{"containerPort": 6006}],
            "envFrom": [{"configMapRef": {"name": "settings"}}],
            "resources": {"limits": {"nvidia.com/gpu": "8"}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "stdin": True,
        },
        {"name": "tensorboard", "image": "t", "lifecycle": {"preStop": HOOK}},
    ],
}


def rich() -> JobView:
    return with_pod(make_job(), **copy.deepcopy(RICH))


def problem(job: JobView) -> str:
    pod = job.spec.template["spec"]
    return pod_problem(pod, names.TRAINER_CONTAINER) or deadline_problem(job.spec.template)


def test_all_that_the_user_wrote_is_in_the_pod_in_its_order() -> None:
    job = rich()
    assert problem(job) == ""
    pod = build_pod(job, 0, 0, (), "s:1")
    kubernetes_validate.validate(pod, "1.34", strict=True)
    spec = pod["spec"]
    for name, wrote in RICH.items():
        if name not in ("containers", "initContainers", "volumes"):
            assert spec[name] == wrote, name
    assert spec["volumes"][0] == RICH["volumes"][0]
    theirs = [entry for entry in spec["initContainers"] if entry["name"] not in OURS]
    assert theirs == RICH["initContainers"]
    assert spec["initContainers"][-3:] == theirs, "after ours, so that the sidecar restores while they work"
    assert [entry["name"] for entry in spec["containers"]] == ["logger", "trainer", "tensorboard"]
    for before, after in zip(RICH["containers"], spec["containers"], strict=True):
        wrapped = {"command", "args", "env", "volumeMounts"} if before["name"] == "trainer" else set()
        assert {k: v for k, v in after.items() if k not in wrapped} == {
            k: v for k, v in before.items() if k not in wrapped
        }
    trainer = container(pod, "trainer")
    assert trainer["volumeMounts"][0] == RICH["containers"][1]["volumeMounts"][0]
    assert job.spec.template["spec"] == {**make_job().spec.template["spec"], **RICH}, (
        "and the job is left alone"
    )


async def test_nothing_of_an_attached_pod_is_lost_either() -> None:
    pod = shapes.job_pod(0)
    pod["spec"] = {**copy.deepcopy(RICH), "restartPolicy": "Never"}
    made = attached(pod)["spec"]
    theirs = [entry for entry in made["initContainers"] if entry["name"] not in OURS]
    assert theirs == RICH["initContainers"]
    for name, wrote in RICH.items():
        if name not in ("containers", "initContainers", "volumes"):
            assert made[name] == wrote, name


@pytest.mark.parametrize("probe", ["livenessProbe", "startupProbe"])
def test_probe_that_would_kill_a_trainer_in_the_middle_of_a_restore_is_refused(probe: str) -> None:
    job = rich()
    pod = copy.deepcopy(dict(job.spec.template["spec"]))
    pod["containers"][1][probe] = PROBE
    said = pod_problem(pod, names.TRAINER_CONTAINER)
    assert probe in said
    assert "failurePolicy.hang" in said
    alone = shapes.job_pod(0)
    alone["spec"]["containers"][0][probe] = PROBE
    with pytest.raises(Unattachable, match=probe):
        attached(alone)


@pytest.mark.parametrize("port", [names.CONTROL_PORT, names.EXCHANGE_PORT, names.METRICS_PORT])
def test_port_of_the_sidecar_is_refused_to_others_unless_they_are_in_the_hosts_network(port: int) -> None:
    ports = [{"containerPort": port}]
    for changes in (
        {"containers": [*RICH["containers"][:2], {"name": "x", "image": "x", "ports": ports}]},
        {"initContainers": [{"name": "x", "image": "x", "restartPolicy": "Always", "ports": ports}]},
    ):
        assert str(port) in problem(with_pod(rich(), **changes))
        assert problem(with_pod(rich(), **changes, hostNetwork=True)) == "", (
            "there the sidecar has other ones"
        )
    early = {"initContainers": [{"name": "x", "image": "x", "ports": ports}]}
    assert problem(with_pod(rich(), **early)) == "", "it has ended when the trainer starts"


def test_deadline_of_a_pod_is_refused_for_that_of_the_job() -> None:
    assert "use spec.activeDeadlineSeconds" in problem(with_pod(rich(), activeDeadlineSeconds=60))


def placed(job: JobView) -> Condition | None:
    obs = Observation(now=0.0, job=job, pods=(), nodes={}, reports={}, placement=None)
    status = decide(obs).status
    return None if status is None else status.condition(conditions.PLACED)


def test_job_that_was_begun_before_such_a_refusal_existed_is_looked_after_all_the_same() -> None:
    job = with_pod(rich(), activeDeadlineSeconds=60)
    said = placed(job)
    assert said is not None
    assert said.reason == conditions.INVALID_TEMPLATE
    begun = placed(replace(job, status=JobRecord(attempt=3)))
    assert begun is None or begun.reason != conditions.INVALID_TEMPLATE


def test_debugging_container_in_a_pod_changes_nothing() -> None:
    raw = build_pod(rich(), 0, 0, (), "s:1")
    raw["metadata"]["uid"] = "u"
    raw["status"] = {"phase": "Running", "podIP": "10.0.0.1"}
    before = parse_pod(raw)
    raw["spec"]["ephemeralContainers"] = [{"name": "debugger", "image": "busybox"}]
    raw["status"]["ephemeralContainerStatuses"] = [
        {"name": "debugger", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}
    ]
    assert parse_pod(raw) == before


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        (
            'pods "a" is forbidden: failed quota: team: must specify limits.cpu for: tiercheck-sidecar',
            "limits.cpu",
        ),
        (
            'Pod "a" is invalid: spec.initContainers[1].resources.requests: Invalid value: "160m": must '
            "be less than or equal to cpu "
            "limit of 100m",
            "limits.cpu",
        ),
        (
            'pods "a" is forbidden: [cpu max limit to request ratio per Container is 2, but no limit is '
            "specified or limit is 0]",
            "limits.cpu",
        ),
        (
            'pods "a" is forbidden: minimum cpu usage per Container is 200m, but request is 150m',
            "spec.sidecar.resources.limits.cpu is set",
        ),
        (
            'pods "a" is forbidden: exceeded quota: team, requested: requests.memory=2560Mi, used: '
            "requests.memory=0, limited: "
            "requests.memory=1Gi",
            "tiers.local.sizeLimit",
        ),
        (
            'pods "a" is forbidden: maximum memory usage per Container is 1Gi, but limit is 1610612736',
            "sizeLimit",
        ),
        (
            'pods "a" is forbidden: maximum cpu usage per Pod is 2, but request is 2160m',
            "spec.sidecar.resources",
        ),
        (
            'pods "a" is forbidden: [maximum cpu usage per Container is 400m, but limit is 500m]',
            "limit of 500m",
        ),
        (
            'pods "a" is forbidden: exceeded quota: team, requested: requests.cpu=660m, used: '
            "requests.cpu=0, limited: requests.cpu=500m",
            "spec.sidecar.resources",
        ),
        (
            'pods "a" is forbidden: failed quota: team: must specify limits.ephemeral-storage for: '
            "tiercheck-library,tiercheck-sidecar",
            "ephemeral-storage in spec.sidecar.resources",
        ),
        (
            'pods "a" is forbidden: ephemeral-storage max limit to request ratio per Container is 1, but no '
            "request is specified or request is 0",
            "ephemeral-storage in spec.sidecar.resources",
        ),
    ],
)
def test_refusal_by_a_rule_of_the_namespace_says_which_field_answers_it(sentence: str, word: str) -> None:
    """The sentences are those of Kubernetes 1.36."""
    job = rich()
    obs = Observation(now=0.0, job=job, pods=(), nodes={}, reports={}, placement=None)
    said = with_refusal(obs, job.status, sentence).condition(conditions.PLACED)
    assert said is not None
    assert said.reason == conditions.REFUSED
    assert said.message.startswith(sentence)
    assert word in said.message.removeprefix(sentence)


def test_other_refusals_are_left_in_the_servers_words() -> None:
    assert limits_advice('pods "a" is forbidden: violates PodSecurity "restricted:latest"') == ""
    assert limits_advice('pods "a" is forbidden: exceeded quota: team, requested: pods=1, used: pods=3') == ""


@pytest.mark.parametrize(("limit", "advised"), [("1", False), ("4", True), (None, True)])
def test_container_of_the_user_that_requests_more_than_its_limit_is_no_rule_of_the_namespace(
    limit: str | None, advised: bool
) -> None:
    said = (
        'spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit'
    )
    resources = {"requests": {"cpu": "2"}, "limits": {"cpu": limit} if limit else {}}
    assert bool(limits_advice(said, {"containers": [{"name": "trainer", "resources": resources}]})) is advised
