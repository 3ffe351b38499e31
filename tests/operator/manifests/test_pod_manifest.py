"""A job's template becomes a pod that Kubernetes accepts, with what the user wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from tiercheck.protocol import names
from tiercheck.protocol.directive import DeltaMode, HangLimits, Policy
from tiercheck_operator.controller.attempt.directives import build_policy
from tiercheck_operator.manifests.owned import build_placement, build_service, parse_placement
from tiercheck_operator.manifests.pod import build_pod
from tiercheck_operator.manifests.template import template_problem
from tiercheck_operator.model.observed import ANNOTATION_AVOIDED, ANNOTATION_GIVEN_UP, JobView
from tiercheck_operator.model.parsing import parse_job, parse_pod
from tiercheck_operator.model.saved_placement import CodeGroup, SavedMember, SavedPlacement
from tiercheck_operator.model.serialization import parse_duration, parse_quantity

ALLOWED_VOLUMES = {
    *(
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    )
}
SECURE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def make_job(**spec: Any) -> JobView:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "trainer",
                    "image": "train:1",
                    "command": ["torchrun"],
                    "args": ["train.py", "--lr=1"],
                    "env": [{"name": "PYTHONPATH", "value": "/app"}, {"name": "LR", "value": "1"}],
                    "securityContext": SECURE,
                },
                {"name": "logger", "image": "l", "securityContext": SECURE},
            ],
            "initContainers": [{"name": "fetch", "image": "f", "securityContext": SECURE}],
        },
    }
    raw = {
        "metadata": {"name": "gpt", "namespace": "ml", "uid": "u-1", "generation": 1, "resourceVersion": "7"},
        "spec": {
            "workers": 2,
            "template": template,
            "tiers": {
                "local": {"sizeLimit": "2Gi"},
                "remote": {"s3": {"bucket": "b", "prefix": "p", "credentialsSecretName": "aws"}},
            },
            **spec,
        },
    }
    return parse_job(raw)


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    spec = pod["spec"]
    return next(entry for entry in [*spec["initContainers"], *spec["containers"]] if entry["name"] == name)


def env(entry: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in entry["env"]}


@pytest.mark.parametrize("avoid", [(), ("n1", "n2")])
def test_kubernetes_accepts_pod_and_service(avoid: tuple[str, ...]) -> None:
    for manifest in (build_pod(make_job(), 1, 3, avoid, "sidecar:1"), build_service(make_job())):
        kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_pod_passes_restricted_pod_security_if_the_template_does() -> None:
    pod = build_pod(make_job(), 0, 0, (), "sidecar:1")
    spec = pod["spec"]
    assert not any(key in spec for key in ("hostNetwork", "hostPID", "hostIPC"))
    for volume in spec["volumes"]:
        assert set(volume) - {"name"} <= ALLOWED_VOLUMES
    shared = spec["securityContext"]
    for entry in [*spec["initContainers"], *spec["containers"]]:
        own = entry["securityContext"]
        assert own["allowPrivilegeEscalation"] is False, entry["name"]
        assert own["capabilities"]["drop"] == ["ALL"]
        assert own.get("runAsNonRoot", shared.get("runAsNonRoot")) is True
        assert own.get("seccompProfile", shared.get("seccompProfile")) == {"type": "RuntimeDefault"}
        assert own.get("runAsUser", shared.get("runAsUser")) != 0
    for name in (names.SIDECAR_CONTAINER, names.LIBRARY_CONTAINER):
        assert container(pod, name)["securityContext"]["readOnlyRootFilesystem"] is True


def test_sidecar_of_a_pod_that_runs_as_root_does_not_run_as_root() -> None:
    pod = build_pod(with_pod(make_job(), securityContext={"runAsUser": 0}), 0, 0, (), "sidecar:1")
    assert container(pod, names.SIDECAR_CONTAINER)["securityContext"]["runAsUser"] != 0
    assert pod["spec"]["securityContext"]["runAsUser"] == 0


def with_pod(job: JobView, **changes: Any) -> JobView:
    """`job` with parts of its template's pod replaced."""
    return replace(job, spec=replace(job.spec, template={"spec": {**job.spec.template["spec"], **changes}}))


