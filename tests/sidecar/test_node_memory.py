"""What a pod leaves in node memory is for the next pod of the worker, and then cleared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sidecar.restore.test_restore import training
from tests.sidecar.world import MakeWorld, World, flip, until
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.version import Version
from tiercheck_sidecar.node_memory import OWNER, FolderClaim, prepare, sweep, sweep_job
from tiercheck_sidecar.vault import Vault


def slot(folder: Path, name: str) -> None:
    (folder / f"{name}.safetensors").write_bytes(b"bytes")
    (folder / f"{name}.safetensors.seal").write_bytes(b"seal")


def left_behind(job: Path, pod: str, worker: int, claimed: float, *slots: str) -> Path:
    """A folder of a pod that is gone."""
    claim = FolderClaim(job / pod, worker, claimed)
    for name in slots:
        slot(claim.folder, name)
    claim.close()
    return claim.folder


def age(folder: Path, seconds: float) -> None:
    for path in (*folder.iterdir(), folder):
        moment = time.time() - seconds
        os.utime(path, (moment, moment))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {OWNER}


def test_next_pod_of_a_worker_takes_over_what_was_sealed_and_nothing_else(tmp_path: Path) -> None:
    old = left_behind(tmp_path, "old", 1, 10.0, "own-1-a")
    (old / "torn.safetensors").write_bytes(b"no seal")
    other = left_behind(tmp_path, "other", 2, 10.0, "own-2-a")
    new = FolderClaim(tmp_path / "new", 1, 20.0)
    assert new.adopt() == 1
    assert names_in(new.folder) == {"own-1-a.safetensors", "own-1-a.safetensors.seal"}
    assert not old.exists(), "the rest of a dead pod's folder is removed"
    assert names_in(other) == {"own-2-a.safetensors", "own-2-a.safetensors.seal"}, (
        "another worker's is left alone"
    )


def test_later_pod_takes_from_one_that_is_still_dying_and_never_the_other_way_round(tmp_path: Path) -> None:
    old, new = FolderClaim(tmp_path / "old", 1, 10.0), FolderClaim(tmp_path / "new", 1, 20.0)
    slot(old.folder, "own-1-a")
    slot(new.folder, "own-1-b")
    assert old.adopt() == 0
    assert new.adopt() == 1
    assert names_in(new.folder) >= {"own-1-a.safetensors", "own-1-b.safetensors"}
    assert old.folder.exists(), "its owner lives"


def test_sidecar_that_is_restarted_in_its_pod_is_no_later_pod(tmp_path: Path) -> None:
    old = left_behind(tmp_path, "old", 1, 10.0)
    new = FolderClaim(tmp_path / "new", 1, 20.0)
    slot(new.folder, "own-1-b")
    assert FolderClaim(old, 1, 30.0).adopt() == 0
    assert names_in(new.folder) == {"own-1-b.safetensors", "own-1-b.safetensors.seal"}


def test_what_a_spare_keeps_is_its_workers_once_it_is_one(tmp_path: Path) -> None:
    spare = FolderClaim(tmp_path / "spare", -1, 10.0)
    slot(spare.folder, "own-3-a")
    spare.identify(3)
    spare.close()
    assert FolderClaim(tmp_path / "next", 3, 20.0).adopt() == 1


def test_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    first = FolderClaim(tmp_path / "pod", 1, 10.0)
    with pytest.raises(OSError, match="temporarily unavailable"):
        FolderClaim(tmp_path / "pod", 1, 10.0)
    first.close()


def test_sweep_removes_what_is_dead_and_old_and_nothing_that_lives_or_is_young(tmp_path: Path) -> None:
    now = time.time()
    gone_job, job = tmp_path / "gone", tmp_path / "job"
    dead_old = left_behind(gone_job, "a", 0, 1.0, "x")
    dead_young = left_behind(job, "b", 0, 1.0, "x")
    alive = FolderClaim(job / "c", 1, 1.0)
    slot(alive.folder, "x")
    for folder in (dead_old, alive.folder):
        age(folder, 100)
    assert sweep(tmp_path, 50, now) == 1
    assert not dead_old.exists()
    assert dead_young.exists()
    assert alive.folder.exists()
    assert gone_job.exists(), "it was written into just now"
    assert sweep(tmp_path, 50, now + 60) == 1
    assert not gone_job.exists()
    assert not dead_young.exists()
    assert names_in(alive.folder), "whatever its age, a living pod's memory stays"
    alive.close()
    assert sweep_job(job, 50, now + 200) == 1


def test_torn_word_about_the_owner_is_never_trusted_and_swept_in_time(tmp_path: Path) -> None:
    old = left_behind(tmp_path, "old", 1, 10.0, "own-1-a")
    (old / OWNER).write_text('{"worker": 1')
    assert FolderClaim(tmp_path / "new", 1, 20.0).adopt() == 0
    age(old, 100)
    assert sweep_job(tmp_path, 50, time.time()) == 1


def test_prepared_folder_is_open_to_any_user_of_the_jobs_pods_and_commands_are_checked(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tiercheck_sidecar.node_memory"]
    orphan = left_behind(tmp_path / "gone", "a", 0, 1.0, "x")
    age(orphan, 100)
    subprocess.run([*command, str(tmp_path), "uid", "50"], check=True)
    assert (tmp_path / "uid").stat().st_mode & 0o7777 == 0o1777
    assert not orphan.exists(), "each pod that starts on a node sweeps it"
    wrong = subprocess.run([*command, str(tmp_path)], check=False, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "usage" in wrong.stderr
    (tmp_path / "file").write_text("")
    assert subprocess.run([*command, str(tmp_path / "file"), "uid", "50"], check=False).returncode == 1
    prepare(tmp_path, "uid")


def node_memory_world(make_world: MakeWorld) -> World:
    """Two workers, each on a node of its own."""
    world = make_world(workers=2)
    world.node_memory = True
    return training(world)


def test_recreated_pod_restores_from_its_nodes_memory(make_world: MakeWorld) -> None:
    world = node_memory_world(make_world)
    world.train(4)
    world.kill(1)
    world.pods[1] = "pod-1-again"
    world.start(1)
    version = Version(4, 1)
    assert {each.version.step for each in world.report(1).holdings if each.tier is Tier.LOCAL} >= {1, 4}
    world.begin(version, {0: (world.from_peer(1),), 1: (world.from_peer(0),)})
    (restored,) = world.report(1).restore.ranks
    assert restored.tier is Tier.LOCAL
    world.train(6, first=5)


def test_damaged_slot_in_node_memory_is_not_trusted(make_world: MakeWorld) -> None:
    world = node_memory_world(make_world)
    world.train(4)
    world.kill(1)
    for path in (world.memory_dir(1) / "pod-1").glob("own-*.safetensors"):
        if path.with_name(path.name + ".seal").exists():
            flip(path, 100)
    world.pods[1] = "pod-1-again"
    world.start(1)
    assert not [each for each in world.report(1).holdings if each.tier is Tier.LOCAL]
    version = Version(4, 1)
    world.begin(version, {0: (world.from_peer(1),), 1: (world.from_peer(0),)})
    assert world.report(1).restore.ranks[0].tier is Tier.PEER


def test_job_that_is_over_leaves_nothing_and_one_that_only_lost_a_pod_does(make_world: MakeWorld) -> None:
    world = node_memory_world(make_world)
    world.train(4)
    world.terminate(1)
    assert names_in(world.memory_dir(1) / "pod-1"), "the pod may come back"
    world.direct(Phase.FINISH)
    world.terminate(0)
    until(lambda: not (world.memory_dir(0) / "pod-0").exists(), "the folder is gone")


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.symlink_to(path.parent)


def put_folder(path: Path) -> None:
    (path / "inner").mkdir(parents=True)


ODD = [put_fifo, put_link, put_folder]


@pytest.mark.parametrize("put", ODD)
def test_whatever_a_trainer_puts_in_place_of_the_owner_the_next_pods_of_all_jobs_start(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    evil = tmp_path / "job-a" / "x"
    evil.mkdir(parents=True)
    put(evil / OWNER)
    command = [sys.executable, "-m", "tiercheck_sidecar.node_memory", str(tmp_path), "job-b", "3600"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert FolderClaim(tmp_path / "job-a" / "y", 0, 1.0).adopt() == 0


def test_next_pod_reads_no_more_of_an_owners_file_than_an_owner_writes(tmp_path: Path) -> None:
    evil = left_behind(tmp_path, "x", 0, 1.0)
    os.truncate(evil / OWNER, 64 << 30)
    adopt = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30));"
        "from pathlib import Path; from tiercheck_sidecar.node_memory import FolderClaim;"
        f"FolderClaim(Path({str(tmp_path / 'y')!r}), 0, 2.0).adopt()"
    )
    assert subprocess.run([sys.executable, "-c", adopt], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("put", ODD)
def test_own_folder_is_claimed_whatever_lies_in_the_place_of_its_owner(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    (tmp_path / "pod").mkdir()
    put(tmp_path / "pod" / OWNER)
    claim = FolderClaim(tmp_path / "pod", 3, 1.0)
    assert b'"worker":3' in (tmp_path / "pod" / OWNER).read_bytes()
    claim.close()


@pytest.mark.parametrize("put", ODD)
def test_folder_that_nobody_can_have_claimed_is_swept_in_time(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    evil = tmp_path / "x"
    evil.mkdir()
    put(evil / OWNER)
    assert sweep_job(tmp_path, 3600, time.time()) == 0, "not at once"
    assert sweep_job(tmp_path, 3600, time.time() + 7200) == 1
    assert not evil.exists()


@pytest.mark.parametrize("put", [put_fifo, put_link, Path.touch])
def test_what_a_trainer_leaves_beside_the_folders_of_pods_is_swept_in_time(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    put(tmp_path / "junk")
    assert sweep_job(tmp_path, 3600, time.time()) == 0
    assert sweep_job(tmp_path, 3600, time.time() + 7200) == 1
    assert not os.path.lexists(tmp_path / "junk")


def test_date_in_the_future_keeps_nothing(tmp_path: Path) -> None:
    dead = left_behind(tmp_path / "job", "x", 0, 1.0, "own-0-a")
    age(dead, -1e9)
    age(tmp_path / "job", -1e9)
    now = time.time()
    assert sweep(tmp_path, 3600, now) == 1
    age(tmp_path / "job", -1e9)
    sweep(tmp_path, 3600, now)
    assert not (tmp_path / "job").exists()
    dead = left_behind(tmp_path / "job", "x", 0, 1.0, "own-0-a")
    age(dead, -600)
    assert sweep(tmp_path, 3600, now) == 0, "a clock that was set back by minutes costs nothing"


def test_link_in_place_of_the_own_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pod").symlink_to(tmp_path / "elsewhere")
    FolderClaim(tmp_path / "pod", 0, 1.0).close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_folder_of_slots_that_became_a_link_gets_nothing(tmp_path: Path) -> None:
    """A trainer of the same user can rename the folder of its pod."""
    own = Vault(tmp_path / "pod", 1 << 20, [0])
    own.open()
    (tmp_path / "pod").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pod").symlink_to(tmp_path / "elsewhere")
    own.reserve(0, 4096, 4096)
    own.prepare()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_folders_nested_too_deep_to_be_removed_stop_no_sweep(tmp_path: Path) -> None:
    old = [left_behind(tmp_path, name, 1, 1.0) for name in ("a", "z")]
    before = os.getcwd()
    try:
        os.chdir(old[0])
        for _ in range(sys.getrecursionlimit() + 100):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(before)
    try:
        sweep_job(tmp_path, 3600, time.time() + 7200)
        assert not old[1].exists()
    finally:
        subprocess.run(["rm", "-rf", str(old[0])], check=True)


@pytest.mark.parametrize("put", ODD)
def test_inventory_waits_for_nobody_and_starts_whatever_lies_there(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    (tmp_path / "pod").mkdir()
    for name in ("own-0-a.safetensors", "own-0-a.safetensors.seal", "own-0-b.safetensors.seal"):
        put(tmp_path / "pod" / name)
    (tmp_path / "pod" / "own-0-b.safetensors").write_bytes(b"bytes")
    found = Vault(tmp_path / "pod", 1 << 20, [0])
    found.open()
    assert found.held() == ()
