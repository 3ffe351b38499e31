"""The clocks are right, and a tiny run of the real thing works.

Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import blocked, delta_sizes
from benchmarks.growth import slope
from benchmarks.harness import ROOT, Scale
from benchmarks.workload import Training, run_cycles

TINY = Scale(
    quick=True, states=(1 << 20,), growth_states=(), growth_workers=(), rounds=1, cycles=1, restore=1 << 20
)


@pytest.fixture
def training() -> Training:
    return Training(12 * 32 * 32 * 2, tokens=4, width=32)


def test_a_state_has_the_size_that_was_asked_for() -> None:
    training = Training(12 * 64 * 64 * 3, tokens=0, width=64)
    assert abs(training.state_bytes - 12 * 64 * 64 * 3) < 100  # and the step counters of the optimizer


def test_time_in_hooks_is_counted_wherever_they_stand_in_line(training: Training) -> None:
    waited = 0.02
    for register in (training.optimizer.register_step_pre_hook, training.optimizer.register_step_post_hook):
        register(lambda *_: threading.Event().wait(waited) or None)
    training.update()
    assert training.clock.take() >= 2 * waited
    assert training.clock.take() == 0


def test_clocks_of_two_trainings_do_not_mix(training: Training) -> None:
    other = Training(12 * 32 * 32 * 2, tokens=4, width=32)
    other.optimizer.register_step_pre_hook(lambda *_: threading.Event().wait(0.02) or None)
    training.update()
    other.update()
    assert other.clock.take() >= 0.02
    before = [parameter.clone() for parameter in training.model.parameters()]
    training.compute()
    training.update()
    assert not all(
        torch.equal(one, two) for one, two in zip(before, training.model.parameters(), strict=True)
    )


def test_a_cycle_saves_once_and_counts_what_the_save_took(training: Training) -> None:
    saved: list[int] = []
    settled: list[int] = []

    def after_step(number: int) -> None:
        if number % 4 == 0:
            saved.append(number)
            threading.Event().wait(0.03)

    cycles = run_cycles(training, after_step, lambda: settled.append(len(saved)), cycles=3, half=2, warm_up=1)
    assert saved == [4, 8, 12, 16]
    assert len(cycles) == 3
    assert all(cycle.blocked >= 0.03 for cycle in cycles)
    assert settled == [0, 1, 2, 3, 4, 4]  # before the first save, in the middle of each cycle, at the end


def test_a_save_that_was_not_taken_is_made_again_instead_of_counted_as_free(training: Training) -> None:
    answers = [True, True, False, True, True]  # before the first save, then one for each cycle, at the end
    cycles = run_cycles(training, lambda _: None, lambda: answers.pop(0), cycles=1, half=1, warm_up=1)
    assert len(cycles) == 1
    assert answers == []


@pytest.mark.parametrize(("power", "expected"), [(1.0, 1.0), (2.0, 2.0), (0.0, 0.0)])
def test_slope_is_the_power_by_which_something_grows(power: float, expected: float) -> None:
    assert slope([(x, 3 * x**power) for x in (1.0, 2.0, 8.0)]) == pytest.approx(expected)


def test_snapshots_of_the_real_library_are_timed_on_a_real_sidecar() -> None:
    looked: list[int] = []
    result = blocked.measure(
        blocked.WORST, 1 << 20, TINY, lambda job: looked.append(job.report(0).counters.captured)
    )
    assert len(result["cycles"]) == TINY.cycles
    assert result["copy_seconds"] > 0
    assert looked[0] >= TINY.cycles


def test_a_peer_that_cannot_run_is_named_and_not_measured() -> None:
    absent = blocked.System("absent", "no_such_module")
    with pytest.raises(RuntimeError, match="no_such_module"):
        blocked.measure(absent, 1 << 20, TINY)


def test_sizes_are_those_of_artifacts_that_the_sidecar_holds() -> None:
    case = next(case for case in delta_sizes.CASES if "fp32 gradients" in case.name)
    found = delta_sizes.measure(case, 64)
    assert isinstance(found, dict)
    parameters = sum(parameter.numel() for parameter in case.build(64).parameters())
    assert found["delta"] >= 3.9 * parameters  # a few rows of the embeddings had no gradient
    assert found["snapshot"] >= 12 * parameters


def test_the_command_writes_table_and_numbers_and_says_what_it_did_not_run(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so it would be measured")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", "gpu", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TIERCHECK_BENCH_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not run" in done.stdout
    assert "not run: no GPU" in (tmp_path / "out" / "results.md").read_text()
