"""Other controllers decide when pods are made or scheduled, and jobs live with that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.api_model import ApiModel
from tests.operator.kubelet_words import made_by
from tests.operator.world_in_memory import REMOTE, TEMPLATE, World, make_spec, trained
from tiercheck.protocol import names
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.kubernetes.owned_objects import OwnedObjects, pod_groups
from tiercheck_operator.manifests.owned import GANGS, build_gang
from tiercheck_operator.manifests.pod import build_pod, build_spare
from tiercheck_operator.model.actions import CreatePod
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.parsing import parse_job, parse_pod
from tiercheck_operator.model.spec import Attach
from tiercheck_operator.model.status import JobRecord

OWNER = Attach("batch/v1", "Job", "train", "job-uid", "trainer")


class AttachedWorld(World):
    """With a controller that makes a pod for every worker that has none, as the Job controller does for its
    indexes.

    `restarts` is what its policy allows: pods that failed beyond it are not made again.
    """

    def __init__(self, restarts: int = 10**6, **spec: object) -> None:
        super().__init__(make_spec(attach=OWNER, template={}, **spec))
        self.restarts = restarts
        self.exit_codes: list[int] = []

    def finished(self, uid: str) -> None:
        directive = self.sidecars[uid].told
        self.exit_codes.append(directive.exit_code)
        super().finished(uid)
        if directive.exit_code:
            self.pods[uid] = replace(self.pods[uid], phase="Failed")

    def tick(self, killed_after: int | None = None) -> None:
        failed = sum(pod.phase == "Failed" for pod in self.pods.values())
        taken = {pod.worker for pod in self.pods.values() if not pod.deleting and pod.phase != "Failed"}
        for worker in range(self.job.spec.workers):
            if worker not in taken and failed <= self.restarts:
                self._make(f"train-{worker}-{self.uids}", worker, 0, ())
        super().tick(killed_after)
        assert not [action for action in self.created if isinstance(action, CreatePod)], (
            "pods are made by the owner alone"
        )

    def lose(self, worker: int) -> str:
        """The pod is deleted behind everybody's back; its UID."""
        uid = self.member(worker)
        self._gone(uid)
        return uid


def test_crash_is_mended_in_place_and_the_owner_sees_nothing() -> None:
    world = AttachedWorld().running(7)
    before = set(world.pods)
    world.recovered(crash=2)
    assert set(world.pods) == before
    assert {pod.phase for pod in world.pods.values()} == {"Running"}
    assert world.starts[2][0] is not None, "restored, not begun anew"
    assert world.status.crashes == 1


def test_lost_pod_comes_back_by_its_owner_and_the_others_go_on_in_place() -> None:
    world = AttachedWorld().running(7)
    survivors = {world.member(worker) for worker in (0, 1, 3)}
    lost = world.lose(2)
    world.until("Running", attempt=2)
    assert survivors < set(world.pods)
    assert lost not in world.pods
    assert {*world.starts[2]} == {0, 1, 2, 3}
    assert len({*world.starts[2].values()}) == 1
    assert world.starts[2][2] is not None, "restored from its peer"


def test_pod_on_a_dead_node_is_deleted_by_eviction_so_that_its_owner_makes_another() -> None:
    world = AttachedWorld().running(7)
    node = world.home(1)
    lost = {uid for uid, pod in world.pods.items() if pod.node == node}
    world.kill_node(node)
    world.until("Running", attempt=2)
    assert {action.uid for action in world.deleted} == lost
    assert all(action.force and action.evict for action in world.deleted), "no kubelet will confirm it"


def test_pods_that_the_owner_makes_where_one_fell_silent_are_left_alone_there() -> None:
    """The scheduler knows nothing against that node, and each new one comes while the one before is ended."""
    world = AttachedWorld()
    world.heartbeats, world.grace = True, 30.0
    world.running(7)
    node, lost = world.home(1), world.member(1)
    there = {uid for uid, pod in world.pods.items() if pod.node == node}
    world.liked = node
    world.cut_off(node)
    world.tick_until(lambda: world.deleted)
    world.cut = set()
    world.until("Running", attempt=2)
    assert lost in there
    assert {action.uid for action in world.deleted} <= there, "no pod that came later"


def test_success_ends_every_launcher_with_zero_and_those_of_pods_that_its_owner_makes_again() -> None:
    world = AttachedWorld()
    world.total_steps = 9
    world.until("Completed")
    world.train(3)
    assert world.exit_codes == [0, 0, 0, 0]
    assert {pod.phase for pod in world.pods.values()} == {"Succeeded"}
    assert not world.deleted, "the owner has yet to count them"
    world.lose(1)
    world.train(6)
    assert world.pods[world.member(1)].phase == "Succeeded"
    assert world.status.phase == "Completed"


def test_spent_budget_ends_every_launcher_with_the_commands_own_exit_code() -> None:
    world = AttachedWorld(restarts=0, max_restarts=1)
    for attempt in (1, 2):
        world.until("Running", attempt=attempt)
        world.train(5)
        world.crash(2, code=7)
    world.until("Failed")
    world.train(3)
    assert world.exit_codes[0] == 7
    assert all(world.exit_codes), "every pod has to fail, or the owner would wait for the rest"
    assert {pod.phase for pod in world.pods.values()} == {"Failed"}
    assert not world.deleted


