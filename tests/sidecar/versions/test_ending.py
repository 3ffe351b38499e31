"""When a job ends, its last version is in the remote tier, and its sidecars go in seconds."""

from __future__ import annotations

import dataclasses
import http.client
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.sidecar.world import COME_BACK, LAST_WORD, FakeLauncher, MakeWorld, World, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Peer, Phase
from tiercheck.protocol.report import Report, TrainerState
from tiercheck.protocol.version import Version
from tiercheck_sidecar.decoding import decode

PATIENT = 3600
"""Seconds of grace: a sidecar that waits for it to end is seen."""
GONE = "tiercheck_sidecar.versions.watermark:GONE"


def training(world: World, grace: int = PATIENT) -> Path:
    """All released, with a remote tier that has nothing yet. Returns its folder."""
    store = world.use_directory(every=1000)
    world.grace = grace
    world.patience[COME_BACK] = 0.2
    world.launch()
    return store


def launchers(world: World) -> list[FakeLauncher]:
    """Of every worker, with its command running."""
    found = [FakeLauncher(world.run_dir(worker) / names.SOCKET_NAME) for worker in range(world.workers)]
    for worker, launcher in enumerate(found):
        while launcher.order().phase is not Phase.RELEASE:
            pass
        launcher.tell("started", world.attempt)
        state = lambda worker=worker: world.report(worker).trainer.state  # noqa: E731
        until(lambda state=state: state() is TrainerState.RUNNING, f"trainer {worker} runs")
    return found


def finish(world: World) -> None:
    """As the operator says it, who names no holders then."""
    world.direct(Phase.FINISH, holders=())


def manifests(store: Path) -> list[str]:
    return sorted(path.name for path in store.rglob("manifests/*.json"))


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2), *(pytest.param(order, marks=pytest.mark.extended) for order in ((2, 1, 0), (1, 0, 2)))],
)
def test_suspended_job_is_gone_within_seconds_whichever_sidecar_is_asked_first(
    make_world: MakeWorld, order: tuple[int, ...]
) -> None:
    """A kubelet ends each sidecar when its own trainer has ended: the coordinator's may be the first, or the
    last."""
    world = make_world(workers=3)
    store = training(world)
    trainers = launchers(world)
    world.save_everywhere(7)
    finish(world)
    for worker in order:
        trainers[worker].close()
        world.ask_to_end(worker)
    for worker in order:
        assert world.end_of(worker) == 0, world.logs(worker)
    assert manifests(store) == ["000000000007-1.json"]


def test_sidecar_asked_to_go_after_the_coordinator_has_gone_goes_too(make_world: MakeWorld) -> None:
    world = make_world(workers=3)
    store = training(world)
    world.save_everywhere(7)
    finish(world)
    for worker in (0, 1, 2):
        assert world.terminate(worker) == 0, world.logs(worker)
    assert manifests(store) == ["000000000007-1.json"]


