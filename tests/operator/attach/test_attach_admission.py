"""Each controller's pods get the right number at admission, and lose nothing of theirs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.operator.api_model import ApiModel
from tests.operator.attach import attach_shapes as shapes
from tests.operator.attach.attach_shapes import Object
from tiercheck.protocol import names
from tiercheck_local.apiserver.http.requests import json_patch
from tiercheck_operator.attach.injection import Attachment, attached_job, job_name
from tiercheck_operator.attach.owners import (
    Owner,
    Unattachable,
    count_workers,
    find_owner,
    find_worker_identity,
)
from tiercheck_operator.attach.webhook import Admission, difference
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.model.parsing import identity_of, parse_job, parse_pod

PLURALS = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "PyTorchJob": "pytorchjobs",
    "TierCheckPolicy": "tiercheckpolicies",
}


def having(*objects: Object) -> ApiModel:
    """An API server with these."""
    found = {}
    for each in objects:
        plural = PLURALS.get(each["kind"], names.PLURAL)
        found[f"/apis/{each['apiVersion']}/namespaces/ml/{plural}/{each['metadata']['name']}"] = each
    return ApiModel(found)


async def admitted(pod: Object, *objects: Object) -> tuple[Object, str]:
    new, warning = await Admission(having(*objects), Config(sidecar_image="sidecar:1")).admit("ml", pod)
    return dict(new), warning


def worker_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"][names.LABEL_WORKER])


def container_of(pod: Object, name: str) -> Object:
    return next(
        entry
        for entry in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]
        if entry["name"] == name
    )


def environment(container: Object) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container["env"]}


SEATS = [
    (shapes.job(4), [shapes.job_pod(index) for index in range(4)]),
    (
        shapes.jobset([("driver", 1, 1, False), ("leader", 1, 1, True), ("workers", 2, 3, True)]),
        [shapes.jobset_pod("leader", 0, 0)]
        + [shapes.jobset_pod("workers", job, index) for job in range(2) for index in range(3)],
    ),
    (shapes.trainjob(), [shapes.trainjob_pod(index) for index in range(3)]),
    (
        shapes.pytorchjob(2),
        [
            shapes.pytorchjob_pod("master", 0),
            shapes.pytorchjob_pod("worker", 0),
            shapes.pytorchjob_pod("worker", 1),
        ],
    ),
    (
        shapes.pytorchjob(2, master=False),
        [shapes.pytorchjob_pod("worker", 0), shapes.pytorchjob_pod("worker", 1)],
    ),
]


@pytest.mark.parametrize(("owner", "pods"), SEATS, ids=["Job", "JobSet", "TrainJob", "PyTorchJob", "elastic"])
async def test_every_pod_of_a_workload_is_a_worker_of_its_own(owner: Object, pods: list[Object]) -> None:
    made = [await admitted(pod, owner, shapes.POLICY) for pod in pods]
    assert [warning for _, warning in made] == [""] * len(pods)
    assert [worker_of(pod) for pod, _ in made] == [str(index) for index in range(len(pods))]
    for pod, _ in made:
        seen = parse_pod({**pod, "metadata": {**pod["metadata"], "uid": "u", "name": "p"}})
        assert seen is not None
        assert seen.job_uid == owner["metadata"]["uid"]
        attachment = Attachment.from_json(seen.attached)
        assert attachment.workers == len(pods)
        kubernetes_validate.validate(
            {**pod, "metadata": {**pod["metadata"], "name": "p"}}, "1.33", strict=True
        )


@pytest.mark.parametrize(("owner", "pods"), SEATS, ids=["Job", "JobSet", "TrainJob", "PyTorchJob", "elastic"])
async def test_answer_turns_the_pod_that_was_sent_into_the_one_that_is_wanted_and_a_second_changes_nothing(
    owner: Object, pods: list[Object]
) -> None:
    for pod in pods:
        sent = copy.deepcopy(pod)
        made, _ = await admitted(pod, owner, shapes.POLICY)
        assert pod == sent, "what was sent is left alone"
        assert json_patch(pod, difference(pod, made)) == made
        again, warning = await admitted(made, owner, shapes.POLICY)
        assert (again, warning) == (made, "")


async def test_labels_that_another_webhook_strips_or_changes_come_back_when_it_is_asked_again() -> None:
    made, _ = await admitted(shapes.job_pod(2), shapes.job(4), shapes.POLICY)
    labels = made["metadata"]["labels"]
    kept = {key: value for key, value in labels.items() if key == names.LABEL_INJECT}
    for changed in (kept, {**labels, names.LABEL_WORKER: "0", names.LABEL_JOB: "x"}):
        stripped = copy.deepcopy(made)
        stripped["metadata"]["labels"] = changed
        again, warning = await admitted(stripped, shapes.job(4), shapes.POLICY)
        assert (again["spec"], warning) == (made["spec"], "")
        assert again["metadata"]["labels"] == {**changed, **_ours(labels)}


async def test_attached_pod_without_its_annotation_is_still_the_worker_that_trains() -> None:
    """Whether another webhook took it, or a user or policy took it off while it trained."""
    made, _ = await admitted(shapes.job_pod(2), shapes.job(4), shapes.POLICY)
    stripped = copy.deepcopy(made)
    stripped["metadata"] |= {"annotations": {}, "uid": "u", "name": "p"}
    again, warning = await admitted(stripped, shapes.job(4), shapes.POLICY)
    assert (again["spec"], warning) == (made["spec"], "")
    seen, before = (
        parse_pod({**stripped, "metadata": each})
        for each in (
            stripped["metadata"],
            {**stripped["metadata"], "annotations": made["metadata"]["annotations"]},
        )
    )
    assert seen is not None
    assert before is not None
    assert seen.attached
    assert replace(seen, attached=before.attached) == before
    foreign = copy.deepcopy(made)
    foreign["metadata"]["annotations"] = {}
    foreign["metadata"]["ownerReferences"][0]["uid"] = "another"
    owner = shapes.job(4)
    owner["metadata"]["uid"] = "another"
    assert (await admitted(foreign, owner, shapes.POLICY))[1], "a template that was copied from a pod"


def _ours(labels: Object) -> Object:
    return {key: labels[key] for key in (names.LABEL_JOB, names.LABEL_JOB_UID, names.LABEL_WORKER)}


async def test_command_is_wrapped_and_all_else_of_the_users_stays() -> None:
    pod = shapes.trainjob_pod(1)
    made, _ = await admitted(pod, shapes.trainjob(), shapes.POLICY)
    node = container_of(made, "node")
    assert node["command"] == ["python3", names.LAUNCHER, "--", "torchrun", "train.py"]
    assert environment(node)["PET_MASTER_ADDR"] == "tune-node-0-0.tune", (
        "the launcher sets its own at each attempt"
    )
    assert environment(node)["TIERCHECK_PROCS_PER_WORKER"] == "2", "as PET_NPROC_PER_NODE says"
    assert environment(node)["TIERCHECK_JOB"] == "ml/jobset-tune"
    assert environment(node)["TIERCHECK_JOB_UID"] == "tune-uid"
    assert made["spec"]["restartPolicy"] == "Never"
    assert "automountServiceAccountToken" not in made["spec"], "that is for the owner to decide"
    assert pod["spec"]["volumes"][0] in made["spec"]["volumes"]
    assert made["metadata"]["labels"].items() >= pod["metadata"]["labels"].items()
    sidecar = container_of(made, names.SIDECAR_CONTAINER)
    assert sidecar["restartPolicy"] == "Always"
    assert "kube-api-access" not in str(sidecar)


async def test_no_container_of_ours_gets_the_pods_api_token() -> None:
    """The API server's ServiceAccount plug-in mounts it into every container that has no mount at its path,
    webhooks or not."""
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    node_memory = shapes.policy(
        tiers={"local": {"sizeLimit": "2Gi", "medium": "NodeMemory"}, "peer": {"copies": 1}}
    )
    for policy in (shapes.POLICY, node_memory):
        theirs = {"name": "fetch", "image": "fetch:1"}
        pod = shapes.job_pod(1)
        pod["spec"]["initContainers"] = [theirs]
        made, warning = await admitted(pod, shapes.job(), policy)
        assert not warning
        spec = made["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        ours = [entry for entry in spec["initContainers"] if entry["name"].startswith("tiercheck-")]
        assert len(ours) >= 2
        for container in ours:
            mounts = [mount for mount in container["volumeMounts"] if mount["mountPath"] == token]
            assert [volumes[mount["name"]] for mount in mounts] == [
                {"name": mounts[0]["name"], "emptyDir": {}}
            ]
        assert theirs in spec["initContainers"], "the user's own is theirs"
        assert all(mount["mountPath"] != token for mount in spec["containers"][0]["volumeMounts"])


async def test_only_the_servers_own_grace_period_is_lengthened_for_uploads() -> None:
    made, _ = await admitted(shapes.job_pod(0), shapes.job(), shapes.POLICY)
    assert made["spec"]["terminationGracePeriodSeconds"] == 300
    pod = shapes.job_pod(0)
    pod["spec"]["terminationGracePeriodSeconds"] = 77
    made, _ = await admitted(pod, shapes.job(), shapes.POLICY)
    assert made["spec"]["terminationGracePeriodSeconds"] == 77


async def test_pod_without_the_label_is_not_touched() -> None:
    pod = shapes.job_pod(0)
    del pod["metadata"]["labels"][names.LABEL_INJECT]
    assert await admitted(pod) == (pod, "")


def with_container(**changes: Any) -> Object:
    pod = shapes.job_pod(0)
    pod["spec"]["containers"][0].update(changes)
    return pod


def without_command() -> Object:
    pod = shapes.job_pod(0)
    del pod["spec"]["containers"][0]["command"]
    return pod


def two_unknown_containers() -> Object:
    pod = with_container(name="a")
    pod["spec"]["containers"].append({"name": "b", "image": "i", "command": ["c"]})
    return pod


def of_nobody() -> Object:
    pod = shapes.job_pod(0)
    del pod["metadata"]["ownerReferences"]
    return pod


def of_a_stranger() -> Object:
    pod = shapes.job_pod(0)
    pod["metadata"]["ownerReferences"][0].update(apiVersion="ray.io/v1", kind="RayJob")
    return pod


@pytest.mark.parametrize(
    ("pod", "objects", "said"),
    [
        (without_command(), [shapes.job(), shapes.POLICY], "has no command; set `command`"),
        (two_unknown_containers(), [shapes.job(), shapes.POLICY], "not clear which container trains"),
        (of_nobody(), [shapes.POLICY], "belongs to no controller"),
        (of_a_stranger(), [shapes.POLICY], "pods of Job, JobSet, TrainJob and PyTorchJob can be attached"),
        (shapes.job_pod(0), [shapes.job()], "there is no TierCheckPolicy careful in namespace ml"),
        (shapes.job_pod(0), [shapes.POLICY], "there is no Job train"),
        (
            shapes.job_pod(0),
            [shapes.job(completionMode="NonIndexed"), shapes.POLICY],
            "needs completionMode Indexed",
        ),
        (shapes.job_pod(0), [shapes.job(completions=9), shapes.POLICY], "must be equal"),
        (shapes.job_pod(7), [shapes.job(4), shapes.POLICY], "has 4 workers, but this pod's index is 7"),
        (shapes.job_pod(0), [shapes.job(1), shapes.POLICY], "needs at least 2 workers, and there are 1"),
        (
            shapes.pytorchjob_pod("master", 0),
            [shapes.pytorchjob(silent="Worker"), shapes.POLICY],
            "the worker replicas of PyTorchJob bert do not ask to be attached",
        ),
        (
            with_container(env=[{"name": "PET_NPROC_PER_NODE", "value": "auto"}]),
            [shapes.job(), shapes.POLICY],
            "set spec.procsPerWorker of the TierCheckPolicy",
        ),
        (
            with_container(name="tiercheck-sidecar"),
            [shapes.job(), shapes.POLICY],
            "'tiercheck-sidecar' is taken by TierCheck",
        ),
    ],
)
async def test_pod_that_cannot_be_attached_runs_as_it_is_and_says_why(
    pod: Object, objects: list[Object], said: str
) -> None:
    made, warning = await admitted(pod, *objects)
    assert said in warning
    assert made["metadata"]["annotations"][names.ANNOTATION_NOT_ATTACHED] == warning
    assert made["spec"] == pod["spec"]
    assert made["metadata"]["labels"] == pod["metadata"]["labels"]


async def test_policy_names_the_processes_where_the_pod_cannot() -> None:
    pod = with_container(env=[{"name": "PET_NPROC_PER_NODE", "value": "auto"}])
    made, warning = await admitted(pod, shapes.job(), shapes.policy(procsPerWorker=8))
    assert warning == ""
    assert environment(container_of(made, "trainer"))["TIERCHECK_PROCS_PER_WORKER"] == "8"


async def test_annotation_names_the_container_that_trains() -> None:
    pod = two_unknown_containers()
    pod["metadata"]["annotations"][names.ANNOTATION_CONTAINER] = "b"
    made, warning = await admitted(pod, shapes.job(), shapes.POLICY)
    assert warning == ""
    assert container_of(made, "b")["command"][:2] == ["python3", names.LAUNCHER]
    assert container_of(made, "a")["command"] == ["torchrun", "train.py"]


async def test_trouble_with_the_api_server_never_stops_a_pod() -> None:
    server = ApiModel(GET=ApiFailure(503, "overloaded"))
    made, warning = await Admission(server, Config(sidecar_image="sidecar:1")).admit("ml", shapes.job_pod(0))
    assert "could not be read: 503: overloaded" in warning
    assert made["spec"] == shapes.job_pod(0)["spec"]


async def test_thousand_pods_of_one_job_cost_three_questions() -> None:
    server = having(shapes.job(1000), shapes.POLICY)
    server.objects["/api/v1/namespaces/kube-system"] = {"metadata": {"uid": "uid-of-the-cluster"}}
    admission = Admission(server, Config(sidecar_image="sidecar:1"), clock=lambda: 0.0)
    server.objects["/apis/tiercheck.io/v1alpha1/namespaces/ml/tiercheckjobs/job-train"] = made_job(1000)
    for index in range(1000):
        pod, _ = await admission.admit("ml", shapes.job_pod(index))
        assert worker_of(dict(pod)) == str(index)
    assert len(server.calls) == 3, "the Job, its TierCheckJob, and once what the cluster is known by"


def made_job(workers: int = 4, **spec: Any) -> Object:
    owner = find_owner(shapes.job_pod(0))
    raw = attached_job(
        "ml", Attachment(owner, "careful", "trainer", workers, 1), shapes.policy(**spec)["spec"]
    )
    raw["metadata"]["uid"] = "tcj-uid"
    return raw


async def test_policy_that_changed_meanwhile_does_not_split_a_job() -> None:
    """A pod that is made again gets what the job's other pods have."""
    changed = shapes.policy(tiers={"local": {"sizeLimit": "9Gi"}})
    made, _ = await admitted(shapes.job_pod(1), shapes.job(), changed, made_job())
    memory = next(volume for volume in made["spec"]["volumes"] if volume["name"] == "tiercheck-memory")
    assert memory["emptyDir"]["sizeLimit"] == "2Gi"


