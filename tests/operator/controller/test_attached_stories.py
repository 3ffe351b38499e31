"""Attached jobs are as jobs of our own, but another controller brings their pods."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck_operator.model.actions import CreatePod
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
        directive = self.sidecars[uid].directive
        assert directive is not None
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
    world.crash(2)
    world.until("Running", attempt=2)
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
    while not world.deleted:
        world.tick()
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


def test_owner_that_was_scaled_down_is_named_with_its_size() -> None:
    world = AttachedWorld().running(7)
    world.restarts = -1
    world.owner_size = 2
    for worker in (2, 3):
        world.lose(worker)
    world.train(20)
    restoring = world.condition("Restoring")
    assert restoring.reason == "OwnerResized"
    assert "workers without a pod: 2, 3. Job train has 2 workers now" in restoring.message
    world.owner_size, world.restarts = 4, 10**6
    world.until("Running", attempt=2)
