"""Promise: what a script saves with torch.distributed.checkpoint comes back on any ranks."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.lives import Lives
from tests.scripted_sidecar import ScriptedSidecar, until
from tests.trainer.torch_limits import FSDP2_ON_CPUS
from tiercheck import Checkpointer
from tiercheck.dcp import Storage, TierCheckReader
from tiercheck.protocol.local import Reply, Welcome
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends import sidecar_backend
from tiercheck.trainer.backends.backend import Ranges, RestoreError
from tiercheck.trainer.backends.sidecar_backend import SidecarBackend
from tiercheck.trainer.dcp import writer
from tiercheck.trainer.dcp.writer import Note, planner_paths, step_of
from tiercheck.trainer.tensors.tensor_parts import NotCapturable

SCRIPT = Path(__file__).parent / "dcp_script.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "train_dcp.py"

Launch = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def launch(lives: Lives, tmp_path: Path) -> Launch:
    """Runs the script on so many ranks, and answers with what each of them found."""
    if not FSDP2_ON_CPUS:
        pytest.skip("FSDP2 of this torch needs an accelerator")

    def launch(world: int, *actions: str) -> list[dict[str, Any]]:
        return [said[-1] for said in lives.run([], [SCRIPT, tmp_path, *actions], ranks=world)]

    return launch


def test_saved_on_two_ranks_it_comes_back_on_three_and_on_one(launch: Launch) -> None:
    before = launch(2, "train", "plain-save", "train", "save", "whole")
    assert [rank["saved"] for rank in before] == [1, 1]
    for world in (3, 1):
        after = launch(world, "load", "whole")
        assert {rank["loaded"] for rank in after} == {4}
        assert [rank["whole"] for rank in after] == [before[0]["whole"]] * world


@pytest.mark.extended
def test_what_is_saved_in_a_thread_or_a_process_is_the_state_of_its_step(launch: Launch) -> None:
    told = launch(2, "train", "whole", "async", "whole")
    assert told[0]["whole"][0] != told[0]["whole"][1]  # training went on
    after = launch(2, "load", "whole", "train", "plain-async", "train", "whole", "process")
    assert {rank["loaded"] for rank in after} == {2}
    assert after[0]["whole"][0] == told[0]["whole"][0]
    last = launch(1, "load", "whole")
    assert last[0]["loaded"] == 6
    assert last[0]["whole"][0] == after[0]["whole"][1]


def test_if_one_rank_fails_no_version_appears_and_training_goes_on(launch: Launch) -> None:
    told = launch(
        2, "train", "save", "train", "fail-on-1", "raw-fail-on-1", "train", "save", "train", "fail-on-1"
    )
    assert [rank["ok"] for rank in told] == [False, False]
    assert [rank["raised"] for rank in told] == [False, False]  # CheckpointException is no Exception
    assert [(rank["saved"], rank["failed"]) for rank in told] == [(2, 2), (2, 2)]
    assert not any(rank["group"] for rank in told), (
        "who holds it keeps gloo's threads beyond destroy_process_group"
    )
    assert {rank["start"] for rank in launch(2)} == {6}


def test_metadata_is_that_of_torchs_own_writer(launch: Launch) -> None:
    told = launch(2, "train", "compare-metadata")
    assert told[0]["written"]
    assert [rank["read"] for rank in launch(2, "read-metadata")] == [True, True]


class Malicious:
    """Pickles as a call of `open`, which leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_what_would_run_code_is_not_saved(tmp_path: Path) -> None:
    with Storage(tmp_path / "checkpoints") as storage:
        assert not storage.save({"weight": torch.ones(3), "bad": Malicious(tmp_path / "hacked")}, 1)
        assert storage.failed == 1
        assert storage.save({"weight": torch.ones(3), "good": [1, 2.5, "x", None, {"a": torch.ones(1)}]}, 2)
    assert Storage(tmp_path / "checkpoints").start == 2
    assert not (tmp_path / "hacked").exists()