def test_users_own_volumes_are_not_walked_through_at_every_start() -> None:
    shared = build_pod(make_job(), 0, 0, (), "sidecar:1")["spec"]["securityContext"]
    assert (shared["fsGroup"], shared["fsGroupChangePolicy"]) == (65532, "OnRootMismatch")
    theirs = {"fsGroup": 2000, "runAsUser": 1000}
    pod = build_pod(with_pod(make_job(), securityContext=theirs), 0, 0, (), "sidecar:1")
    assert pod["spec"]["securityContext"] == theirs


@pytest.mark.parametrize(
    ("remote", "given", "grace"), [(True, None, 300), (False, None, 30), (True, 60, 60), (False, 5, 5)]
)
def test_sidecar_gets_time_for_the_last_upload_and_knows_how_much(
    remote: bool, given: int | None, grace: int
) -> None:
    job = make_job() if remote else make_job(tiers={"local": {"sizeLimit": "2Gi"}})
    if given is not None:
        job = with_pod(job, terminationGracePeriodSeconds=given)
    pod = build_pod(job, 0, 0, (), "sidecar:1")
    assert pod["spec"]["terminationGracePeriodSeconds"] == grace
    assert env(container(pod, names.SIDECAR_CONTAINER))[names.ENV_GRACE_SECONDS] == str(grace)


def trainer_env(*theirs: dict[str, Any]) -> list[dict[str, Any]]:
    containers = [{**make_job().spec.template["spec"]["containers"][0], "env": list(theirs)}]
    pod = build_pod(with_pod(make_job(), containers=containers), 0, 0, (), "sidecar:1")
    kubernetes_validate.validate(pod, "1.33", strict=True)
    return list(container(pod, names.TRAINER_CONTAINER)["env"])


HIDING = ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH", "PYTHONSTARTUP", "PYTHONSAFEPATH", "PYTHONNOUSERSITE")


def test_sidecar_takes_a_negative_grace_period_for_a_second_as_the_api_server_does() -> None:
    pod = build_pod(with_pod(make_job(), terminationGracePeriodSeconds=-1), 0, 0, (), "sidecar:1")
    assert env(container(pod, "tiercheck-sidecar"))["TIERCHECK_GRACE_SECONDS"] == "1"


def test_variables_of_image_and_config_maps_are_hidden_by_none_of_ours() -> None:
    assert all(entry["name"].startswith("TIERCHECK_") for entry in trainer_env())


@pytest.mark.parametrize("name", HIDING)
def test_variables_of_the_template_stay_as_they_are(name: str) -> None:
    reference = {"configMapKeyRef": {"name": "settings", "key": "path"}}
    theirs = [{"name": "ROOT", "value": "/app"}, {"name": name, "value": "$(ROOT)/src"},
        {"name": name, "valueFrom": reference}]  # fmt: skip
    assert trainer_env(*theirs)[-3:] == theirs


def test_sidecar_starts_first_is_native_and_owns_the_memory() -> None:
    pod = build_pod(make_job(), 1, 3, (), "sidecar:1")
    assert [entry["name"] for entry in pod["spec"]["initContainers"]] == [
        "tiercheck-library",
        "tiercheck-sidecar",
        "fetch",
    ]
    sidecar = container(pod, names.SIDECAR_CONTAINER)
    assert sidecar["restartPolicy"] == "Always"
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(sidecar)
    memory = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "tiercheck-memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert int(sidecar["resources"]["limits"]["memory"]) >= 2 * 2**30 + 256 * 2**20
    assert env(sidecar)[names.ENV_MEMORY_LIMIT] == str(2 * 2**30)
    assert env(sidecar)[names.ENV_JOB] == "ml/gpt"
    assert json.loads(env(sidecar)[names.ENV_REMOTE]) == {"s3": {"bucket": "b", "prefix": "p"}}
    assert sidecar["envFrom"] == [{"secretRef": {"name": "aws", "optional": True}}]
    watched = next(
        entry for entry in pod["spec"]["volumes"] if entry.get("secret", {}).get("secretName") == "aws"
    )
    assert watched["secret"]["optional"] is True
    mount = next(entry for entry in sidecar["volumeMounts"] if entry["name"] == watched["name"])
    assert env(sidecar)[names.ENV_REMOTE_CREDENTIALS_DIR] == mount["mountPath"]


