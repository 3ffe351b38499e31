"""Makes a valid job and a full status, and wrong jobs with the sentence that the user then reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tiercheck.protocol.version import Branch, History, Version
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
    render_record,
)

NOW = "2026-01-01T00:00:00Z"
_STEPS = {"local": 55, "peer": 50, "remote": 40}
REMOVED = object()
"""As a new value: take the field away."""


def job(name: str = "job", **spec: Any) -> dict[str, Any]:
    """A small valid job; `spec` replaces its fields."""
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"workers": 4, "template": template(), **spec},
    }


def template(**trainer: Any) -> dict[str, Any]:
    """A pod template; `trainer` replaces fields of its container."""
    return {
        "spec": {
            "containers": [
                {"name": "trainer", "image": "trainer", "command": ["torchrun", "t.py"], **trainer}
            ]
        }
    }


def changed(raw: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the field at the dotted `path` (list places as numbers) set, or removed."""
    result = copy.deepcopy(dict(raw))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = result
    for parent in parents:
        place = place[parent] if isinstance(parent, int) else place.setdefault(parent, {})
    if value is REMOVED:
        del place[last]
    else:
        place[last] = value
    return result


_TRAINER = "spec.template.spec.containers.0"
_S3 = {"bucket": "checkpoints"}
_DIRECTORY = {"volume": {"persistentVolumeClaim": {"claimName": "c"}}}
_RULE = {"name": "bad-data", "action": "Fail", "onExitCodes": {"operator": "In", "values": [42]}}
_LEVELS = [{"name": "rack", "label": "example.com/rack"}, {"name": "node", "label": "kubernetes.io/hostname"}]
_RULES = "spec.failurePolicy.rules"
_CHECK = "spec.failurePolicy.healthCheck"
_REMOTE = "spec.tiers.remote"
_TOPOLOGY = "spec.topology"
_INIT = "spec.template.spec.initContainers"

_NO_PROBE = "must have no livenessProbe and no startupProbe"
_ONE_OF = "exactly one of onExitCodes, onReasons"
_LEAST, _AT_LEAST_ONE = "greater than or equal to 1", "at least 1 items"
_SUB_PATH = "subPath must be a relative path"