def test_what_would_run_code_never_reaches_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as careless:  # somebody else wrote the slot
        careless.setattr(writer, "readable", lambda fqn, content, value: content)
        with Storage(tmp_path / "checkpoints") as storage:
            assert storage.save({"weight": torch.ones(3), "bad": Malicious(tmp_path / "hacked")}, 1)
    state = {"weight": torch.zeros(3), "bad": None}
    with (
        Storage(tmp_path / "checkpoints") as storage,
        pytest.raises(CheckpointException, match="could run code"),
    ):
        storage.load(state)
    assert not (tmp_path / "hacked").exists()


def test_only_the_bytes_that_a_rank_needs_are_asked_for(tmp_path: Path) -> None:
    with Storage(tmp_path / "checkpoints") as storage:
        assert storage.save({"big": torch.arange(1_000_000.0), "small": torch.arange(10.0)}, 1)
    with Storage(tmp_path / "checkpoints") as storage:
        offer = storage._offer
        assert offer is not None
        assert offer.borrow is not None
        asked: list[tuple[int, int]] = []

        def borrow(rank: int, ranges: Ranges) -> str:
            asked.extend(ranges)
            assert offer is not None
            assert offer.borrow is not None
            return offer.borrow(rank, ranges)

        state = {"small": torch.zeros(10)}
        dcp.load(state, storage_reader=TierCheckReader(dataclasses.replace(offer, borrow=borrow)))
    assert state["small"].equal(torch.arange(10.0))
    assert sum(end - begin for begin, end in asked) < 200_000


def test_one_checkpoint_id_in_three_spellings_names_a_step() -> None:
    assert [step_of(each) for each in ("7", "runs/step-50", Path("a/checkpoint_000120"))] == [7, 50, 120]
    with pytest.raises(ValueError, match="does not end in the number of a step"):
        step_of("latest")


def test_without_a_step_nothing_is_saved(tmp_path: Path) -> None:
    with Storage(tmp_path / "checkpoints") as storage:
        with pytest.raises(CheckpointException, match="which step"):
            dcp.save({"weight": torch.ones(3)}, storage_writer=storage.writer())
        with pytest.raises(RestoreError, match="fresh start"):
            storage.reader()