def test_sidecar_is_told_its_cluster_and_from_whom_it_may_take_the_store() -> None:
    job = make_job()
    assert names.ENV_CLUSTER not in env(
        container(build_pod(job, 1, 3, (), "sidecar:1"), names.SIDECAR_CONTAINER)
    )
    for where in ({"s3": {"bucket": "b"}}, {"directory": {"volume": {"emptyDir": {}}}}):
        spec = replace(job.spec, remote={**where, "takeOverFrom": "uid-of-another"})
        pod = build_pod(replace(job, cluster="uid-of-kube-system", spec=spec), 1, 3, (), "sidecar:1")
        told = env(container(pod, names.SIDECAR_CONTAINER))
        assert told[names.ENV_CLUSTER] == "uid-of-kube-system"
        assert json.loads(told[names.ENV_REMOTE])["takeOverFrom"] == "uid-of-another"


def test_trainer_runs_the_users_command_under_the_launcher_and_sees_no_credentials() -> None:
    trainer = container(build_pod(make_job(), 1, 3, (), "sidecar:1"), names.TRAINER_CONTAINER)
    assert trainer["command"] == [
        "python3",
        "/tiercheck/lib/tiercheck/launcher/__main__.py",
        "--",
        "torchrun",
        "train.py",
        "--lr=1",
    ]
    assert "args" not in trainer
    assert env(trainer)["PYTHONPATH"] == "/app"
    assert env(trainer)["LR"] == "1"
    assert env(trainer)[names.ENV_WORKER] == "1"
    mounts = {mount["name"] for mount in trainer["volumeMounts"]}
    assert mounts == {"tiercheck-memory", "tiercheck-run", "tiercheck-library"}
    assert names.ENV_REMOTE not in env(trainer)
    assert "envFrom" not in trainer


def test_pod_holds_no_api_token_and_ends_when_its_command_has() -> None:
    spec = build_pod(make_job(), 1, 3, (), "sidecar:1")["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "OnFailure"
    assert (spec["hostname"], spec["subdomain"]) == ("gpt-1-3", "gpt")


def test_pod_is_found_by_its_labels_and_goes_with_its_job() -> None:
    pod = build_pod(make_job(), 1, 3, (), "sidecar:1")
    owner = pod["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("TierCheckJob", "u-1", True)
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"] == {"note": "b"}
    view = parse_pod(pod)
    assert view is not None
    assert (view.job_uid, view.worker, view.incarnation, view.phase) == ("u-1", 1, 3, "Pending")


@pytest.mark.parametrize(
    "empty",
    [
        {"affinity": None},
        {"affinity": {"nodeAffinity": None}},
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": None}}},
        {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": None}}},
        {"securityContext": {"fsGroup": None, "fsGroupChangePolicy": None}},
        {"topologySpreadConstraints": None},
    ],
    ids=str,
)
def test_field_that_is_null_is_taken_for_absent_as_by_kubernetes(empty: dict[str, Any]) -> None:
    """A chart renders `affinity: {{ .Values.affinity }}` like this if nothing is given."""
    absent = {name: {} for name, value in empty.items() if value}
    found, wanted = (
        build_pod(with_pod(make_job(), **given), 0, 0, ["n1"], "s:1", prefer="n2", unwelcome=["n3"])
        for given in (empty, absent)
    )
    assert found["spec"] == wanted["spec"]


def test_what_was_noted_on_a_pod_that_became_the_template_is_not_noted_on_the_next() -> None:
    noted = {ANNOTATION_AVOIDED: "n1", ANNOTATION_GIVEN_UP: "Hung: no step", "note": "b"}
    job = make_job()
    template = {**job.spec.template, "metadata": {"annotations": noted}}
    pod = build_pod(replace(job, spec=replace(job.spec, template=template)), 1, 3, (), "sidecar:1")
    assert pod["metadata"]["annotations"] == {"note": "b"}


def test_pod_that_its_template_binds_to_a_node_avoids_none() -> None:
    """Its kubelet would refuse it (NodeAffinity), which would count against the node, and so for ever."""
    bound = with_pod(make_job(), nodeName="n1")
    pod = build_pod(bound, 0, 0, ["n1"], "s:1", prefer="n2", unwelcome=["n1"])
    assert pod == build_pod(bound, 0, 0, (), "s:1")


def test_avoided_nodes_are_refused_by_every_alternative_of_the_users_affinity() -> None:
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}, {"matchFields": []}]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    pod = build_pod(with_pod(make_job(), affinity=affinity), 0, 1, ("n2", "n1"), "sidecar:1")
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    refusal = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
    assert len(required["nodeSelectorTerms"]) == 2
    assert all(refusal in term["matchExpressions"] for term in required["nodeSelectorTerms"])
    assert len(terms[0]["matchExpressions"]) == 1, "the job's own template is not touched"
    view = parse_pod(pod)
    assert view is not None
    assert view.avoided == {"n1", "n2"}
    pod = build_pod(make_job(), 0, 1, ("n1",), "sidecar:1")
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1"]}]}
    ]