REFUSED_AT_CREATION: list[tuple[str, Any, str]] = [
    ("spec.gang", {"scheduler": "Coscheduling", "queue": "q"}, "gang.queue is for the scheduler Volcano"),
    ("spec.disruptionBudget", {"mode": "Always"}, "mode"),
    ("spec.disruptionBudget", {"holdSeconds": 0}, "holdSeconds"),
    # what is changed, to what, and a part of the sentence
    ("metadata.name", "j" * 41, "at most 40 characters long"),
    ("metadata.name", "my.job", "must be a DNS label"),
    ("metadata.name", "1st-job", "must be a DNS label"),
    ("spec.workers", REMOVED, "workers"),
    ("spec.workers", 0, _LEAST),
    ("spec.workers", 10001, "less than or equal to 10000"),
    ("spec.workers", "four", "must be of type integer"),
    ("spec.spares", -1, "greater than or equal to 0"),
    ("spec.spares", 257, "less than or equal to 256"),
    ("spec.elastic", {}, "minWorkers"),
    ("spec.elastic.minWorkers", 0, _LEAST),
    ("spec.elastic.minWorkers", 5, "elastic.minWorkers must not be greater than workers"),
    ("spec.tiers.local.medium", "Disk", "NodeMemory"),
    ("spec.failurePolicy.capacityTimeoutSeconds", 0, _LEAST),
    ("spec.failurePolicy.capacityTimeoutSeconds", 604801, "less than or equal to 604800"),
    ("spec.failurePolicy.restoreStallSeconds", 9, "greater than or equal to 10"),
    ("spec.failurePolicy.restoreStallSeconds", 86401, "less than or equal to 86400"),
    ("spec.procsPerWorker", 65, "less than or equal to 64"),
    ("spec.procsPerWorker", 0, _LEAST),
    ("spec.managedBy", "somebody", "must be a domain and a name"),
    ("spec.template", REMOVED, "template"),
    ("spec.template.spec.containers", [], _AT_LEAST_ONE),
    (f"{_TRAINER}.name", "main", "needs a container named trainer"),
    (f"{_TRAINER}.image", REMOVED, "the container trainer needs an image"),
    (f"{_TRAINER}.command", REMOVED, "the container trainer needs a command"),
    (f"{_TRAINER}.command", [], "the container trainer needs a command"),
    (f"{_TRAINER}.livenessProbe", {"exec": {"command": ["true"]}}, _NO_PROBE),
    (f"{_TRAINER}.startupProbe", {"tcpSocket": {"port": 1}}, _NO_PROBE),
    (f"{_TRAINER}.ports", [{"containerPort": 80}, {"containerPort": 8471}], "choose other ports"),
    (
        _INIT,
        [{"name": "proxy", "image": "i", "restartPolicy": "Always", "ports": [{"containerPort": 8470}]}],
        "choose other ports",
    ),
    (f"{_TRAINER}.command", ["torchrun", "--nnodes=4", "t.py"], "must not give torchrun --nnodes"),
    (f"{_TRAINER}.command", ["/bin/torchrun", "--rdzv_endpoint", "a:1", "t.py"], "must not give torchrun"),
    (f"{_TRAINER}.args", ["--master-addr", "a", "t.py"], "must not give torchrun"),
    ("spec.template.spec.restartPolicy", "Never", "restartPolicy must be OnFailure"),
    ("spec.template.spec.restartPolicy", "Always", "restartPolicy must be OnFailure"),
    ("spec.template.spec.subdomain", "a", "must not be given, because TierCheck sets them"),
    ("spec.template.spec.automountServiceAccountToken", True, "mounts one by a projected volume"),
    ("spec.template.spec.activeDeadlineSeconds", 60, "use spec.activeDeadlineSeconds, which is for the job"),
    (f"{_TRAINER}.env", [{"name": "PET_NNODES", "value": "2"}], "must not set PET_*"),
    (
        f"{_TRAINER}.env",
        [{"name": "A", "value": "1"}, {"name": "MASTER_ADDR", "value": "h"}],
        "must not set PET_*",
    ),
    (
        f"{_TRAINER}.env",
        [{"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "must not set",
    ),
    (f"{_TRAINER}.env", [{"name": "TIERCHECK_WORKER", "value": "0"}], "must not set PET_*, TIERCHECK_*"),
    (_INIT, [{"name": "tiercheck-library", "image": "i"}], "are taken by TierCheck"),
    (
        "spec.template.spec.volumes",
        [{"name": "tiercheck-memory", "emptyDir": {}}],
        "names of volumes that begin with",
    ),
    (_TOPOLOGY, {"preset": "azure"}, "generic"),
    (_TOPOLOGY, {}, "either preset or levels"),
    (_TOPOLOGY, {"preset": "gke", "kueueTopology": "fabric"}, "either preset or levels or kueueTopology"),
    (_TOPOLOGY, {"kueueTopology": "fabric", "levels": _LEVELS}, "only one of them"),
    (_TOPOLOGY, {"preset": "gke", "levels": _LEVELS}, "either preset or levels"),
    (_TOPOLOGY, {"levels": []}, _AT_LEAST_ONE),
    (_TOPOLOGY, {"levels": [*_LEVELS[:1], *_LEVELS[:1]]}, "names of topology.levels must differ"),
    (
        _TOPOLOGY,
        {"levels": [{"name": "a", "label": "x/y"}, {"name": "b", "label": "x/y"}]},
        "labels of topology",
    ),
    (_TOPOLOGY, {"levels": _LEVELS[::-1]}, "can only be the last of topology.levels"),
    (
        _TOPOLOGY,
        {"levels": [{"name": "host", "label": "x/y"}]},
        "belongs to the label kubernetes.io/hostname",
    ),
    (_TOPOLOGY, {"levels": [{"name": "Rack 1", "label": "x/y"}]}, "the name of a level must be"),
    (_TOPOLOGY, {"levels": [{"name": "rack", "label": "not a label"}]}, "must be a label's key"),
    (_TOPOLOGY, {"levels": [{"name": f"l{n}", "label": f"x/l{n}"} for n in range(9)]}, "at most 8 items"),
    ("spec.checkpoint.snapshot.everySteps", 0, _LEAST),
    ("spec.tiers.local.sizeLimit", "64 GB", "sizeLimit must be a quantity above zero"),
    ("spec.tiers.local.sizeLimit", "0", "sizeLimit must be a quantity above zero"),
    ("spec.tiers.local.sizeLimit", "-1Gi", "sizeLimit must be a quantity above zero"),
    ("spec.tiers.peer.copies", 4, "copies must be smaller than workers"),
    ("spec.tiers.peer.copies", -1, "greater than or equal to 0"),
    ("spec.checkpoint.delta.mode", "Always", "Replay"),
    ("spec.checkpoint.sanityGate", "Strict", "Finite"),
    ("spec.checkpoint.verify", "Everything", "Sampled"),
    ("spec.checkpoint.stateSize", "24 GB", "stateSize must be a quantity above zero"),
    ("spec.tiers.peer.bandwidth", "0", "bandwidth must be a quantity"),
    ("spec.tiers.peer.encryption", "None", "Authenticated"),
    ("spec.tiers.peer.transport", "RDMA", "UCX"),
    ("spec.tiers.peer.interfaces", ["10.20.0.0/33"], "must be the name of an interface"),
    ("spec.tiers.peer.interfaces", ["10.20.0.7"], "such as net1, or a CIDR"),
    ("spec.tiers.peer.interfaces", ["fd00::/129"], "must be the name of an interface"),
    ("spec.tiers.peer.interfaces", ["a-name-that-is-too-long"], "must be the name of an interface"),
    ("spec.tiers.peer.interfaces", ["net1", "net1"], "Duplicate value"),
    ("spec.tiers.peer.parity", {"data": 1, "parity": 1}, "greater than or equal to 2"),
    ("spec.tiers.peer.parity", {"data": 2}, "parity"),
    ("spec.tiers.peer", {"copies": 1, "parity": {"data": 2, "parity": 1}}, "copies or parity, not both"),
    ("spec.tiers.peer.parity", {"data": 4, "parity": 1}, "needs at least data + parity workers"),
    ("spec.tiers.peer.spread.mode", "Strict", "Required"),
    (
        "spec.tiers.peer.spread.level",
        "leaf",
        "must be the name of a level in topology.levels, or of the preset",
    ),
    (_REMOTE, {}, "needs either s3 or directory"),
    (_REMOTE, {"s3": _S3, "directory": _DIRECTORY}, "needs either s3 or directory, and not both"),
    (_REMOTE, {"s3": {}}, "bucket"),
    (_REMOTE, {"s3": {"bucket": "s3://checkpoints/a"}}, "without s3:// and without a path"),
    (_REMOTE, {"s3": {"bucket": "b--use1-az4--x-s3"}}, "give a general purpose bucket"),
    (_REMOTE, {"s3": {**_S3, "endpoint": "minio:9000"}}, "endpoint must be a URL"),
    (_REMOTE, {"s3": {**_S3, "prefix": "/a"}}, "prefix must not begin or end with"),
    (_REMOTE, {"s3": {**_S3, "credentialsSecretName": "A_B"}}, "must be the name of a Secret"),
    (_REMOTE, {"s3": {**_S3, "addressing": "path"}}, "Virtual"),
    (
        _REMOTE,
        {"s3": {**_S3, "encryption": {"type": "SSE-S3", "kmsKeyId": "k"}}},
        "needs encryption of type: SSE-KMS",
    ),
    (_REMOTE, {"s3": {**_S3, "storageClass": "GLACIER"}}, "an archive cannot be restored from"),
    (_REMOTE, {"s3": {**_S3, "caBundle": "x", "caBundleConfigMap": {"name": "c", "key": "k"}}}, "not both"),
    ("spec.sidecar", {"env": [{"name": "TIERCHECK_JOB", "value": "x"}]}, "are TierCheck's own"),
    (_REMOTE, {"directory": {"volume": {}}}, "at least 1 properties"),
    (_REMOTE, {"directory": {**_DIRECTORY, "subPath": "a/../b"}}, _SUB_PATH),
    (_REMOTE, {"directory": {**_DIRECTORY, "subPath": "/a"}}, _SUB_PATH),
    (_REMOTE, {"s3": _S3, "keepFor": "3 days"}, "keepFor must be a duration"),
    (_REMOTE, {"s3": _S3, "keepFor": "0h"}, "keepFor must be a duration"),
    (_REMOTE, {"s3": _S3, "bandwidth": "fast"}, "bandwidth must be a quantity"),
    (_REMOTE, {"s3": _S3, "keep": 0}, _LEAST),
    ("spec.restore", {"from": {}}, "step"),
    ("spec.restore.from.step", 0, _LEAST),
    ("spec.restore.proveSteps", -1, "greater than or equal to 0"),
    ("spec.restore.proveSteps", 11, "less than or equal to 10"),
    ("spec.restore.rehearseEvery", "0m", "rehearseEvery must be a duration"),
    ("spec.restore.rehearseEvery", "Never", "rehearseEvery must be a duration"),
    ("spec.failurePolicy.maxRestarts", -1, "greater than or equal to 0"),
    ("spec.failurePolicy.rollbackAfterNonFinite", 0, _LEAST),
    ("spec.failurePolicy.resetAfterSeconds", 0, _LEAST),
    ("spec.failurePolicy.hang.mode", "Never", "Restart"),
    ("spec.failurePolicy.hang.stepFactor", 1, "greater than or equal to 2"),
    ("spec.failurePolicy.hang.minSeconds", 0, _LEAST),
    ("spec.failurePolicy.hang.firstStepSeconds", 0, _LEAST),
    (_CHECK, {"timeoutSeconds": 5}, "command"),
    (_CHECK, {"command": []}, _AT_LEAST_ONE),
    (_CHECK, {"command": [""]}, "command must begin with the program to run"),
    (_CHECK, {"command": ["true"], "timeoutSeconds": 0}, _LEAST),
    (_CHECK, {"command": ["true"], "timeoutSeconds": 3601}, "less than or equal to 3600"),
    (_RULES, [_RULE, _RULE], "names of failurePolicy.rules must differ"),
    (_RULES, [{**_RULE, "name": f"r{n}"} for n in range(21)], "at most 20 items"),
    (_RULES, [{**_RULE, "name": "1st"}], "the name of a rule must be"),
    (_RULES, [{**_RULE, "action": "Ignore"}], "RestartIgnoringLimit"),
    (_RULES, [{"name": "a", "action": "Fail"}], _ONE_OF),
    (_RULES, [{**_RULE, "onReasons": ["PodEvicted"]}], _ONE_OF),
    (_RULES, [{**_RULE, "onExitCodes": {"operator": "In", "values": []}}], _AT_LEAST_ONE),
    (_RULES, [{**_RULE, "onExitCodes": {"operator": "In", "values": [0]}}], _LEAST),
    (_RULES, [{**_RULE, "onExitCodes": {"operator": "Is", "values": [3]}}], "NotIn"),
    (_RULES, [{"name": "a", "action": "Fail", "onReasons": ["oom killed"]}], "onReasons"),
    (_RULES, [{"name": "a", "action": "Fail", "onNodeConditions": [{"type": ""}]}], "onNodeConditions"),
    ("spec.activeDeadlineSeconds", 0, _LEAST),
    ("spec.ttlSecondsAfterFinished", -1, "greater than or equal to 0"),
]

TOGETHER: list[tuple[dict[str, Any], str]] = [
    # fields that do not go together, and a part of the sentence
    (
        {"checkpoint": {"snapshot": {"everySteps": 50}}, "tiers": {"remote": {"s3": _S3, "everySteps": 75}}},
        "must be a multiple of checkpoint.snapshot.everySteps",
    ),
    (
        {"checkpoint": {"sanityGate": "Off"}, "failurePolicy": {"rollbackAfterNonFinite": 5}},
        "rollbackAfterNonFinite needs checkpoint.sanityGate Finite",
    ),
    (
        {"tiers": {"local": {"sizeLimit": "64Gi"}}, "sidecar": {"resources": {"limits": {"memory": "64Gi"}}}},
        "sidecar.resources.limits.memory must be at least tiers.local.sizeLimit and 512Mi",
    ),
    (
        {"sidecar": {"resources": {"requests": {"memory": "1Gi"}}}},
        "sidecar.resources.requests.memory must be at least tiers.local.sizeLimit and 512Mi",
    ),
    (
        {"sidecar": {"resources": {"requests": {"cpu": "much"}}}},
        "spec.sidecar.resources.requests.cpu in body should match",
    ),
]

ACCEPTED: list[tuple[str, Any]] = [
    ("spec.sidecar", {"resources": {"requests": {"cpu": 2, "memory": "9Gi"}, "limits": {"cpu": "2500m"}}}),
    ("spec.sidecar", {"resources": {"limits": {"cpu": "1", "ephemeral-storage": "1Gi"}}}),
    ("spec.sidecar", {}),
    (f"{_TRAINER}.ports", [{"containerPort": 8469, "name": "a"}, {"containerPort": 8473, "protocol": "UDP"}]),
    (f"{_TRAINER}.command", ["python3", "t.py", "--nnodes", "4"]),
    (f"{_TRAINER}.command", ["torchrun", "--nproc-per-node=2", "t.py", "--lr", "1"]),
    (f"{_TRAINER}.command", ["torchrun", "t.py", "--master-weights", "fp32"]),
    ("spec.template.spec.restartPolicy", "OnFailure"),
    ("spec.template.spec.automountServiceAccountToken", False),
    (_INIT, [{"name": "fetch", "image": "i", "ports": [{"containerPort": 8470}]}]),
    (f"{_TRAINER}.readinessProbe", {"exec": {"command": ["true"]}}),
    (f"{_TRAINER}.lifecycle", {"preStop": {"exec": {"command": ["true"]}}}),
    (
        "spec.template.spec.containers",
        [
            *template()["spec"]["containers"],
            {"name": "logger", "image": "l", "livenessProbe": {"tcpSocket": {"port": 1}}},
        ],
    ),
    ("spec.checkpoint", {"delta": {"mode": "None"}, "sanityGate": "Off", "stateSize": "24Gi"}),
    ("spec.checkpoint.delta.mode", "Replay"),
    (f"{_TRAINER}.env", [{"name": "TIERCHECK_WARM", "value": "0"}]),
    ("spec.tiers.peer", {"parity": {"data": 2, "parity": 1}, "bandwidth": "2Gi"}),
    ("spec.tiers.peer", {"encryption": "Required"}),
    (_REMOTE, {"s3": _S3, "everySteps": 75}),
    (_REMOTE, {"s3": {"bucket": "b--x-s3", "endpoint": "https://minio.storage.svc:9000"}}),
    (_REMOTE, {"s3": _S3, "keepFor": "7d12h"}),
    (
        "spec.tiers.remote.s3",
        {
            **_S3,
            "caBundleConfigMap": {"name": "trust", "key": "ca.crt"},
            "addressing": "Virtual",
            "encryption": {"type": "SSE-KMS", "kmsKeyId": "arn:aws:kms:eu-west-1:1:key/k"},
            "requesterPays": True,
            "storageClass": "STANDARD_IA",
        },
    ),
    (
        "spec.tiers.remote.s3",
        {**_S3, "caBundle": "-----BEGIN CERTIFICATE-----", "encryption": {"type": "SSE-S3"}},
    ),
    (
        "spec.sidecar",
        {"env": [{"name": "NO_PROXY", "value": ".svc"}, {"name": "A", "valueFrom": {"fieldRef": {}}}]},
    ),
    ("spec.failurePolicy.rollbackAfterNonFinite", 5),
    ("spec.failurePolicy.resetAfterSeconds", 2147483647),
    ("spec.failurePolicy.hang", {"mode": "Off"}),
    (_CHECK, {"command": ["nvidia-smi", "-L"]}),
    (_CHECK, {"command": ["sh", "-c", "df /data"], "timeoutSeconds": 10}),
    ("spec.failurePolicy.hang", {"stepFactor": 50, "minSeconds": 60, "firstStepSeconds": 7200}),
    (
        _RULES,
        [
            _RULE,
            {"name": "memory", "action": "Restart", "onReasons": ["OOMKilled", "PodEvicted"]},
            {
                "name": "gpu",
                "action": "RestartIgnoringLimit",
                "onNodeConditions": [{"type": "example.com/Xid"}],
            },
            {"name": "rest", "action": "Restart", "onExitCodes": {"operator": "NotIn", "values": [1, 255]}},
        ],
    ),
    ("spec.activeDeadlineSeconds", 86400),
    ("metadata.name", "j" * 40),
    ("spec.workers", 1),
    ("spec.spares", 256),
    ("spec.elastic.minWorkers", 4),
    ("spec.elastic.minWorkers", 1),
    ("spec.tiers.local.medium", "NodeMemory"),
    ("spec.failurePolicy.capacityTimeoutSeconds", 600),
    ("spec.failurePolicy.restoreStallSeconds", 600),
    ("spec.tiers.peer.copies", 0),
    ("spec.tiers.peer.copies", 3),
    ("spec.tiers.peer.spread.level", "rack"),
    ("spec.tiers.peer.spread.level", "host"),
    (_TOPOLOGY, {"preset": "topograph"}),
    (_TOPOLOGY, {"preset": "coreweave"}),
    (_TOPOLOGY, {"kueueTopology": "fabric"}),
    (_TOPOLOGY, {"levels": _LEVELS}),
    (_TOPOLOGY, {"levels": _LEVELS[:1]}),
    ("spec.managedBy", "kueue.x-k8s.io/multikueue"),
    ("spec.suspend", True),
    ("spec.tiers.local.sizeLimit", "0.5Gi"),
    ("spec.tiers.local.sizeLimit", "1073741824"),
    (_REMOTE, {"s3": {**_S3, "endpoint": "http://127.0.0.1:9000/path"}}),
    (_REMOTE, {"directory": {**_DIRECTORY, "subPath": "a/..b/c"}, "everySteps": 50, "bandwidth": "1.5Gi"}),
    ("spec.restore.from.step", 1200),
    ("spec.restore.proveSteps", 1),
    ("spec.restore.rehearseEvery", "1h30m"),
    ("spec.restore.rehearseEvery", "0"),
    ("spec.restore.rehearseEvery", "Off"),
    ("spec.failurePolicy.maxRestarts", 0),
    (f"{_TRAINER}.env", [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "RANKING", "value": "1"}]),
    (f"{_TRAINER}.resources", {"limits": {"cpu": "1"}}),
    ("spec.template.spec.nodeSelector", {"pool": "gpu"}),
]

REFUSED_AS_CHANGE: list[tuple[str, Any, str]] = [
    ("spec.gang", {"scheduler": "Volcano"}, "gang cannot change while the job runs"),
    ("spec.workers", 5, "workers cannot change while the job runs; set spec.suspend to true first"),
    (
        "spec.procsPerWorker",
        2,
        "procsPerWorker cannot change while the job runs; set spec.suspend to true first",
    ),
    ("spec.managedBy", "example.com/other", "managedBy cannot change; delete the job and create it again"),
]
"""Changes of a job that is not suspended."""

ACCEPTED_AS_CHANGE: list[tuple[str, Any]] = [
    ("spec.sidecar", {"resources": {"requests": {"cpu": "500m"}}}),
    ("spec.disruptionBudget", {"mode": "Off"}),
    ("spec.spares", 2),
    ("spec.elastic", {"minWorkers": 2}),
    ("spec.tiers.local.medium", "NodeMemory"),
    ("spec.suspend", True),
    ("spec.checkpoint.snapshot.everySteps", 10),
    ("spec.checkpoint.delta.mode", "None"),
    ("spec.tiers.peer.parity", {"data": 2, "parity": 1}),
    ("spec.failurePolicy.maxRestarts", 3),
    (_RULES, [_RULE]),
    ("spec.failurePolicy.hang.mode", "Off"),
    (_CHECK, {"command": ["true"]}),
    ("spec.activeDeadlineSeconds", 60),
]


def full_record() -> JobRecord:
    """Everything that the controller can keep."""
    return JobRecord(
        observed_generation=1,
        attempt=3,
        phase="Running",
        members="digest",
        history=History((Branch(1, 0), Branch(3, 40, ranks=8))),
        crashes=1,
        counted=1,
        crash_step=30,
        disruptions=1,
        step=57,
        step_seconds=0.25,
        tiers={name: TierRecord(step, NOW, 57 - step) for name, step in _STEPS.items()},
        proofs={name: ProofRecord(step, NOW) for name, step in _STEPS.items()},
        placement=PlacementRecord("hash", "rack", ("any one rack", "any one host"), 0, complete=True),
        size=SizeRecord(3, 1.5),
        spares=SparesRecord(2, 1),
        checkpoint=CheckpointRecord(3, "Off", "why"),
        memory=MemoryRecord(4, 3, 2, 1),
        hang=HangRecord(1, "n", 1),
        places=(PlaceRecord("n", 2, "the pod failed", 10.5, 9.0),),
        failed_start=FailedStartRecord(1, "n", 1, (2,)),
        recovery=Recovery("PodLost", "pod j-2-0 is gone", 1.5, 2.5, 3, "because", 40, 1, 3, 3.5, 4.5, 5.5,
            failed_versions=(Version(45, 1), Version(45, 1)), facts=Facts(1, ("Evicted",), ("n",)),
            rule="r", tries=1, reached=3, noticed_at=1.5),
        last_recovery={
            "attempt": 3, "cause": "NodeLost", "message": "node n-1 is lost", "reason": "because",
            "rule": "r", "deltas": 3, "rebuilt": 1, "tiers": {"local": 3, "peer": 1, "remote": 0},
            "step": 40, "lostSteps": 3, "detectSeconds": 1.0, "restoreSeconds": 2.25,
            "totalSeconds": 4.0, "time": NOW,
        },
        started=NOW,
        completed=NOW,
        conditions=(
            Condition("Running", True, "Released", "The trainers were released.", NOW, 1),
            Condition("Protected", True, "CopiesComplete", "Every copy is made.", NOW, 1),
        ),
    )  # fmt: skip


def full_status() -> dict[str, Any]:
    """That, as the controller writes it."""
    return render_record(full_record())
