"""A sidecar whose CPU limit is too small says so, by the kernel's own count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sidecar.world import MakeWorld, until
from tiercheck_sidecar.pacing import CpuStat, ThrottleWatch, read_cpu_stat, spare_hands

V2 = (
    "usage_usec 5012\nuser_usec 4000\nsystem_usec 1012\nnr_periods {}\nnr_throttled {}\nthrottled_usec "
    "812\nnr_bursts 0\n"
)
V1 = "nr_periods {}\nnr_throttled {}\nthrottled_time 812000\n"


def v2(folder: Path, periods: int, throttled: int, limit: str = "50000 100000") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "cpu.stat").write_text(V2.format(periods, throttled))
    (folder / "cpu.max").write_text(limit + "\n")
    return folder


def v1(folder: Path, periods: int, throttled: int, quota: int = 50000, controller: str = "cpu") -> Path:
    place = folder / controller
    place.mkdir(parents=True, exist_ok=True)
    (place / "cpu.stat").write_text(V1.format(periods, throttled))
    (place / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (place / "cpu.cfs_period_us").write_text("100000\n")
    return folder


@pytest.mark.parametrize("controller", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_both_kinds_of_cgroup_are_read(tmp_path: Path, controller: str) -> None:
    assert read_cpu_stat(v2(tmp_path / "two", 70, 30)) == CpuStat(70, 30, 0.5)
    assert read_cpu_stat(v1(tmp_path / "one", 70, 30, 150000, controller)) == CpuStat(70, 30, 1.5)


def test_without_a_limit_there_is_nothing_to_be_said(tmp_path: Path) -> None:
    assert read_cpu_stat(v2(tmp_path / "two", 0, 0, "max 100000")) is None
    assert read_cpu_stat(v1(tmp_path / "one", 0, 0, -1)) is None
    assert read_cpu_stat(tmp_path / "nowhere") is None
    broken = v2(tmp_path / "broken", 1, 1)
    (broken / "cpu.stat").write_text("garbage\nnr_periods many\n")
    assert read_cpu_stat(broken) is None
    (broken / "cpu.stat").write_text("usage_usec 1\n")
    assert read_cpu_stat(broken) is None, "as at the root of a machine"


def test_long_work_leaves_half_of_the_limit_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    assert spare_hands(tmp_path / "nowhere") == 12
    assert spare_hands(v2(tmp_path / "two", 0, 0, "800000 100000")) == 4
    assert spare_hands(v2(tmp_path / "two", 0, 0, "50000 100000")) == 1


def test_limit_that_is_used_up_in_a_quarter_of_the_time_is_a_problem_until_it_is_hardly_ever() -> None:
    watch = ThrottleWatch()
    assert watch.look(0.0, CpuStat(1000, 900, 0.5)) == "", "what was before is not known"
    assert watch.look(5.0, CpuStat(1040, 940, 0.5)) == "", "40 periods are too few to tell"
    said = watch.look(10.0, CpuStat(1100, 950, 0.5))
    assert "its limit of 0.5 cores" in said
    assert "spec.sidecar.resources.limits.cpu" in said
    assert watch.look(15.0, CpuStat(1150, 950, 0.5)) == said, "the sentence stays, and wakes nobody"
    assert watch.look(65.0, CpuStat(1650, 1010, 0.5)) == said, "still more than a tenth"
    assert watch.look(120.0, CpuStat(2200, 1020, 0.5)) == ""
    assert watch.look(125.0, CpuStat(2250, 1030, 0.5)) == ""


def test_idle_sidecar_is_not_held_back() -> None:
    watch = ThrottleWatch()
    for moment in range(0, 600, 5):
        assert watch.look(float(moment), CpuStat(moment // 5, moment // 5)) == ""


def test_limit_that_is_taken_away_ends_the_problem() -> None:
    watch = ThrottleWatch()
    watch.look(0.0, CpuStat(0, 0))
    assert watch.look(10.0, CpuStat(100, 100))
    assert watch.look(15.0, None) == ""


def test_throttled_sidecar_reports_it_as_a_problem(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    world.cgroup = v2(tmp_path / "cgroup", 0, 0)
    world.patience["tiercheck_sidecar.app:EVERY"] = 0.2
    world.start()
    assert not world.report(0).problems
    counted = 0

    def throttled() -> bool:
        nonlocal counted
        counted += 60
        v2(tmp_path / "cgroup", counted, counted // 2)
        return [problem.reason for problem in world.report(0).problems] == ["SidecarThrottled"]

    until(throttled, "the problem is reported")