async def test_pod_that_is_made_again_after_an_upgrade_gets_the_sidecar_that_the_others_have() -> None:
    job = made_job()
    job["status"] = {"sidecarImage": "sidecar:0"}
    made, _ = await admitted(shapes.job_pod(1), shapes.job(), shapes.POLICY, job)
    assert container_of(made, names.SIDECAR_CONTAINER)["image"] == "sidecar:0"


async def test_node_memory_is_the_owners_own_folder_whether_the_job_exists_or_not() -> None:
    policy = shapes.policy(tiers={"local": {"medium": "NodeMemory", "sizeLimit": "1Gi"}})
    job = made_job(tiers=policy["spec"]["tiers"])
    volumes = [
        [volume for volume in made["spec"]["volumes"] if "hostPath" in volume]
        for made, _ in [
            await admitted(shapes.job_pod(1), shapes.job(), policy),
            await admitted(shapes.job_pod(1), shapes.job(), policy, job),
        ]
    ]
    assert volumes[0] == volumes[1]
    assert any(volume["hostPath"]["path"].endswith("/job-uid") for volume in volumes[0])


async def test_operators_settings_for_images_hold_for_attached_pods_too() -> None:
    image = "r.example.com/sidecar:1"
    config = Config(sidecar_image=image, sidecar_pull_policy="Always", sidecar_pull_secrets=("registry",))
    server = having(shapes.job(), shapes.POLICY)
    made, _ = await Admission(server, config).admit("ml", shapes.job_pod(0))
    assert container_of(dict(made), names.SIDECAR_CONTAINER)["imagePullPolicy"] == "Always"
    assert made["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert "imagePullPolicy" not in container_of(dict(made), "trainer")


def test_job_is_its_owners_and_known_by_its_owners_uid() -> None:
    raw = made_job()
    job = parse_job(raw)
    assert raw["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "job-uid", "controller": False,
            "blockOwnerDeletion": False}
    ]  # fmt: skip
    assert job.identity == identity_of(raw) == "job-uid"
    assert job.spec.attach is not None
    assert job.spec.max_restarts == 3
    assert not job.spec.template


