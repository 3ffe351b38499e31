"""A start says where it goes on; an end says why, leaves something to take up, and waits for gloo."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
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
from tiercheck.trainer import process
from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.checkpointer import find
from tiercheck.trainer.process import describe_error, exit_code_of, reason_of


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


def loop(folder: Path, totals: Sequence[int], made: Callable[[int], int] = lambda number: 1) -> list[int]:
    """Trains by `steps` up to each total, with so many updates in each, and returns the numbers yielded."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    numbers = []
    with Checkpointer(model, optimizer, folder=folder, every=2) as checkpointer:
        for total in totals:
            for step in checkpointer.steps(total):
                numbers.append(int(step))
                with step:
                    for _ in range(made(step)):
                        optimizer.zero_grad()
                        model(torch.ones(4)).sum().backward()
                        optimizer.step()
                        checkpointer.step()
                checkpointer.wait()
    return numbers


def test_second_loop_of_steps_goes_on_where_the_first_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert loop(tmp_path, [3, 5]) == [0, 1, 2, 3, 4]
    assert capfd.readouterr().err.count("tiercheck: ") == 1, "the second restored, and went back"
    assert loop(tmp_path, [3, 7]) == [4, 5, 6]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("made", "calls"),
    [
        (lambda number: number % 2, "was called 0 times, not 1"),
        (lambda number: 2, "was called 2 times, not 1"),
        (lambda number: 0, "was called 0 times, not 1"),
        (lambda number: int(number != 4), "was called 4 times, not 5"),
    ],
    ids=["accumulated", "twice", "never", "one is skipped"],
)
def test_step_that_is_not_called_once_in_each_of_steps_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, made: Callable[[int], int], calls: str
) -> None:
    assert loop(tmp_path, [6], made) == [0, 1, 2, 3, 4, 5]
    (said,) = caplog.messages
    assert calls in said
    assert "Call step() once at the end of each" in said


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


SCRIPT = """
import sys
from tiercheck.trainer.process import FailureReporter
FailureReporter(lambda said: sys.stdout.write(f"{said.reason}|{said.message}|{said.exit_code}\\n"))
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad sample"), "UncaughtException"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "OutOfGPUMemory"),
        (
            RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"),
            "GPUFault",
        ),
        (
            RuntimeError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
            "GPUFault",
        ),
        (RuntimeError("CUDA error: unspecified launch failure"), "GPUFault"),
        (RuntimeError("No CUDA-capable device is detected"), "GPUFault"),
        (OSError("GPU 0000:1b:00.0 has fallen off the bus"), "GPUFault"),
        (RuntimeError("NVRM: Xid (PCI:0000:1b:00): 79, GPU has failed"), "GPUFault"),
        (RuntimeError("driver reports Xid 94"), "GPUFault"),
        (RuntimeError("driver reports Xid 13"), "UncaughtException"),
        (RuntimeError("CUDA error: device-side assert triggered"), "UncaughtException"),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.3]:1"),
            "CollectiveFailed",
        ),
        (torch.distributed.DistBackendError("NCCL error in: unhandled system error"), "CollectiveFailed"),
        (ValueError("gloo is not a valid value"), "UncaughtException"),
        (SystemExit(42), "Exited"),
    ],
)
def test_exception_says_whose_fault_it_is_as_far_as_it_is_clear(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason


def test_words_are_one_short_line() -> None:
    assert describe_error(ValueError("a\n  b")) == "ValueError: a b"
    assert len(describe_error(ValueError("x" * 5000))) <= 500
    assert describe_error(ValueError()) == "ValueError"


@pytest.mark.parametrize(("code", "ends"), [(None, 0), (0, 0), (3, 3), (256 + 3, 3), ("no such file", 1)])
def test_exit_code_is_the_interpreters(code: object, ends: int) -> None:
    assert exit_code_of(SystemExit(code)) == ends
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.exit({code!r})"], stderr=subprocess.DEVNULL, check=False
    )
    assert run.returncode == ends


def test_uncaught_exception_is_told_once_and_its_traceback_is_still_printed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("\\\\n", "\\n") + "raise ValueError('bad sample')\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == ["UncaughtException|ValueError: bad sample|1"]
    assert "Traceback" in run.stderr
    assert run.returncode == 1


reads_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")

AT_EXIT = """
import atexit
from tiercheck.trainer import process
from tiercheck.trainer.backends.backend import log
process.wait_until_idle = lambda: print("waited")
import torch
from tiercheck import Checkpointer
model = torch.nn.Linear(2, 2)
Checkpointer(model, torch.optim.SGD(model.parameters()), folder={folder!r})
atexit.register(print, "later hook")
"""

GROUP = """
import torch
import torch.distributed as dist
from tiercheck.trainer.process import _gloo_threads
torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # starts the threads that compute
before = set(_gloo_threads())
dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))  # whose thread has named itself before
print(len(set(_gloo_threads()) - before))
dist.destroy_process_group()
"""


@reads_proc
def test_threads_of_gloo_are_found_whether_torch_names_them_or_not(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", GROUP.format(folder=tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert int(run.stdout.splitlines()[-1]) > 0  # torch prints as well


@reads_proc
def test_waits_for_a_busy_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PATIENCE", 60.0)
    begun, finished, leave = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 300_000)  # computes without the interpreter lock
        finished.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        process.wait_until_idle()
        assert finished.is_set()
    finally:
        leave.set()
        thread.join()


@reads_proc
def test_a_checkpointer_makes_its_process_wait_after_all_later_hooks(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(folder=str(tmp_path))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert run.stdout.split("\n")[:2] == ["later hook", "waited"]


def test_warnings_are_marked_as_tierchecks_where_the_script_configures_no_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.warning("NoFreeSlot: step 3")
    assert capsys.readouterr().err == "", "the script's own handlers have it"
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log.warning("NoFreeSlot: step %d", 4)
    log.info("nothing that must be read")
    assert capsys.readouterr().err == "tiercheck: NoFreeSlot: step 4\n"