def test_coordinator_waits_for_the_version_of_a_trainer_that_ends_last(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    store = training(world)
    trainers = launchers(world)
    world.save_everywhere(7)
    with ExitStack() as stack:
        first, last = (stack.enter_context(world.rank(rank)) for rank in (0, 1))
        assert first.reserve(300_000).ok
        assert last.reserve(300_000).ok
        assert first.save(8)
        finish(world)
        trainers[0].close()
        world.ask_to_end(0)
        until(lambda: manifests(store) == ["000000000007-1.json"], "what is complete is uploaded meanwhile")
        assert last.save(8)
        trainers[1].close()
        world.ask_to_end(1)
    assert world.end_of(0) == 0, world.logs(0)
    assert world.end_of(1) == 0, world.logs(1)
    assert "000000000008-1.json" in manifests(store)


def test_sidecar_that_waits_does_not_say_that_its_trainer_runs(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    training(world)
    trainers = launchers(world)
    world.save_everywhere(7)
    finish(world)
    trainers[0].close()
    world.ask_to_end(0)
    until(lambda: "tiercheck_trainer_running 0.0" in world.metrics(0), "the trainer of worker 0 has ended")
    assert not world.has_ended(0), "it waits for worker 1, whose trainer runs"
    assert "tiercheck_trainer_running 1.0" in world.metrics(1)
    trainers[1].close()
    assert world.end_of(0) == 0
    assert world.terminate(1) == 0


def test_worker_whose_pod_is_lost_while_the_job_ends_keeps_nobody(make_world: MakeWorld) -> None:
    world = make_world(workers=3)
    world.patience[GONE] = 2.0
    store = training(world)
    trainers = launchers(world)
    world.save_everywhere(7)
    finish(world)
    until(lambda: manifests(store) == ["000000000007-1.json"], "uploaded")
    world.kill(2)
    for worker in (0, 1):
        trainers[worker].close()
        world.ask_to_end(worker)
    for worker in (0, 1):
        assert world.end_of(worker) == 0, world.logs(worker)


def test_controller_is_told_which_sidecars_owe_nothing_so_that_no_container_beside_them_keeps_the_pod(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=2)
    training(world)
    trainers = launchers(world)
    world.save_everywhere(7)
    assert not world.report(0).settled
    finish(world)
    trainers[0].close()
    until(lambda: world.report(0).watermarks.remote is not None, "uploaded")
    assert not world.report(1).settled, "its trainer runs"
    trainers[1].close()
    for worker in (0, 1):
        until(lambda worker=worker: world.report(worker).settled, f"worker {worker} has settled")
        assert not world.has_ended(worker), "nobody asked it to"


def test_worker_that_owes_nothing_goes_at_once_if_the_coordinator_is_lost(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    store = training(world)
    trainers = launchers(world)
    world.save_everywhere(7)
    finish(world)
    until(lambda: manifests(store) == ["000000000007-1.json"], "uploaded")
    until(lambda: world.report(1).remote.versions == (Version(7, 1),), "worker 1 knows")
    world.kill(0)
    trainers[1].close()
    assert world.terminate(1) == 0, world.logs(1)


def test_worker_whose_coordinator_is_lost_for_good_gives_up_and_goes(make_world: MakeWorld) -> None:
    """The operator then names none, and nobody else writes manifests: what is not complete will never be."""
    world = make_world(workers=2)
    world.patience[GONE] = 2.0
    store = training(world)
    trainers = launchers(world)
    world.save_everywhere(7)
    world.kill(0)
    told = dataclasses.replace(world.directive(1, Phase.FINISH, holders=()), coordinator=Peer(0, ""))
    assert world.send(1, told)[0] == 200
    trainers[1].close()
    assert world.terminate(1) == 0, world.logs(1)
    assert manifests(store) == []


def test_without_a_remote_tier_nobody_waits_for_anybody(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.grace = PATIENT
    world.launch()
    world.save_everywhere(7)
    finish(world)
    assert world.terminate(1) == 0
    assert world.terminate(0) == 0


def test_unreachable_remote_tier_holds_pods_as_long_as_their_grace_and_the_log_says_why(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=2)
    store = training(world, grace=5)
    world.save_everywhere(7)
    for path in sorted(store.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    store.rmdir()
    store.write_text("no folder any more")
    finish(world)
    for worker in (0, 1):
        world.ask_to_end(worker)
    for worker in (0, 1):
        assert world.end_of(worker) == 0
        said = world.logs(worker)
        assert "the last version did not reach the remote tier within 4 s" in said
        assert "Check spec.tiers.remote and its credentials" in said


def test_controller_hears_of_the_last_upload_before_the_sidecars_go(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.patience[LAST_WORD] = 2.0  # as the product has it
    training(world)
    world.save_everywhere(7)
    heard: list[Report] = []

    def listen() -> None:
        """Asks again and again, with pauses, as the operator does."""
        serial = -1
        while True:
            try:
                status, body = world.call(0, "GET", f"/v1/report?after={serial}&wait=20")
            except (OSError, http.client.HTTPException):
                return
            assert status == 200
            heard.append(decode(body, Report))
            serial = heard[-1].serial
            time.sleep(0.3)  # the operator's pause; nothing is waited for

    finish(world)
    listener = threading.Thread(target=listen)
    listener.start()
    for worker in (0, 1):
        world.ask_to_end(worker)
    for worker in (0, 1):
        assert world.end_of(worker) == 0, world.logs(worker)
    listener.join()
    assert heard[-1].watermarks.remote == Version(7, 1)