def test_owner_that_tries_again_gets_a_new_budget_and_the_newest_remote_version() -> None:
    world = AttachedWorld(max_restarts=0, remote=REMOTE).running(13)
    world.crash(0)
    world.until("Failed")
    world.until("Running", attempt=2)
    assert world.starts[2][0] == max(world.remote)
    assert world.status.crashes == 0
    assert not world.status.holds("Failed")
    assert world.status.completed is None


def test_failed_job_is_not_taken_up_again_while_pods_of_its_last_attempt_live() -> None:
    world = AttachedWorld(max_restarts=0).running(5)
    world.crash(0)
    world.until("Failed")
    world.sidecars[world.member(3)].reachable = False
    seen: list[JobRecord] = []
    for _ in range(8):
        world.tick()
        seen.append(world.status)
    assert {record.phase for record in seen} == {"Failed"}
    world.lose(3)
    world.until("Running", attempt=2)


def test_operator_that_dies_anywhere_finishes_what_it_began() -> None:
    for killed_after in range(4):
        world = AttachedWorld().running(7)
        world.lose(2)
        for _ in range(6):
            world.tick(killed_after)
        world.until("Running", attempt=2)
        assert world.status.attempt == 2


def test_pods_beyond_the_jobs_size_are_left_alone_and_told() -> None:
    world = AttachedWorld().running(7)
    world.owner_size = 6
    world._make("train-4-x", 4, 0, ())
    world._make("train-5-x", 5, 0, ())
    world.train(60)
    assert not world.deleted
    assert (world.status.attempt, world.status.phase) == (1, "Running")
    placed = world.condition("Placed")
    assert (placed.status, placed.reason) == (True, "OwnerResized")
    assert "Job train has 6 workers now, and the job that was attached to it 4" in placed.message
    world.owner_size = 4
    world.train(2)
    placed = world.condition("Placed")
    assert placed.reason != "OwnerResized"
    world.total_steps = world.newest_step() + 3
    world.until("Completed")
    world.train(3)
    assert world.exit_codes == [0] * 6, "the owner counts all of its pods"


def test_pod_beyond_the_jobs_size_is_left_alone_on_a_lost_node_too() -> None:
    world = AttachedWorld().running(7)
    world.owner_size = 5
    world._make("train-4-x", 4, 0, ())
    world.train(10)
    (beyond,) = (pod for pod in world.pods.values() if pod.worker == 4)
    assert beyond.node is not None
    world.kill_node(beyond.node)
    world.train(60)
    assert beyond.uid not in {each.uid for each in world.deleted}


def test_owner_that_was_scaled_down_is_named_with_its_size() -> None:
    world = AttachedWorld().running(7)
    world.restarts = -1
    world.owner_size = 2
    for worker in (2, 3):
        world.lose(worker)
    world.train(20)
    world.assert_told("Restoring", "OwnerResized", "workers without a pod: 2, 3. Job train has 2 workers now")
    world.owner_size, world.restarts = 4, 10**6
    world.until("Running", attempt=2)


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
    world.assert_told("Placed", (False, "WaitingForQueue"), GATE)
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
    world = World(make_spec(gang="Volcano")).running(0)
    world.suspended()
    world.tick()
    assert not world.have_gang
    world.change(suspend=False)
    world.until("Running")
    assert world.have_gang


@pytest.mark.parametrize(
    ("failure", "said"),
    [(ApiFailure(404, "not found"), "does not serve podgroups.scheduling.volcano.sh/v1beta1"),
     (ApiFailure(403, "forbidden"), "rbac.gangSchedulers")],
)  # fmt: skip
async def test_why_there_is_no_gang_is_told_with_what_to_do(failure: ApiFailure, said: str) -> None:
    raw = queued_job()
    raw["spec"]["gang"] = {"scheduler": "Volcano"}
    belongings = OwnedObjects(ApiModel(POST=failure))
    await belongings.ensure_gang(parse_job(raw))
    assert not belongings.have_gang
    assert said in belongings.gang_problem


async def test_gang_of_another_size_is_made_anew_and_a_strangers_is_left_alone() -> None:
    raw = queued_job()
    raw["spec"]["gang"] = {"scheduler": "Volcano"}
    job = parse_job(raw)
    small = build_gang(replace(job, spec=replace(job.spec, workers=2)))
    path = pod_groups("Volcano").path("ns", "j")
    server = ApiModel({path: small})
    belongings = OwnedObjects(server)
    await belongings.ensure_gang(job)
    await belongings.ensure_gang(job)
    assert belongings.have_gang
    assert server.objects[path]["spec"]["minMember"] == 4
    server = ApiModel({path: {"metadata": {"name": "j"}, "spec": {}}})
    belongings = OwnedObjects(server)
    await belongings.ensure_gang(job)
    assert "not this job's" in belongings.gang_problem
    assert path in server.objects
