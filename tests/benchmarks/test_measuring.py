"""The clocks are right, a step's length hides no wait, and the simulator reads what it is given.

Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import blocked, delta_sizes
from benchmarks.ettr import COLD, COLLECTIVES, PEERS, seconds_at, usual_times
from benchmarks.gpu_acceptance.steps import longer, mean_step
from benchmarks.growth import slope
from benchmarks.harness import ROOT, Scale
from benchmarks.simulate_validation import (
    FAULTS,
    PAGE,
    TIMES_EACH,
    Record,
    Struck,
    costs,
    every_other,
    foretell,
    foretell_rows,
    halves,
    new_steps,
    page_times,
    real_rows,
)
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


class Device:
    """Work is given to it at once, takes long, and is done when somebody waits for it."""

    def __init__(self) -> None:
        self.now = self.owed = 0.0
        self.waits = 0

    def settle(self) -> None:
        self.waits += 1
        self.now, self.owed = self.now + self.owed, 0.0

    def clock(self) -> float:
        return self.now


def test_device_is_waited_for_at_the_ends_of_a_block_and_never_within() -> None:
    device = Device()
    device.owed = 100.0  # of those before

    def step() -> None:
        device.owed += 1.0

    assert mean_step(step, 24, device.settle, device.clock) == 1.0
    assert device.waits == 2


def test_what_one_step_in_three_costs_is_in_the_mean() -> None:
    device, number = Device(), itertools.count(1)

    def step() -> None:
        device.now += 1.0 + (0.3 if next(number) % 3 == 0 else 0.0)  # a median would be 1.0

    assert mean_step(step, 24, device.settle, device.clock) == pytest.approx(1.1)


def test_blocks_are_compared_in_pairs() -> None:
    assert longer([1.0, 2.0, 4.0], [1.1, 2.1, 8.0]) == pytest.approx(0.1)


ROWS = real_rows(PAGE.read_text())
CAUSES = {
    "crash": "TrainerCrash", "force delete": "PodDeleted", "evict": "PodEvicted", "node": "NodeSilent",
    "rack": "DomainLost", "every pod": "AllPodsLost",
}  # fmt: skip
PACE = 0.25


def struck(number: int, fault: str, down: float) -> Struck:
    """After ten seconds of training, with a third of `down` for each part."""
    began = 1000.0 * number
    tier = {"crash": "local", "every pod": "remote"}.get(fault, "peer")
    behind = 20 if fault == "every pod" else 0
    told = {
        "attempt": number + 2, "cause": CAUSES[fault], "tiers": {tier: 3}, "detectSeconds": down / 3,
        "restoreSeconds": down / 3, "totalSeconds": down + PACE,
    }  # fmt: skip
    victims = {"crash": (), "every pod": (0, 1, 2)}.get(fault, (1,))
    after = began + 10.0 + down + PACE + behind * PACE
    return Struck(fault, began + 10.0, victims, began, began + 10.0, after, 41, told, 10)


@pytest.mark.parametrize("down", [6.0, 30.0])
def test_a_run_whose_recoveries_are_all_alike_is_foretold(down: float) -> None:
    life = [struck(number, fault, down) for number, fault in enumerate([*FAULTS, *FAULTS])]
    found = foretell(Record(life, PACE))["held out"]
    assert found["foretold"] == pytest.approx(found["measured"], rel=0.1)


def test_halves_have_as_many_of_each_fault() -> None:
    life = [struck(number, fault, 6.0) for number, fault in enumerate([*FAULTS, *FAULTS, *FAULTS, *FAULTS])]
    first, second = ([each.fault for each in half] for half in halves(life))
    assert sorted(first) == sorted(second)
    assert all(count % 2 == 0 for count in TIMES_EACH.values())


def test_a_step_is_new_when_the_first_rank_makes_it_and_only_once() -> None:
    made = {0: [(1.0, 1, 1), (2.0, 2, 1), (9.0, 2, 2), (10.0, 3, 2)], 1: [(1.1, 1, 1), (9.9, 3, 2)]}
    assert new_steps(made) == {1: 1.0, 2: 2.0, 3: 9.9}


def test_a_strike_costs_the_longest_wait_before_the_next_one() -> None:
    moments = [1.0, 2.0, 3.0, 3.1, 9.0, 10.0, 11.0, 20.0, 21.0]
    strikes = [Struck(fault, at, (), at, at, at, 0, {}, 0) for fault, at in (("node", 3.05), ("crash", 11.5))]
    first, second = costs(strikes, dict(enumerate(moments)), 1.0)
    assert (first.began, first.before, first.after) == (1.0, 3.1, 9.0)
    assert (second.began, second.before, second.after, second.steps) == (9.0, 11.0, 20.0, 3)


def test_the_page_of_the_real_cluster_tells_of_every_kind_of_failure_twice() -> None:
    assert len(ROWS) > 10
    assert all(len(row["ours"]) == len(row["next"]) == 2 for row in ROWS)
    assert {"TrainerCrash", "PodEvicted", "NodeSilent", "DomainLost", "AllPodsLost"} <= {
        row["cause"] for row in ROWS
    }


def test_the_runs_of_the_real_cluster_foretell_each_other_when_both_give_half() -> None:
    for first in (0, 1):
        found = foretell_rows(every_other(ROWS, first))
        assert found["foretold"] == pytest.approx(found["measured"], rel=0.2)


def test_the_real_clusters_times_are_within_what_its_page_tells() -> None:
    times = page_times(ROWS, usual_times())
    slowest = max(max(row["next"]) for row in ROWS)
    for kind in ("process", "pod", "host", "rack"):
        parts = times.of(kind)
        assert 0 < parts.detect + parts.replace * (kind != "process") + parts.restart < slowest


def test_published_seconds_are_kept_and_read_between() -> None:
    for published in (COLLECTIVES, COLD):
        assert [seconds_at(gpus, published) for gpus, _ in published] == [seconds for _, seconds in published]
    assert 17 < seconds_at(20_000, COLLECTIVES) < 30
    assert seconds_at(100_000, COLLECTIVES) > 200


def test_every_peer_is_named_with_its_source() -> None:
    assert all(peer.source.startswith("arXiv:") for peer in PEERS)
