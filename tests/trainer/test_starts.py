"""A start says where it goes on and takes up no other training; an end leaves something to take up."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.scripted_sidecar import ScriptedSidecar
from tiercheck import Checkpointer
from tiercheck.trainer.checkpointer import find


@dataclass
class Lives:
    """Forked lives of a script; `said`: what the last one wrote to stderr."""

    folder: Path
    said: str = ""

    def run(self, script: Callable[[], None], argv: Sequence[str] = ("train.py",)) -> int:
        """Exit status of the script, as `Popen.returncode`."""
        log = self.folder / "stderr"
        child = os.fork()
        if not child:
            code = 1
            try:
                os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
                sys.stderr = os.fdopen(2, "w", buffering=1)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # not those of other tests' runs
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                logging.getLogger().handlers.clear()  # those of pytest
                sys.argv = list(argv)
                script()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.said = log.read_text()
        return status


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path)


@dataclass
class Script:
    folder: Path
    steps: int
    every: int = 2
    rate: float = 1e-2
    schedule: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    at: Callable[[int], None] = lambda step: None
    """Called in the middle of each step."""

    def __call__(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        state = {"schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)} if self.schedule else {}
        with Checkpointer(
            model, optimizer, state=state, folder=self.folder, every=self.every, **self.options
        ) as checkpointer:
            for step in range(checkpointer.restore(), self.steps):
                loss = model(torch.ones(4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                self.at(step + 1)
                optimizer.step()
                for each in state.values():
                    each.step()
                checkpointer.step(loss)


def test_each_start_says_where_it_goes_on_or_where_it_looked(lives: Lives, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert lives.run(Script(folder, 5)) == 0
    assert lives.said == f"tiercheck: starts at step 0: no version in {folder}\n"
    assert lives.run(Script(folder, 8)) == 0
    assert f"tiercheck: continues after step 4 from {folder}\n" in lives.said
    assert f"tiercheck: resumed at step 4 from {folder}; 1 step trained again, bitwise equal\n" in lives.said


def test_finished_run_that_is_started_again_says_so(lives: Lives, tmp_path: Path) -> None:
    for _ in range(2):
        assert lives.run(Script(tmp_path / "saved", 4)) == 0
    assert "continues after step 4" in lives.said
    assert "the training had ended there" in lives.said


def test_first_try_shorter_than_the_cadence_leaves_its_last_step(lives: Lives, tmp_path: Path) -> None:
    assert lives.run(Script(tmp_path / "saved", 3, every=50)) == 0
    assert find(tmp_path / "saved", run="train.py").step == 3


def test_script_that_fails_leaves_no_state_of_the_middle_of_a_step(lives: Lives, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise ZeroDivisionError

    assert lives.run(Script(tmp_path / "saved", 5, every=50, at=fail)) == 1
    assert find(tmp_path / "saved", run="train.py").step == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_signal_ends_the_run_after_its_step_is_saved(
    number: int, status: int, lives: Lives, tmp_path: Path
) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    assert lives.run(Script(tmp_path / "saved", 100, every=50, at=interrupt)) == status
    assert "saves at the end of this step" in lives.said
    assert find(tmp_path / "saved", run="train.py").step == 3
    assert lives.run(Script(tmp_path / "saved", 4)) == 0
    assert "continues after step 3" in lives.said
    assert "had ended" not in lives.said


def test_second_signal_ends_the_run_at_once(lives: Lives, tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    assert lives.run(Script(tmp_path / "saved", 100, every=50, at=interrupt)) == 1
    assert find(tmp_path / "saved", run="train.py").step == 0


def test_forked_worker_ends_by_the_signal_at_once(lives: Lives, tmp_path: Path) -> None:
    def fork(step: int) -> None:
        read, write = os.pipe()
        worker = os.fork()
        if not worker:
            os.write(write, b".")  # what comes before is lost: a fork forgets its signals
            while True:
                time.sleep(0.01)
        os.read(read, 1)
        os.kill(worker, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM

    assert lives.run(Script(tmp_path / "saved", 2, at=fork)) == 0


def test_signal_handler_of_the_script_stays(lives: Lives, tmp_path: Path) -> None:
    def script() -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        Script(tmp_path / "saved", 100, at=lambda step: os.kill(os.getpid(), signal.SIGTERM))()

    assert lives.run(script) == 7


def test_another_script_in_the_folder_begins_anew_and_says_how_to_take_up(
    lives: Lives, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    assert lives.run(Script(folder, 4), ["first.py"]) == 0
    for steps in (2, 4):
        assert lives.run(Script(folder, steps), ["second.py"]) == 0
        assert "versions of another training, first.py, which are not taken" in lives.said
        assert "give run='first.py'" in lives.said
    assert f"continues after step 2 from {folder / 'second.py'}" in lives.said
    assert find(folder, run="first.py").step == 4
    assert lives.run(Script(folder, 6, options={"run": "first.py"}), ["second.py"]) == 0
    assert f"continues after step 4 from {folder};" in lives.said


def test_second_training_of_a_process_is_saved_though_the_first_left_nothing(tmp_path: Path) -> None:
    for run in ("first", "second"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        with Checkpointer(model, optimizer, folder=tmp_path, every=1, run=run) as checkpointer:
            assert checkpointer.restore() == 0
            if run == "second":
                model(torch.ones(4)).sum().backward()
                optimizer.step()
                checkpointer.step()
    assert find(tmp_path, run="second").step == 1


def test_changed_hyper_parameters_are_told_with_old_and_new_value(lives: Lives, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert lives.run(Script(folder, 4, schedule=True)) == 0
    assert lives.run(Script(folder, 6, schedule=True)) == 0
    assert "goes on with what the version has" not in lives.said  # a schedule has moved the rate
    assert lives.run(Script(folder, 8, rate=0.5, schedule=True)) == 0
    assert "optimizer 0, group 0: lr is 0.5 here, it was 0.01" in lives.said
    assert lives.run(Script(folder, 8, rate=0.5, schedule=True), ["train.py", "--more"]) == 0
    assert "the command line has other arguments" in lives.said


class Counted:
    """A holder of state that must not be asked between its load and the first step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, int]:
        self.calls.append("asked")
        return {"place": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls.append("loaded")


class CountedModule(nn.Linear):
    """The same of a module."""

    calls: list[str]

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append("asked")
        return super().state_dict(*arguments, **named)


def test_nothing_is_asked_of_the_script_between_the_restore_of_its_state_and_its_first_step(
    tmp_path: Path,
) -> None:
    for life in range(2):
        model, holder = CountedModule(4, 4), Counted()
        model.calls = holder.calls
        optimizer = torch.optim.AdamW(model.parameters())
        with Checkpointer(
            model, optimizer, state={"holder": holder}, folder=tmp_path, every=1
        ) as checkpointer:
            assert checkpointer.restore() == life
            assert life == 0 or holder.calls[-1] == "loaded"
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            assert life == 0 or holder.calls[-1] == "loaded"
            checkpointer.step()


class Loader(Counted):
    """One whose position cannot be asked for without consequences."""

    def __iter__(self) -> Any:
        return iter([1])


def test_loader_is_not_asked_for_its_position_before_the_loop(tmp_path: Path) -> None:
    model, loader = nn.Linear(4, 4), Loader()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(model, optimizer, state={"loader": loader}, folder=tmp_path) as checkpointer:
        checkpointer.restore()
        assert loader.calls == []


def test_second_training_of_a_process_in_a_cluster_is_not_saved_and_says_so(
    delta_sidecar: ScriptedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    for run in (None, "second"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        with Checkpointer(model, optimizer, every=1, run=run) as checkpointer:
            assert checkpointer.restore() == 0
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            checkpointer.step()
            checkpointer.wait()
            assert checkpointer.captured == (run is None)
    assert any("make it a job of its own" in each for each in caplog.messages)