def test_sidecar_gets_what_the_bucket_demands_and_the_authorities_of_a_config_map() -> None:
    demands = {
        "bucket": "b",
        "addressing": "Virtual",
        "encryption": {"type": "SSE-KMS", "kmsKeyId": "k"},
        "requesterPays": True,
        "storageClass": "STANDARD_IA",
    }
    more = {"credentialsSecretName": "s", "caBundleConfigMap": {"name": "trust", "key": "ca.crt"}}
    pod = build_pod(make_job(tiers={"remote": {"s3": {**demands, **more}}}), 0, 0, (), "sidecar:1")
    kubernetes_validate.validate(pod, "1.33", strict=True)
    sidecar = container(pod, names.SIDECAR_CONTAINER)
    told = json.loads(env(sidecar)[names.ENV_REMOTE])["s3"]
    volume = next(each for each in pod["spec"]["volumes"] if each.get("configMap", {}).get("name") == "trust")
    mount = next(each for each in sidecar["volumeMounts"] if each["name"] == volume["name"])
    assert told == {**demands, "caBundle": f"{mount['mountPath']}/ca.crt"}
    assert volume["configMap"]["optional"], "a missing one is told by the sidecar, in a pod that starts"


def test_sidecar_has_the_variables_of_the_spec_and_keeps_its_own() -> None:
    secret = {"secretKeyRef": {"name": "proxy", "key": "url"}}
    given = [
        {"name": "HTTPS_PROXY", "valueFrom": secret},
        {"name": "NO_PROXY", "value": ".svc"},
        {"name": names.ENV_JOB, "value": "another"},
    ]
    pod = build_pod(make_job(sidecar={"env": given}), 0, 0, (), "sidecar:1")
    kubernetes_validate.validate(pod, "1.33", strict=True)
    sidecar = container(pod, names.SIDECAR_CONTAINER)
    found = env(sidecar)
    assert (found["HTTPS_PROXY"], found["NO_PROXY"], found[names.ENV_JOB]) == (secret, ".svc", "ml/gpt")
    assert len(found) == len(sidecar["env"])
    assert "HTTPS_PROXY" not in env(container(pod, names.TRAINER_CONTAINER))


