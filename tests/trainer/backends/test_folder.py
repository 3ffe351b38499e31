"""Promise: outside a cluster the newest version that is complete and intact is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_disk import CrashDisk
from tests.trainer.small_runs import Run, adamw
from tiercheck.protocol.version import Version
from tiercheck.trainer.backends.folder_backend import FolderBackend


def write(folder: Path, rank: int, world: int, step: int, content: bytes = b"x" * 100) -> None:
    backend = FolderBackend(folder, rank, world, keep=2)
    path = backend.begin(step, len(content))
    Path(path).write_bytes(content)
    backend.complete(path, step, len(content))


def steps_in(folder: Path, rank: int, world: int) -> list[int]:
    return sorted(
        int(path.stem.partition("-")[0]) for path in (folder / f"rank-{rank}-of-{world}").glob("*.json")
    )


def found(folder: Path, rank: int = 0, world: int = 1) -> int | None:
    offer = FolderBackend(folder, rank, world, keep=2).find()
    return None if offer is None else offer.version.step


def test_corrupt_file_makes_it_fall_back_to_the_version_before(tmp_path: Path) -> None:
    run = Run(adamw, tmp_path)
    run.train(4)
    run.checkpointer.close()
    newest = tmp_path / "rank-0-of-1" / "000000000004-0.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    again = Run(adamw, tmp_path)
    assert again.checkpointer.restore() == 3
    assert again.data == {"position": 3}


def test_bytes_cut_off_are_noticed(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 10)
    write(tmp_path, 0, 1, 20)
    (tmp_path / "rank-0-of-1" / "000000000020-0.safetensors").write_bytes(b"x" * 99)
    assert found(tmp_path) == 10


def test_file_without_its_checksums_is_not_complete(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 10)
    backend = FolderBackend(tmp_path, 0, 1, keep=2)
    Path(backend.begin(20, 100)).rename(tmp_path / "rank-0-of-1" / "000000000020-0.safetensors")
    assert found(tmp_path) == 10


def test_what_a_killed_process_left_unfinished_is_cleared_away(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 10)
    left = Path(FolderBackend(tmp_path, 0, 1, keep=2).begin(20, 100))
    assert found(tmp_path) == 10
    assert not left.exists()


def test_only_versions_of_all_ranks_count(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, 2, 10)
    write(tmp_path, 0, 2, 20)
    assert found(tmp_path, 0, 2) == 10
    assert found(tmp_path, 1, 2) == 10


def test_rank_with_the_corrupt_file_and_rank_with_the_good_one_agree(tmp_path: Path) -> None:
    for step in (10, 20):
        for rank in (0, 1):
            write(tmp_path, rank, 2, step)
    (tmp_path / "rank-1-of-2" / "000000000020-0.safetensors").write_bytes(b"y" * 100)
    assert [found(tmp_path, 0, 2), found(tmp_path, 1, 2)] == [10, 10]


def test_what_was_given_up_is_removed_so_that_two_histories_never_mix(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, 2, 10)
    write(tmp_path, 0, 2, 20)
    assert found(tmp_path, 0, 2) == 10
    write(tmp_path, 1, 2, 20)  # rank 1 gets there again, rank 0 not yet
    assert found(tmp_path, 1, 2) == 10


def test_newest_complete_versions_are_kept_though_another_rank_is_behind(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        for rank in (0, 1):
            write(tmp_path, rank, 2, step)
    for step in (40, 50, 60):  # rank 1 hangs: nothing complete may go
        write(tmp_path, 0, 2, step)
    assert steps_in(tmp_path, 0, 2) == [20, 30, 40, 50, 60]
    assert steps_in(tmp_path, 1, 2) == [20, 30]
    assert found(tmp_path, 1, 2) == 30


def test_checkpoint_of_another_number_of_ranks_is_offered_if_it_is_newer(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 10)
    write(tmp_path, 0, 3, 20)  # the other two never came
    offer = FolderBackend(tmp_path, 0, 2, keep=2).find()
    assert offer is not None
    assert offer.borrow is not None
    assert (offer.version, offer.path, offer.world_size) == (Version(10, 0), "", 1)
    assert Path(offer.borrow(0, ())).is_file()


def test_checkpoints_of_another_number_of_ranks_go_when_enough_newer_ones_are_complete(
    tmp_path: Path,
) -> None:
    write(tmp_path, 0, 1, 10)
    for step in (20, 30):
        assert steps_in(tmp_path, 0, 1) == [10]
        for rank in (1, 0):
            write(tmp_path, rank, 2, step)
    assert steps_in(tmp_path, 0, 1) == []


def test_version_order_is_by_step_then_attempt(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 9)
    write(tmp_path, 0, 1, 10)
    offer = FolderBackend(tmp_path, 0, 1, keep=2).find()
    assert offer is not None
    assert offer.version == Version(10, 0)


def test_folder_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    run = Run(adamw, blocked)
    losses = run.train(3)
    run.checkpointer.close()
    assert len(losses) == 3
    assert (run.checkpointer.captured, run.checkpointer.skipped) == (0, 3)


def test_whenever_the_power_goes_one_whole_version_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = CrashDisk(tmp_path, monkeypatch)
    folder = tmp_path / "run"
    backend = FolderBackend(folder, 0, 1, keep=1)
    saved: list[Path] = []
    complete: list[int] = []

    def look() -> None:
        whole = [each for each in saved if disk.surely(each) and disk.surely(each.with_suffix(".json"))]
        assert whole or not complete, "nothing would be left"

    disk.look = look
    for step in (10, 20, 30):
        path = backend.begin(step, 100)
        Path(path).write_bytes(b"x" * 100)
        saved.append(folder / "rank-0-of-1" / f"{step:012d}-0.safetensors")
        backend.complete(path, step, 100)
        complete.append(step)
    assert not saved[0].exists()
    assert saved[-1].exists()