def test_names_of_jobs_are_labels_and_tell_owners_apart() -> None:
    long = "a" * 60
    owners = [
        Owner("v", kind, name, "u")
        for kind in ("Job", "JobSet", "PyTorchJob")
        for name in ("a", long, long + "b", "x.y")
    ]
    found = [job_name(owner) for owner in owners]
    assert len({*found}) == len(found)
    assert all(len(name) <= 40 and name.replace("-", "").isalnum() and name[0].isalpha() for name in found)
    assert job_name(owners[0]) == "job-a"


def test_owner_of_the_same_name_that_came_later_is_another_one() -> None:
    owner = find_owner(shapes.job_pod(0))
    later = shapes.job()
    later["metadata"]["uid"] = "another"
    with pytest.raises(Unattachable, match="is not the one that made the pod"):
        find_worker_identity(shapes.job_pod(0), owner, later)


async def test_pod_of_an_owner_that_was_scaled_up_waits_with_a_launcher_and_does_not_fail_without_one() -> (
    None
):
    """Its failures would spend the owner's budget, and end the workers that train."""
    for index in (3, 4):
        made, warning = await admitted(shapes.job_pod(index), shapes.job(6), shapes.POLICY, made_job(4))
        assert (worker_of(made), warning) == (str(index), "")
        assert container_of(made, "trainer")["command"][1].endswith("/tiercheck/launcher/__main__.py")