def test_shared_directory_is_mounted_in_the_sidecar_only() -> None:
    directory = {"volume": {"persistentVolumeClaim": {"claimName": "c"}}, "subPath": "runs"}
    pod = build_pod(make_job(tiers={"remote": {"directory": directory}}), 0, 0, (), "sidecar:1")
    kubernetes_validate.validate(pod, "1.33", strict=True)
    sidecar = container(pod, names.SIDECAR_CONTAINER)
    assert json.loads(env(sidecar)[names.ENV_REMOTE]) == {
        "directory": {"path": "/tiercheck/remote", "subPath": "runs"}
    }
    assert {"name": "tiercheck-remote", "mountPath": "/tiercheck/remote"} in sidecar["volumeMounts"]
    assert {"name": "tiercheck-remote", "persistentVolumeClaim": {"claimName": "c"}} in pod["spec"]["volumes"]
    trainer = container(pod, names.TRAINER_CONTAINER)
    assert "tiercheck-remote" not in {mount["name"] for mount in trainer["volumeMounts"]}


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ({}, "no container named 'trainer'"),
        ({"spec": {"containers": [{"name": "x"}]}}, "no container named 'trainer'"),
        ({"spec": {"containers": [{"name": "trainer"}]}}, "has no command"),
        (
            {"spec": {"containers": [{"name": "trainer", "command": ["x"]}, {"name": "tiercheck-sidecar"}]}},
            "reserved",
        ),
    ],
)
def test_template_that_cannot_work_is_explained(template: dict[str, Any], word: str) -> None:
    assert word in template_problem(template)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("2Gi", 2**31),
        ("1.5Ki", 1536),
        ("100M", 10**8),
        ("1e3", 1000),
        ("500m", 1),
        ("3000000u", 3),
        ("5000000000n", 5),
        ("+2k", 2000),
        ("2E", 2 * 10**18),
    ],
)
def test_quantities_are_read_as_kubernetes_does(text: str, size: int) -> None:
    assert parse_quantity(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "1Zi", "1 Gi", "1.2.3", "-1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


def test_placement_survives_its_config_map() -> None:
    placement = SavedPlacement(
        4,
        (SavedMember(0, "gpt-0-0", "a", 0, "n1", (1, 2)), SavedMember(1, "gpt-1-2", "b", 2, "n2", ())),
        (CodeGroup((0, 2), (3,)), CodeGroup((1,), (0, 2))),
    )
    manifest = build_placement(make_job(), placement)
    kubernetes_validate.validate(manifest, "1.33", strict=True)
    assert parse_placement(manifest) == placement
    with pytest.raises(ValueError, match="not a placement"):
        parse_placement({"data": {"attempt": "1", "workers": "[1,2]"}})


def test_placement_written_before_there_was_parity_is_understood() -> None:
    manifest = build_placement(
        make_job(), SavedPlacement(4, (SavedMember(0, "gpt-0-0", "a", 0, "n1", (1,)),))
    )
    del manifest["data"]["groups"]
    assert parse_placement(manifest).groups == ()


@pytest.mark.parametrize(("text", "seconds"), [("72h", 259200), ("7d", 604800), ("1h30m", 5400), ("45s", 45)])
def test_durations_are_read_as_written(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "3 days", "1.5h", "-1h", "10"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


def test_settings_of_the_data_plane_reach_the_sidecars() -> None:
    job = make_job(
        checkpoint={
            "delta": {"mode": "Replay"},
            "sanityGate": "Off",
            "verify": "Full",
            "stateSize": "1Gi",
            "snapshot": {},
        },
        tiers={
            "peer": {"parity": {"data": 2, "parity": 1}, "bandwidth": "2Gi", "encryption": "Required"},
            "remote": {
                "directory": {"volume": {"emptyDir": {}}},
                "everySteps": 100,
                "keep": 3,
                "keepFor": "72h",
                "bandwidth": "1Mi",
            },
            "local": {},
        },
        failurePolicy={"rollbackAfterNonFinite": 4},
    )
    assert (job.spec.copies, job.spec.parity) == (0, (2, 1))
    assert (job.spec.state_size, job.spec.rollback_after) == (2**30, 4)
    assert build_policy(job.spec) == Policy(
        snapshot_every=None,
        remote_every=100,
        remote_keep=3,
        remote_bandwidth=2**20,
        remote_keep_seconds=259200.0,
        peer_bandwidth=2**31,
        peer_encrypted=True,
        delta=DeltaMode.REPLAY,
        sanity_gate=False,
        verify_all=True,
        rehearse_every=600.0,
        interrupt_seconds=5.0,
        hang=HangLimits(20, 1800),
    )


def test_job_that_says_nothing_gets_deltas_a_sanity_gate_and_a_copy() -> None:
    spec = make_job().spec
    assert (spec.copies, spec.parity, spec.delta, spec.sanity_gate) == (1, None, DeltaMode.AUTO, True)
    assert (spec.snapshot_every, spec.state_size, spec.rollback_after, spec.peer_bandwidth) == (None,) * 4
    assert not spec.peer_encrypted


def test_node_that_another_job_suspects_is_shunned_and_not_forbidden() -> None:
    pod = build_pod(make_job(), 0, 0, (), "sidecar:1", unwelcome=("n2", "n1"))
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity
    (entry,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert entry["preference"]["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
    ]
