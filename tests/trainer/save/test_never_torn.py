"""Promise: a snapshot is the state after its step, whatever training does once `step` returned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.trainer.small_runs import Run, adamw, same_bits
from tiercheck import Checkpointer
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.snapshot import SnapshotJob
from tiercheck.trainer.save.staging import ParallelCopy, copy_tensor

DEADLINE = 30.0


class HeldCopies:
    """Copies that begin, and end once `go` is set. `of`: the thread that is held up; empty: whichever one."""

    def __init__(self, of: str = "") -> None:
        self.of, self.begun, self.go = of, threading.Event(), threading.Event()
        self.done_by: list[str] = []

    def __call__(self, target: Tensor, source: Tensor) -> None:
        me = threading.current_thread().name
        if self.of in ("", me):
            self.begun.set()
            assert self.go.wait(DEADLINE)
        copy_tensor(target, source)
        self.done_by.append(me)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldCopies:
    copies = HeldCopies()
    monkeypatch.setattr(staging, "copy_tensor", copies)
    return copies


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "rank-0-of-1" / f"{step:012d}-0.safetensors")
    return {
        name: value
        for name, value in tensors.items()
        if name not in ("user", "pieces", "proof") and not name.startswith("__pad")
    }


def without_ties(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if name != "model/last.weight"}


def test_every_snapshot_is_the_state_after_its_step_though_training_goes_on_at_once(tmp_path: Path) -> None:
    run = Run(adamw, tmp_path, keep=100)
    states = {}
    for step in range(1, 31):
        loss = run.update()
        states[step] = without_ties(run.state())
        run.checkpointer.step(loss)
    run.checkpointer.close()
    assert (run.checkpointer.captured, run.checkpointer.skipped) == (30, 0)
    for step, state in states.items():
        same_bits(saved(tmp_path, step), state)


def test_update_waits_until_the_copy_has_ended(tmp_path: Path, held: HeldCopies) -> None:
    at_the_barrier = threading.Event()
    model = nn.Linear(64, 64)
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda *_: at_the_barrier.set())
    checkpointer = Checkpointer(model, optimizer, folder=tmp_path, every=1)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    at_the_barrier.clear()
    checkpointer.step()
    assert held.begun.wait(DEADLINE)
    update = threading.Thread(target=optimizer.step)
    update.start()
    assert at_the_barrier.wait(DEADLINE)
    update.join(0.1)
    assert update.is_alive()
    assert torch.equal(model.weight, before)
    held.go.set()
    update.join(DEADLINE)
    assert not torch.equal(model.weight, before)
    checkpointer.close()
    assert torch.equal(saved(tmp_path, 1)["model/weight"], before)


def test_training_does_not_wait_for_the_copy_before_the_next_update(tmp_path: Path, held: HeldCopies) -> None:
    run = Run(adamw, tmp_path)
    run.update()
    norm_before = run.model.norm.running_mean.clone()
    run.checkpointer.step()  # returns although the copy cannot end
    run.model(torch.randn(16, 8)).sum().backward()
    assert not torch.equal(run.model.norm.running_mean, norm_before)  # forward moves buffers ...
    held.go.set()
    run.checkpointer.close()
    # ... but not those of the snapshot
    assert torch.equal(saved(tmp_path, 1)["model/norm.running_mean"], norm_before)


def test_parameter_changed_behind_the_optimizers_back_never_makes_a_torn_snapshot(
    tmp_path: Path, held: HeldCopies
) -> None:
    run = Run(adamw, tmp_path, keep=9)
    averaged = run.model.first.bias
    for _ in range(2):
        held.go.clear()
        held.begun.clear()
        run.update()
        run.checkpointer.step()
        expected = averaged.detach().clone()
        assert held.begun.wait(DEADLINE)
        with torch.no_grad():
            averaged.mul_(0.5)
        held.go.set()
        assert run.checkpointer.wait(DEADLINE)
    run.checkpointer.close()
    # Refused once, then copied at once.
    assert (run.checkpointer.captured, run.checkpointer.skipped) == (1, 1)
    assert torch.equal(saved(tmp_path, 2)["model/first.bias"], expected)


@pytest.mark.parametrize("poison", ["loss", "parameter", "moment"])
def test_poisoned_state_never_becomes_a_snapshot(tmp_path: Path, poison: str) -> None:
    run = Run(adamw, tmp_path)
    run.train(1)
    loss = run.update()
    with torch.no_grad():
        if poison == "parameter":
            run.model.first.weight[0, 0] = float("nan")
        if poison == "moment":
            run.optimizer.state[run.model.first.weight]["exp_avg"][1, 1] = float("inf")
    run.checkpointer.step(float("nan") if poison == "loss" else loss)
    run.checkpointer.close()
    assert (run.checkpointer.captured, run.checkpointer.skipped) == (1, 1)
    assert Run(adamw, tmp_path, seed=9).checkpointer.restore() == 1


def test_minus_infinity_in_a_mask_buffer_is_no_poison(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), float("-inf")))
    optimizer = adamw(model)
    with Checkpointer(model, optimizer, folder=tmp_path, every=1) as checkpointer:
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
        checkpointer.step()
    assert checkpointer.captured == 1


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(1000), torch.randn(1000)) for _ in range(count)]


def test_thread_that_waits_takes_over_what_the_other_has_not_begun() -> None:
    work, held = pairs(10), HeldCopies("saver")
    parallel_copy = ParallelCopy(work, held)
    saver = threading.Thread(target=parallel_copy.join, name="saver")
    saver.start()
    assert held.begun.wait(DEADLINE)
    parallel_copy.assist()
    assert len(held.done_by) == 9, "all but the piece that the saver is at"
    held.go.set()
    saver.join(DEADLINE)
    assert held.done_by.count("saver") == 1
    assert all(torch.equal(target, source) for target, source in work)


def test_join_waits_for_the_piece_that_a_helper_is_at() -> None:
    work, held = pairs(2), HeldCopies("helper")
    parallel_copy = ParallelCopy(work, held)
    helper = threading.Thread(target=parallel_copy.assist, name="helper")
    helper.start()
    assert held.begun.wait(DEADLINE)
    joined = threading.Thread(target=parallel_copy.join)
    joined.start()
    assert not torch.equal(*work[0])
    held.go.set()
    joined.join(DEADLINE)
    assert not joined.is_alive()
    assert all(torch.equal(target, source) for target, source in work)
    helper.join(DEADLINE)


def test_failure_of_a_helper_is_told_to_the_one_that_joins() -> None:
    def copy(target: Tensor, source: Tensor) -> None:
        raise RuntimeError("no such memory")

    parallel_copy = ParallelCopy(pairs(3), copy)
    parallel_copy.assist()
    with pytest.raises(RuntimeError, match="no such memory"):
        parallel_copy.join()


STEPS = 6


def failing(times: int, real: Callable[..., Any]) -> tuple[Callable[..., Any], threading.Event]:
    """`real`, of which the first calls fail in a way that nobody thought of; and whether all of these are
    over."""
    left, over = iter(range(times)), threading.Event()

    def sometimes(*given: Any, **more: Any) -> Any:
        for _ in left:
            raise RuntimeError("nobody thought of it")
        over.set()
        return real(*given, **more)

    return sometimes, over


@pytest.mark.parametrize(
    ("owner", "name", "skipped"),
    [
        (FolderBackend, "flush", 0),
        (SnapshotJob, "__init__", 3),
        (SnapshotJob, "finish", 3),
        (FolderBackend, "begin", 3),
    ],
)
def test_saving_goes_on_after_what_nobody_thought_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, skipped: int
) -> None:
    body, over = failing(3, getattr(owner, name))
    monkeypatch.setattr(owner, name, body)
    run = Run(adamw, tmp_path)
    if name == "flush":
        assert over.wait(DEADLINE), "the idle thread has died three times, and lives"
    for _ in range(STEPS):
        train_a_step(run)
    assert run.checkpointer.captured >= STEPS - skipped
    run.checkpointer.close()
    offer = FolderBackend(tmp_path, 0, 1, keep=2).find()
    assert offer is not None
    assert offer.version.step == STEPS


def train_a_step(run: Run) -> None:
    """Never waits for more than the deadline."""
    done = threading.Thread(target=lambda: (run.train(1), run.checkpointer.wait(DEADLINE)), daemon=True)
    done.start()
    done.join(DEADLINE)
    assert not done.is_alive(), "training waits for ever"