@pytest.mark.parametrize(
    ("kind", "owner", "workers"),
    [
        ("Job", shapes.job(3), 3),
        ("Job", shapes.job(2, completions=4), 2),
        ("JobSet", shapes.jobset([("lead", 1, 1, True), ("crew", 2, 3, True), ("other", 5, 5, False)]), 7),
        ("PyTorchJob", shapes.pytorchjob(), 3),
    ],
    ids=["Job", "Job of which only the parallelism changed", "JobSet", "PyTorchJob"],
)
def test_size_of_an_owner_is_what_it_wants_now(kind: str, owner: Object, workers: int) -> None:
    assert count_workers(kind, owner) == workers


# The examples of attach mode do what their pages say, by their own policies.


EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "attach"
POLICY = {**yaml.safe_load((EXAMPLES / "policy.yaml").read_text())}


def example(name: str, kind: str) -> Object:
    found: list[Any] = [
        raw for raw in yaml.safe_load_all((EXAMPLES / name).read_text()) if raw["kind"] == kind
    ]
    found[0]["metadata"] |= {"namespace": "ml", "uid": "gpt-uid"}
    return dict(found[0])


def pod_of(template: Object, like: Object, owner_uid: str = "") -> Object:
    """The pod that a controller makes of `template`; `like` has what the controller adds."""
    pod = copy.deepcopy(like)
    pod["metadata"]["labels"] = {**template["metadata"]["labels"], **pod["metadata"]["labels"]}
    pod["metadata"]["labels"][names.LABEL_INJECT] = template["metadata"]["labels"][names.LABEL_INJECT]
    pod["spec"]["containers"] = copy.deepcopy(template["spec"]["containers"])
    if owner_uid:
        pod["metadata"]["ownerReferences"][0].update(name="gpt", uid=owner_uid)
    return pod


