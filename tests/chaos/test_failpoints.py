"""An armed failpoint strikes as often as it shall and not more; an unarmed one does nothing."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos import campaign, report
from tests.chaos.campaign import Outcome
from tests.chaos.record import LifeChecker, Mark, Said
from tests.chaos.report import place, table
from tests.chaos.stage import POINTS, WEIGHTS, Injection, drawn
from tiercheck.failpoints import ACTIONS, ENV_FAILPOINTS, STRUCK, Arming, Failpoints, Struck

ROOT = Path(__file__).parents[2]
PRODUCT = ("tiercheck", "operator/tiercheck_operator", "sidecar/tiercheck_sidecar")
PASS = "from tiercheck.failpoints import failpoint; failpoint('here'); print('passed', flush=True)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "armed"


def arm(path: Path, *lines: str) -> Failpoints:
    path.write_text("\n".join(lines) + "\n")
    return Failpoints(str(path))


def passing(path: Path | None) -> subprocess.Popen[str]:
    """Another process that passes a point once."""
    environment = {key: value for key, value in os.environ.items() if key != ENV_FAILPOINTS}
    environment |= {} if path is None else {ENV_FAILPOINTS: str(path)}
    return subprocess.Popen(
        [sys.executable, "-c", PASS], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_process_whose_environment_names_no_file_cannot_be_armed(path: Path) -> None:
    arm(path, "here kill")
    process = passing(None)
    assert process.communicate()[0] == "passed\n"
    assert not Path(f"{path}{STRUCK}").exists()


def test_kill_strikes_one_life_and_spares_the_next(path: Path) -> None:
    arm(path, "here kill")
    first = passing(path)
    assert (first.communicate()[0], first.returncode) == ("", -signal.SIGKILL)
    second = passing(path)
    assert second.communicate()[0] == "passed\n"
    (line,) = Path(f"{path}{STRUCK}").read_text().splitlines()
    assert line.split()[:3] == ["here", "kill", str(first.pid)]


def test_stopped_process_goes_on_when_it_is_told_to(path: Path) -> None:
    arm(path, "here stop")
    process = passing(path)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate()[0] == "passed\n"


@pytest.mark.parametrize(
    ("action", "code"), [("enospc", errno.ENOSPC), ("emfile", errno.EMFILE), ("eio", errno.EIO)]
)
def test_errors_are_those_of_the_system(path: Path, action: str, code: int) -> None:
    points = arm(path, f"here {action}")
    with pytest.raises(OSError, match="here") as raised:
        points.passed("here")
    assert raised.value.errno == code
    points.passed("here")


def test_exception_is_one_that_no_code_knows(path: Path) -> None:
    with pytest.raises(Struck):
        arm(path, "here exception").passed("here")
    assert not issubclass(Struck, OSError | ValueError | RuntimeError)


def test_delay_takes_its_time_and_raises_nothing(path: Path) -> None:
    points, began = arm(path, "here delay seconds=0.05"), time.monotonic()
    points.passed("here")
    assert time.monotonic() - began >= 0.05


def test_as_many_times_as_asked_after_as_many_passings_as_asked(path: Path) -> None:
    points = arm(path, "here eio times=2 skip=3")
    outcomes = []
    for _ in range(7):
        try:
            points.passed("here")
        except OSError:
            outcomes.append("struck")
        else:
            outcomes.append("")
    assert outcomes == ["", "", "", "struck", "struck", "", ""]


def test_processes_share_the_number_of_strikes(path: Path) -> None:
    one, other = arm(path, "here eio times=1"), Failpoints(str(path))
    with pytest.raises(OSError, match="here"):
        one.passed("here")
    other.passed("here")


def test_points_are_armed_and_disarmed_while_the_process_runs(path: Path) -> None:
    points = Failpoints(str(path))
    points.passed("here")
    path.write_text("there eio\nhere eio times=9\n")
    with pytest.raises(OSError, match="here"):
        points.passed("here")
    path.unlink()
    points.passed("here")
    points.passed("there")


@pytest.mark.parametrize(
    "line", ["here", "here explode", "here kill times=often", "here kill colour=red", "here kill 3"]
)
def test_line_that_makes_no_sense_is_told_and_arms_nothing(
    path: Path, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    points = arm(path, line, "there eio")
    points.passed("here")
    with pytest.raises(OSError, match="there"):
        points.passed("there")
    assert line in capfd.readouterr().err


def test_arming_is_spelled_as_it_is_read() -> None:
    armings = [Arming("here", action, times, 3, 0.5) for times, action in enumerate(ACTIONS)]
    assert [Arming.parse(str(each)) for each in armings] == armings


def test_every_failpoint_of_the_product_is_known_to_the_campaign() -> None:
    found = [
        name
        for folder in PRODUCT
        for file in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'failpoint\("([^"]+)"\)', file.read_text())
    ]
    assert sorted(found) == sorted(POINTS), "each in one place, so that a report says where it was"


def test_nothing_but_the_environment_arms() -> None:
    """No message, file of a volume, or setting of a job leads there."""
    text = {file: file.read_text() for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")}
    assert [
        file.name for file, code in text.items() if ENV_FAILPOINTS in code or "ENV_FAILPOINTS" in code
    ] == ["failpoints.py"]


def test_same_seed_draws_the_same_strikes() -> None:
    import random

    def draw(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [str(drawn(number, rng, 3)) for number in range(50)]

    assert draw(7) == draw(7) != draw(8)


@pytest.mark.parametrize("name", [*POINTS, *WEIGHTS])
def test_whatever_strikes_has_a_row_in_the_report(name: str) -> None:
    strike = Outcome(Injection(1, name, "", worker=0, skip=0), struck=True, pause=1.5, healed=2.5)
    *_, row = table([strike])
    assert row == f"| {place(strike.injection)} | 1 | 1.5 | 0 | 0 | 2.5 |"


# Broken promises are found in made-up records, and a short campaign breaks none.


def test_what_the_attempt_before_had_said_is_not_held_against_the_next_one() -> None:
    said = Said()
    assert said.of(1, {"peer": {"step": 12, "time": "a"}}) == {"peer": 12}
    assert said.of(2, {"peer": {"step": 12, "time": "a"}}) == {}
    assert said.of(2, {"peer": {"step": 11, "time": "b"}}) == {"peer": 11}


TOLD: dict[str, object] = {
    "by": "status", "attempt": 1, "placement": "p", **dict.fromkeys(("snapshot", "local", "peer", "remote")),
}  # fmt: skip


def begun(keep: int) -> LifeChecker:
    checker = LifeChecker()
    begin = {"workers": 1, "copies": 1, "keep": keep, "prove": 0}
    checker.read([(0.0, "begins", begin), (1.0, "attempt", {"number": 1, "version": None, "heard": ()})])
    return checker


def test_mark_that_falls_within_an_attempt_is_a_broken_promise_and_silence_is_none() -> None:
    checker = begun(keep=3)
    seven, six = ({**TOLD, "local": Mark(step, 1), "peer": Mark(step, 1)} for step in (7, 6))
    checker.read([(2.0, "verdict", seven), (3.0, "verdict", TOLD), (4.0, "verdict", seven)])
    assert not checker.broken
    checker.read([(5.0, "verdict", six)])
    assert [each.promise for each in checker.broken] == ["watermarks never fall"] * 2


def test_version_that_newer_ones_have_taken_the_place_of_may_be_told_by_an_operator_that_was_stopped() -> (
    None
):
    checker = begun(keep=1)
    checker.manifests["manifests/000000000009-1.json"] = []
    checker.read([(2.0, "verdict", {**TOLD, "remote": Mark(6, 1)})])
    assert not checker.broken
    checker.read([(3.0, "verdict", {**TOLD, "remote": Mark(12, 1)})])
    assert [each.promise for each in checker.broken] == ["complete is complete"]


@pytest.mark.cluster
@pytest.mark.extended
def test_job_comes_through_ten_strikes_bit_for_bit(tmp_path: Path) -> None:
    told: list[str] = []
    plan = campaign.Plan(
        seed=3, injections=10, seconds=1e9, workers=2, pace=0.05, rest=(0.0, 0.2), stopped=3.0
    )
    course = campaign.run(plan, tmp_path, told.append)
    assert not course.broken, "\n".join(told)
    assert len(course.strikes) >= 8, "\n".join(told)
    assert course.compared > 2 * course.steps
    report.write(course, tmp_path)
    assert "0 promises broken" in (tmp_path / "chaos.md").read_text()
