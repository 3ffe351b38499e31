"""The examples of attach mode do what their pages say, by their own policies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operator.attach import attach_shapes as shapes
from tests.operator.attach.attach_shapes import Object
from tests.operator.attach.test_attach_admission import admitted, environment, worker_of
from tiercheck.protocol import names

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