def jobset_pod(template: Object, replicated: str, job: int, index: int) -> Object:
    return pod_of(template, shapes.jobset_pod(replicated, job, index, "gpt"))


async def workers(pods: list[Object], owner: Object) -> list[tuple[str, str]]:
    """Worker and processes of each pod."""
    found = []
    for pod in pods:
        made, warning = await admitted(pod, owner, POLICY)
        assert warning == ""
        sidecar = next(
            entry for entry in made["spec"]["initContainers"] if entry["name"] == names.SIDECAR_CONTAINER
        )
        found.append((worker_of(made), environment(sidecar)[names.ENV_PROCS_PER_WORKER]))
    return found


async def test_job() -> None:
    owner = example("job.yaml", "Job")
    pods = [pod_of(owner["spec"]["template"], shapes.job_pod(index), "gpt-uid") for index in range(4)]
    assert await workers(pods, owner) == [(str(index), "1") for index in range(4)]


async def test_jobset_without_its_driver() -> None:
    owner = example("jobset.yaml", "JobSet")
    template = owner["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]
    pods = [jobset_pod(template, "workers", job, index) for job in range(2) for index in range(4)]
    assert await workers(pods, owner) == [(str(index), "8") for index in range(8)]
    assert names.LABEL_INJECT not in str(owner["spec"]["replicatedJobs"][0])


async def test_trainjob() -> None:
    """As the Trainer makes a JobSet of runtime and TrainJob: count and torch's variables are the
    TrainJob's.
    """
    runtime, job = example("trainjob.yaml", "TrainingRuntime"), example("trainjob.yaml", "TrainJob")
    owner = {**runtime["spec"]["template"], "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    owner["metadata"] = job["metadata"]
    (node,) = owner["spec"]["replicatedJobs"]
    trainer = job["spec"]["trainer"]
    node["template"]["spec"] |= {"parallelism": trainer["numNodes"], "completions": trainer["numNodes"]}
    template = node["template"]["spec"]["template"]
    template["spec"]["containers"][0]["env"] = [
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])}
    ]
    pods = [jobset_pod(template, "node", 0, index) for index in range(4)]
    assert await workers(pods, owner) == [(str(index), "8") for index in range(4)]


async def test_pytorchjob() -> None:
    owner = example("pytorchjob.yaml", "PyTorchJob")
    templates = {kind: entry["template"] for kind, entry in owner["spec"]["pytorchReplicaSpecs"].items()}
    pods = [pod_of(templates["Master"], shapes.pytorchjob_pod("master", 0), "gpt-uid")]
    pods += [
        pod_of(templates["Worker"], shapes.pytorchjob_pod("worker", index), "gpt-uid") for index in range(3)
    ]
    assert await workers(pods, owner) == [(str(index), "1") for index in range(4)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_is_linked_from_the_guide(path: Path) -> None:
    guide = (EXAMPLES.parents[1] / "docs" / "use" / "attach.md").read_text()
    assert f"../examples/attach/{path.name}" in guide
