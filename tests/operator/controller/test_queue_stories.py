"""A queue decides when pods may be scheduled, and its waiting is no lack of nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.kubelet_words import made_by
from tests.operator.world_in_memory import TEMPLATE, World, make_spec, trained
from tiercheck.protocol import names
from tiercheck_operator.kubernetes.client import ApiFailure
from tiercheck_operator.kubernetes.owned_objects import Belongings
from tiercheck_operator.manifests.owned import GANGS, build_gang
from tiercheck_operator.manifests.pod import build_pod, build_spare
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.parsing import parse_job, parse_pod

QUEUE = "kueue.x-k8s.io/queue-name"
TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
GROUP = "kueue.x-k8s.io/pod-group-name"
TOTAL = "kueue.x-k8s.io/pod-group-total-count"
GATE = "kueue.x-k8s.io/admission"


def queued_job() -> dict[str, Any]:
    return {
        "metadata": {
            "name": "j", "namespace": "ns", "uid": "u",
            "labels": {QUEUE: "research", GROUP: "mine", "team": "nlp"},
            "annotations": {TOPOLOGY: "cloud/rack", TOTAL: "4", "note": "n"},
        },
        "spec": {"workers": 4, "template": {**TEMPLATE, "metadata": {"labels": {"app": "llm"}}}},
    }  # fmt: skip


def test_workers_replacements_and_spares_carry_what_the_job_says_to_its_queue() -> None:
    job = parse_job(queued_job())
    pods = [build_pod(job, 1, 0, [], "i"), build_pod(job, 1, 5, ["n1"], "i"), build_spare(job, 0, [], "i")]
    for pod in pods:
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels[QUEUE] == "research"
        assert labels["app"] == "llm"
        assert labels[names.LABEL_JOB_UID] == "u"
        assert annotations[TOPOLOGY] == "cloud/rack"
        assert "team" not in labels
        assert "note" not in annotations


def test_job_never_becomes_a_pod_group_whose_surplus_pods_the_queue_would_remove() -> None:
    pod = build_pod(parse_job(queued_job()), 0, 0, [], "i")
    assert GROUP not in pod["metadata"]["labels"]
    assert TOTAL not in pod["metadata"]["annotations"]


def gated_pod() -> PodView:
    raw = {
        "metadata": {"name": "j-0-0", "uid": "p", "ownerReferences": made_by("u"), "labels": {
            names.LABEL_JOB_UID: "u", names.LABEL_WORKER: "0", names.LABEL_INCARNATION: "0",
        }},
        "spec": {"schedulingGates": [{"name": GATE}]},
        "status": {"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
        }]},
    }  # fmt: skip
    pod = parse_pod(raw)
    assert pod is not None
    return pod


def test_gated_pod_is_not_unschedulable() -> None:
    pod = gated_pod()
    assert pod.gates == (GATE,)
    assert pod.unschedulable_since is None


def test_job_whose_pods_are_gated_waits_for_the_queue_however_long_and_nothing_is_replaced() -> None:
    world = World(make_spec(capacity_timeout=5.0))
    world.change_nodes(schedulable=False)
    world.tick()
    world.pods = {uid: replace(pod, gates=(GATE,)) for uid, pod in world.pods.items()}
    made = len(world.created)
    for _ in range(60):
        world.wait(10)
        world.reconcile()
    placed = world.condition("Placed")
    assert (placed.status, placed.reason) == (False, "WaitingForQueue")
    assert GATE in placed.message
    assert len(world.created) == made
    world.change_nodes(schedulable=True)
    world.pods = {uid: replace(pod, gates=()) for uid, pod in world.pods.items()}
    world.until("Running")


@pytest.mark.parametrize("scheduler", sorted(GANGS))
def test_workers_replacements_and_spares_belong_to_the_gang(scheduler: str) -> None:
    raw = queued_job()
    raw["spec"]["gang"] = {"scheduler": scheduler}
    job = parse_job(raw)
    for pod in (
        build_pod(job, 1, 0, [], "i"),
        build_pod(job, 1, 5, ["n1"], "i"),
        build_spare(job, 0, [], "i"),
    ):
        said = {
            "Volcano": pod["metadata"]["annotations"].get("scheduling.k8s.io/group-name"),
            "Coscheduling": pod["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group"),
            "Workload": (pod["spec"].get("schedulingGroup") or {}).get("podGroupName"),
        }
        assert {name for name, value in said.items() if value == "j"} == {scheduler}
        assert pod["spec"].get("schedulerName") == ("volcano" if scheduler == "Volcano" else None)
    gang = build_gang(job)
    assert gang["metadata"]["ownerReferences"][0]["uid"] == "u"
    least = {"minMember": 4} if scheduler != "Workload" else {"schedulingPolicy": {"gang": {"minCount": 4}}}
    assert gang["spec"] == least


def test_gang_is_there_before_the_first_pod_and_a_job_does_not_begin_without_it_and_says_why() -> None:
    world = World(make_spec(gang="Volcano"))
    world.gang_problem = "this cluster does not serve podgroups.scheduling.volcano.sh/v1beta1"
    world.train(20)
    assert world.told("Placed")[:2] == (False, "GangUnavailable")
    assert not world.pods
    world.gang_problem = ""
    world.tick()
    assert (world.have_gang, world.pods) == (True, {})
    world.until("Running")


def test_gang_that_is_gone_does_not_keep_a_lost_worker_from_being_replaced() -> None:
    world = trained(gang="Volcano")
    world.have_gang, world.gang_problem = False, "forbidden"
    world.evict(world.member(2))
    world.recovered()


def test_gang_of_a_suspended_job_is_made_anew_because_its_size_may_change() -> None:
    world = World(make_spec(gang="Volcano"))
    world.until("Running")
    world.suspended()
    world.tick()
    assert not world.have_gang
    world.change(suspend=False)
    world.until("Running")
    assert world.have_gang


class PodGroups:
    """An API server that knows of pod groups, or does not."""

    def __init__(self, failure: ApiFailure | None = None, known: dict[str, Any] | None = None) -> None:
        self.failure, self.known = failure, known

    async def create(self, path: str, body: dict[str, Any], **names: str) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        if self.known is not None:
            raise ApiFailure(409, "exists")
        self.known = dict(body)
        return self.known

    async def get(self, path: str, **names: str) -> dict[str, Any] | None:
        return self.known

    async def delete(self, path: str, options: dict[str, Any], **names: str) -> bool:
        self.known = None
        return True


@pytest.mark.parametrize(
    ("failure", "said"),
    [(ApiFailure(404, "not found"), "does not serve podgroups.scheduling.volcano.sh/v1beta1"),
     (ApiFailure(403, "forbidden"), "rbac.gangSchedulers")],
)  # fmt: skip
async def test_why_there_is_no_gang_is_told_with_what_to_do(failure: ApiFailure, said: str) -> None:
    raw = queued_job()
    raw["spec"]["gang"] = {"scheduler": "Volcano"}
    belongings = Belongings(PodGroups(failure))  # type: ignore[arg-type]
    await belongings.ensure_gang(parse_job(raw))
    assert not belongings.have_gang
    assert said in belongings.gang_problem


async def test_gang_of_another_size_is_made_anew_and_a_strangers_is_left_alone() -> None:
    raw = queued_job()
    raw["spec"]["gang"] = {"scheduler": "Volcano"}
    job = parse_job(raw)
    small = build_gang(replace(job, spec=replace(job.spec, workers=2)))
    server = PodGroups(known=small)
    belongings = Belongings(server)  # type: ignore[arg-type]
    await belongings.ensure_gang(job)
    await belongings.ensure_gang(job)
    assert belongings.have_gang
    assert server.known is not None
    assert server.known["spec"]["minMember"] == 4
    strange = PodGroups(known={"metadata": {"name": "j"}, "spec": {}})
    belongings = Belongings(strange)  # type: ignore[arg-type]
    await belongings.ensure_gang(job)
    assert "not this job's" in belongings.gang_problem
    assert strange.known is not None