def test_complete_version_is_not_touched_by_a_second_save_of_its_step(tmp_path: Path) -> None:
    with Storage(tmp_path / "checkpoints") as storage:
        assert storage.save({"weight": torch.ones(3)}, 1)
        assert not storage.save({"weight": torch.zeros(3)}, 1)
    state = {"weight": torch.zeros(3)}
    with Storage(tmp_path / "checkpoints") as storage:
        assert storage.load(state) == 1
    assert state["weight"].equal(torch.ones(3))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours; what torch logs of a failed save is an error."""
    return [each.message for each in caplog.records if each.levelno == logging.WARNING]


def test_script_that_loads_nothing_is_told_that_it_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for start in (0, 20):
        with Storage(tmp_path) as storage:
            assert storage.start == start
            assert storage.save({"weight": torch.ones(3)}, start or 20) == (not start)
    told, _ = warnings_of(caplog)
    assert "step 20 (attempt 0) was not loaded" in told
    assert "call load(state) before the first save" in told
    caplog.clear()
    with Storage(tmp_path) as storage:
        dcp.load({"weight": torch.zeros(3)}, storage_reader=storage.reader())
        assert storage.save({"weight": torch.ones(3)}, 21)
    assert not warnings_of(caplog)


def test_each_kind_of_failed_save_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Storage(tmp_path) as storage:
        assert storage.save({"weight": torch.ones(3)}, 1)
        for step in (1, 1, 2, 3):
            assert not storage.save({"weight": torch.ones(3), "bad": open}, step)
        assert not storage.save({"weight": torch.ones(3).to_sparse()}, 4)
    said = warnings_of(caplog)
    assert len(said) == 2
    assert "is saved already" in said[0]
    assert "bad: a builtins.builtin_function_or_method could not be read back" in said[1]


def test_a_checkpointer_says_that_such_a_version_is_not_its_own(tmp_path: Path) -> None:
    with Storage(tmp_path / "checkpoints") as storage:
        assert storage.save({"weight": torch.ones(3)}, 1)
    model = torch.nn.Linear(2, 2)
    with (
        Checkpointer(
            model, torch.optim.SGD(model.parameters()), folder=tmp_path / "checkpoints"
        ) as checkpointer,
        pytest.raises(RestoreError, match=r"saved by torch\.distributed\.checkpoint"),
    ):
        checkpointer.restore()


def test_in_a_cluster_saves_go_to_the_sidecars_slots_and_loads_are_borrowed(
    delta_sidecar: ScriptedSidecar,
) -> None:
    sidecar = delta_sidecar
    sidecar.welcome = Welcome(attempt=1, snapshot_every=5)
    state = {"weight": torch.arange(6.0), "position": 5}
    with Storage() as storage:
        assert (storage.start, storage.every) == (0, 5)
        storage.end_step(4, 0.5)
        assert storage.save(state, 5)
        storage.async_save(state, 10)
    assert sorted(sidecar.completed(Kind.SNAPSHOT)) == [5, 10]
    assert [request.step for request in sidecar.asked("restored")] == [0]
    assert sidecar.asked("progress")[0].loss == 0.5
    assert sidecar.asked("no-deltas")
    sidecar.welcome = dataclasses.replace(
        sidecar.welcome, restore_version=Version(10, 1), restore_world_size=1
    )
    path = sidecar.completed(Kind.SNAPSHOT)[10]
    sidecar.answer = lambda request: Reply(True, path) if request.op == "borrow" else sidecar.behave(request)
    loaded = {"weight": torch.zeros(6), "position": 0}
    with Storage() as storage:
        assert storage.load(loaded) == 10
        assert len(sidecar.asked("restored")) == 1  # what is lent stays until training goes on
        storage.end_step(11)
        assert [request.step for request in sidecar.asked("restored")] == [0, 10]
    assert loaded["weight"].equal(torch.arange(6.0))
    assert loaded["position"] == 5
    assert sidecar.asked("borrow")


def test_without_a_sidecar_a_save_fails_and_training_goes_on(delta_sidecar: ScriptedSidecar) -> None:
    with Storage() as storage:
        assert storage.save({"weight": torch.ones(3)}, 5)
        delta_sidecar.stop()
        assert not storage.save({"weight": torch.ones(3)}, 10)
        assert (storage.saved, storage.failed) == (1, 1)


def test_note_is_read_as_it_was_written() -> None:
    note = Note({"dcp/a+": "a"}, frozenset({"a"}), frozenset(), {"x": (0, 9)}, {"m.0": ("m", 0)})
    assert Note.read(note.written()) == note
    with pytest.raises(NotCapturable, match="planner's own data"):
        planner_paths({"a": object()})


def test_the_example_goes_on_after_it_was_killed_as_if_nothing_had_happened(
    lives: Lives, tmp_path: Path
) -> None:
    def losses(folder: Path, kill_at: int | None = None) -> dict[int, float]:
        words = [EXAMPLE, "--folder", tmp_path / folder, "--steps", "16", "--every", "4"]
        modules = ["torch.distributed.checkpoint.state_dict", "tiercheck.dcp"]
        (said,) = lives.run(modules, words, kill_at=kill_at)
        return {told["step"]: told["loss"] for told in said}

    wanted = losses(tmp_path / "whole")
    first = losses(tmp_path / "killed", kill_at=13)
    second = losses(tmp_path / "killed")
    assert 1 < min(second) < 14
    assert {**first, **second} == wanted


def test_progress_is_told_again_after_what_nobody_thought_of(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = SidecarBackend.flush, iter(range(2))

    def flush(backend: SidecarBackend) -> bool:
        if threading.current_thread().name == "tiercheck-progress":
            for _ in left:
                raise RuntimeError("nobody thought of it")
        return real(backend)

    monkeypatch.setattr(SidecarBackend, "flush", flush)
    monkeypatch.setattr(sidecar_backend, "_PROGRESS_LATE", float("inf"))
    with Storage() as storage:
        storage.end_step(1)
        storage.end_step(2)
        until(lambda: [each.step for each in delta_sidecar.asked("progress")][-1:] == [2], "told after all")
    assert next(left, None) is None
