"""Promise: outside a cluster the newest intact version is found, and read with the stored bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.crash_disk import CrashDisk
from tests.descriptors import open_descriptors
from tests.trainer.small_runs import Run, adamw, same_bits, saved_run
from tiercheck.protocol.artifacts.slot import NotASlot, SlotLayout
from tiercheck.protocol.version import Version
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.restore import restoring
from tiercheck.trainer.state.slot_file import SlotReader, SlotWriter
from tiercheck.trainer.tensors.tensor_parts import dtype_name


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
    saved_run(tmp_path, 4)
    newest = tmp_path / "rank-0-of-1" / "000000000004-0.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    again = Run(adamw, tmp_path)
    assert again.checkpointer.restore() == 3
    assert again.data == {"position": 3}


def test_script_that_changes_its_working_directory_finds_its_versions_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs").mkdir()
    for step in (0, 2):
        monkeypatch.chdir(tmp_path)
        run = Run(adamw, Path("checkpoints"))
        assert run.checkpointer.restore() == step
        monkeypatch.chdir(tmp_path / "outputs")
        run.train(2)
        run.checkpointer.close()


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


LARGE = 10_000_019
"""Elements of fp32: above the size for which several threads read, and no multiple of the pieces they read.
"""


def store(path: Path, tensors: dict[str, Tensor]) -> SlotLayout:
    layout = SlotLayout.plan(
        [(name, dtype_name(one.dtype), tuple(one.shape), one.nbytes) for name, one in tensors.items()]
    )
    path.write_bytes(bytes(layout.size))
    writer = SlotWriter(str(path))
    views = writer.begin(layout)
    for name, one in tensors.items():
        views[name].copy_(one)
    writer.finish(layout, 0, Version(1, 0), 1, {})
    return layout


def test_every_kind_of_target_gets_the_stored_bits(tmp_path: Path) -> None:
    tensors = {
        "large": torch.randn(LARGE),
        "low": torch.randn(3, 5).to(torch.bfloat16),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "complex": torch.randn(4, dtype=torch.complex64),
        "transposed": torch.randn(6, 7),
        "channels": torch.randn(2, 3, 4, 5),
    }
    store(tmp_path / "slot", tensors)
    targets = {name: torch.zeros_like(one) for name, one in tensors.items()}
    targets["transposed"] = torch.zeros(7, 6).t()
    targets["channels"] = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    targets["complex"] = torch.zeros(4, dtype=torch.complex64).conj()
    strides = {name: one.stride() for name, one in targets.items()}
    SlotReader.open(str(tmp_path / "slot")).tensors().read_into(list(targets.items()))
    same_bits(targets, tensors)
    assert {name: one.stride() for name, one in targets.items()} == strides


def test_parts_are_read_of_a_file_of_which_nothing_else_is_there(tmp_path: Path) -> None:
    tensors = {
        "large": torch.randn(LARGE),
        "rows": torch.arange(60.0).view(6, 10),
        "low": torch.randn(9).to(torch.bfloat16),
    }
    layout = store(tmp_path / "slot", tensors)
    whole = (tmp_path / "slot").read_bytes()
    wanted = [("large", 1234, torch.zeros(LARGE - 2000)), ("rows", 23, torch.zeros(2, 9))]
    wanted.append(("low", 4, torch.zeros(3, dtype=torch.bfloat16)))
    lent = bytearray(len(whole))
    lent[: layout.data_begin] = whole[: layout.data_begin]
    begins = {tensor.name: tensor.begin for tensor in layout.tensors}
    for name, first, target in wanted:
        begin = begins[name] + first * target.element_size()
        lent[begin : begin + target.nbytes] = whole[begin : begin + target.nbytes]
    (tmp_path / "lent").write_bytes(lent)
    SlotReader.open(str(tmp_path / "lent")).tensors().read_parts(wanted)
    for name, first, target in wanted:
        assert torch.equal(target.view(-1), tensors[name].view(-1)[first : first + target.numel()]), name


def test_only_the_target_is_written_and_torch_counts_the_change(tmp_path: Path) -> None:
    store(tmp_path / "slot", {"x": torch.ones(8)})
    around = torch.zeros(24)
    inner = around[8:16]
    before = around._version
    SlotReader.open(str(tmp_path / "slot")).tensors().read_into([("x", inner)])
    assert around.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 8
    assert around._version > before


@pytest.mark.parametrize("elements", [1000, LARGE])
def test_file_cut_off_after_it_was_opened_is_refused_and_nothing_is_written(
    tmp_path: Path, elements: int
) -> None:
    layout = store(tmp_path / "slot", {"x": torch.ones(elements)})
    tensors = SlotReader.open(str(tmp_path / "slot")).tensors()
    os.truncate(tmp_path / "slot", layout.size - 1)
    target = torch.zeros(elements)
    with pytest.raises(RestoreError, match=f"cut off: {layout.size - 1} of {layout.size} bytes"):
        tensors.read_into([("x", target)])
    assert not target.any()


@pytest.mark.parametrize("elements", [1000, LARGE])
def test_file_cut_off_while_it_is_read_is_refused(
    tmp_path: Path, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = store(tmp_path / "slot", {"x": torch.ones(elements)})
    tensors = SlotReader.open(str(tmp_path / "slot")).tensors()
    read, cut = os.preadv, layout.size - 100

    def cut_off(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(tmp_path / "slot", cut)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_off)
    with pytest.raises(RestoreError, match=f"nothing is at byte {cut}"):
        tensors.read_into([("x", torch.zeros(elements))])


def test_reads_that_bring_less_than_asked_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1000)
    store(tmp_path / "slot", {"x": x})
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda descriptor, buffers, offset: read(descriptor, [buffers[0][:7]], offset)
    )
    target = torch.zeros(1000)
    SlotReader.open(str(tmp_path / "slot")).tensors().read_into([("x", target)])
    assert torch.equal(target, x)


def test_file_that_is_shorter_than_its_header_says_is_no_slot(tmp_path: Path) -> None:
    layout = store(tmp_path / "slot", {"x": torch.ones(1000)})
    os.truncate(tmp_path / "slot", layout.size - 1)
    with pytest.raises(NotASlot, match="truncated"):
        SlotReader.open(str(tmp_path / "slot"))


def test_reader_leaves_no_open_file_behind(tmp_path: Path) -> None:
    store(tmp_path / "slot", {"x": torch.ones(1000)})
    for _ in range(3):
        SlotReader.open(str(tmp_path / "slot")).tensors().read_into([("x", torch.zeros(1000))])
    os.truncate(tmp_path / "slot", 5000)
    with pytest.raises(NotASlot):
        SlotReader.open(str(tmp_path / "slot"))
    assert str(tmp_path / "slot") not in {leads_to for _, leads_to in open_descriptors()}


def test_checkpoint_cut_off_before_the_load_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, 2)
    again = Run(adamw, tmp_path, seed=99)
    before = again.state()
    load_all = restoring.load_all

    def cut_then_load(*arguments: Any, **named: Any) -> None:
        (newest,) = (tmp_path / "rank-0-of-1").glob("000000000002-*.safetensors")
        os.truncate(newest, newest.stat().st_size - 1)
        load_all(*arguments, **named)

    monkeypatch.setattr(restoring, "load_all", cut_then_load)
    with pytest.raises(RestoreError, match="cut off"):
        again.checkpointer.restore()
    same_bits(again.state(), before)
