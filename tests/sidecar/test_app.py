"""The sidecar serves its control API, health and metrics, and installs the library.

One whose CPU limit is too small says so, by the kernel's own count.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sidecar.world import MakeWorld, error_of, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Version
from tiercheck_sidecar.decoding import decode
from tiercheck_sidecar.install_library import install
from tiercheck_sidecar.pacing import CpuStat, ThrottleWatch, read_cpu_stat, spare_hands


def test_directive_is_idempotent_and_strangers_ones_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.new_attempt()
    directive = replace(world.directive(0, Phase.HOLD), instance=world.report(0).instance, number=1)
    for _ in range(2):
        status, body = world.call(0, "PUT", "/v1/directive", to_json(directive))
        assert status == 200
        assert decode(body, Report).revision == directive.revision
    for wrong in (replace(directive, job_uid="other"), replace(directive, worker=5)):
        status, body = world.send(0, wrong)
        assert status == 403
        assert error_of(body)
    for garbage in (b"", b"{", b'{"attempt": 1}'):
        assert world.call(0, "PUT", "/v1/directive", garbage)[0] == 422
    assert world.call(0, "GET", "/v1/report?after=x")[0] == 422
    assert world.report(0).restore.state.value == "Ready", "nothing to restore in a first attempt"


def test_report_leaves_out_what_is_held_for_who_does_not_want_it(make_world: MakeWorld) -> None:
    world = make_world().launch()
    with world.ranks() as (rank,):
        assert rank.save(10)
        world.reach("snapshot", Version(10, 1))
    said = [world.call(0, "GET", f"/v1/report{query}")[1] for query in ("", "?holdings=no")]
    whole, bare = (decode(text, Report) for text in said)
    assert whole.holdings
    assert whole.has_holdings
    assert not bare.holdings
    assert not bare.has_holdings
    assert bare.serial == whole.serial, "it is no news"


def test_what_is_held_is_told_once_to_who_names_what_he_knows(make_world: MakeWorld) -> None:
    world = make_world().launch()

    def asked(instance: str, held: int) -> Report:
        return decode(world.call(0, "GET", f"/v1/report?held={instance}.{held}")[1], Report)

    with world.ranks() as (rank,):
        assert rank.save(10)
        until(lambda: world.holds(0, 0, Version(10, 1), Tier.LOCAL), "sealed")
        first = asked("", 0)
        assert first.holdings
        again = asked(first.instance, first.held)
        assert (again.holdings, again.has_holdings, again.held) == ((), False, first.held)
        assert asked("another", first.held).holdings, "numbers are of one process"
        assert rank.save(20)
        until(lambda: world.holds(0, 0, Version(20, 1), Tier.LOCAL), "sealed")
    later = asked(first.instance, first.held)
    assert later.has_holdings
    assert later.held > first.held
    assert Version(20, 1) in {holding.version for holding in later.holdings}


def test_long_poll_answers_when_something_happens(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    serial = world.report(0).serial
    answers: list[tuple[int, bytes]] = []
    waiter = threading.Thread(
        target=lambda: answers.append(world.call(0, "GET", f"/v1/report?after={serial}&wait=8"))
    )
    began = time.monotonic()
    waiter.start()
    world.new_attempt()
    world.direct(Phase.HOLD)
    waiter.join()
    assert decode(answers[0][1], Report).serial > serial
    assert world.call(0, "GET", "/v1/report?after=999999&wait=0.1")[0] == 200
    assert time.monotonic() - began < 60


def test_health_and_metrics_are_plain_http(make_world: MakeWorld) -> None:
    world = make_world().launch()
    with world.ranks() as (rank,):
        rank.save(10)
        until(lambda: 'tiercheck_watermark_step{tier="local"} 10.0' in world.metrics(), "it is shown")
    told = world.metrics().splitlines()
    assert {
        "tiercheck_captured_total 1.0", "tiercheck_attempt 1.0", "tiercheck_snapshot_every 1.0",
        'tiercheck_held{kind="snapshot",tier="local"} 1.0', "tiercheck_deltas_skipped_total 0.0",
        "tiercheck_replay_mismatches_total 0.0",
    } <= set(told)  # fmt: skip


def test_wrong_environment_is_named_and_ends_the_process(make_world: MakeWorld) -> None:
    world = make_world()
    env = {**world.env(0), names.ENV_WORKER: "first"}
    done = subprocess.run(
        [sys.executable, "-m", "tiercheck_sidecar"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "TIERCHECK_WORKER is not a whole number" in done.stderr


def test_sidecar_of_a_running_job_ends_at_once_when_its_pod_is_deleted(make_world: MakeWorld) -> None:
    world = make_world().launch()
    assert world.terminate(0) == 0


def test_library_is_copied_whole_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        target = install(tmp_path / "lib")
    assert (target / "protocol" / "artifacts" / "slot.py").is_file()
    assert [each.name for each in (tmp_path / "lib").iterdir()] == ["tiercheck"]
    code = "import tiercheck.protocol.artifacts.slot as s; print(s.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))


def test_sidecar_that_ends_in_native_code_says_where(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.ask_to_end(0, signal.SIGSEGV)
    assert world.end_of(0) == -signal.SIGSEGV
    assert "Segmentation fault" in world.logs(0)
    assert "tiercheck_sidecar" in world.logs(0), "the stacks of its threads"


def test_sidecar_starts_without_numpy_which_only_parity_needs() -> None:
    """It would be a third of the start."""
    script = "import sys, tiercheck_sidecar.app; print('numpy' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


ALL_AT_ONCE = """
import sys, threading
from tiercheck.protocol.report import Report
from tiercheck_sidecar.decoding import Malformed, decode

sys.setswitchinterval(1e-6)
text = (
    b'{"restore": {"state": "Ready"}, "trainer": {"step": 1}, "holdings": [{"rank": 1}], '
    b'"problems": [{"reason": "x"}]}'
)
found, begin = [], threading.Barrier(8)

def hear():
    begin.wait()
    for _ in range(20):
        try:
            decode(text, Report)
        except Malformed as error:
            found.append(str(error))

threads = [threading.Thread(target=hear) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 160 and len(set(found)) == 1, found
"""


@pytest.mark.parametrize("life", range(8))
def test_first_messages_of_many_threads_are_all_judged_alike(life: int) -> None:
    """Decoders are made on first use, so each life is a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr or f"ended by signal {-done.returncode}"


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
    assert spare_hands(v2(tmp_path / "two", 0, 0, "6400000 100000")) == 12, "no more than there are cores"


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
