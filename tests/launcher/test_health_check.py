"""Promise: training starts only once the user's own check has passed there, which is told."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.launcher.launcher_harness import Launch, Launched, alive, order
from tests.scripted_sidecar import until
from tiercheck.protocol.directive import HealthCheck, Phase
from tiercheck.protocol.local import Order


@pytest.fixture
def launch(launch: Launch) -> Launch:
    return partial(launch, merge_errors=True)


def checked(attempt: int, script: str, phase: Phase = Phase.HOLD, seconds: float = 600.0) -> Order:
    return order(attempt, phase, health_check=HealthCheck(("sh", "-c", script), seconds))


def said(launched: Launched) -> list[tuple[str, int]]:
    return [(event.event, event.attempt) for event in launched.sidecar.events]


def test_launcher_waits_for_the_release_once_its_place_has_passed_and_checks_it_for_each_attempt(
    launch: Launch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    script = f"echo attempt $TIERCHECK_ATTEMPT of worker $TIERCHECK_WORKER | tee -a {log}"
    launched = launch(["sh", "-c", "echo trains; exec sleep 600"])
    launched.sidecar.say(checked(1, script))
    launched.sidecar.hears("idle", 1)
    assert said(launched) == [("idle", 0), ("checking", 1), ("idle", 1)]
    launched.sidecar.say(checked(1, script, Phase.RELEASE))
    launched.sidecar.hears("started", 1)
    assert [launched.line(), launched.line()] == ["attempt 1 of worker 1", "trains"], (
        "its words are in the log as well"
    )
    launched.sidecar.say(checked(2, script))
    launched.sidecar.hears("idle", 2)
    assert log.read_text().splitlines() == ["attempt 1 of worker 1", "attempt 2 of worker 1"]


def test_check_that_fails_is_told_with_its_last_lines_and_the_launcher_does_not_wait(
    launch: Launch, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.touch()
    script = f"if [ -e {bad} ]; then seq 1 9; echo; echo GPU 3 is not there >&2; exit 3; fi"
    launched = launch(["sleep", "600"])
    launched.sidecar.say(checked(1, script))
    found = launched.sidecar.hears("unhealthy", 1)
    assert (
        found.message
        == "failurePolicy.healthCheck (sh) ended with exit code 3: 6 / 7 / 8 / 9 / GPU 3 is not there"
    )
    assert found.exit_code == 3
    launched.sidecar.say(checked(2, script))  # for whatever reason the worker is still here
    launched.sidecar.hears("unhealthy", 2)
    bad.unlink()
    launched.sidecar.say(checked(3, script))
    launched.sidecar.hears("idle", 3)
    assert not {("idle", 1), ("idle", 2)} & set(said(launched))


def test_check_that_takes_too_long_has_failed_and_leaves_nothing_behind(
    launch: Launch, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    launched = launch(["sleep", "600"])
    launched.sidecar.say(checked(1, f"setsid sleep 600 & echo $! > {pid}; echo asks; wait", seconds=0.5))
    assert "did not end within 0.5 s" in launched.sidecar.hears("unhealthy", 1).message
    assert not pid.exists() or not alive(int(pid.read_text()))


def test_check_that_was_killed_or_said_nothing_is_told_as_such(launch: Launch) -> None:
    launched = launch(["sleep", "600"])
    launched.sidecar.say(checked(1, "kill -9 $$"))
    message = launched.sidecar.hears("unhealthy", 1).message
    assert message == "failurePolicy.healthCheck (sh) was ended by SIGKILL and said nothing"


def test_check_that_says_much_does_not_keep_the_launcher_from_its_deadline(launch: Launch) -> None:
    launched = launch(["sleep", "600"])
    drain = threading.Thread(target=launched.process.stdout.read, daemon=True)  # type: ignore[union-attr]
    drain.start()
    launched.sidecar.say(checked(1, "yes this place is well", seconds=0.5))
    message = launched.sidecar.hears("unhealthy", 1).message
    assert "did not end within 0.5 s" in message
    assert len(message) < 1000
    launched.process.kill()
    drain.join(60)


def test_check_that_cannot_be_started_is_the_users_mistake_and_not_the_nodes(launch: Launch) -> None:
    launched = launch(["sleep", "600"])
    launched.sidecar.say(order(1, Phase.HOLD, health_check=HealthCheck(("/nowhere/check",), 5.0)))
    ended = launched.sidecar.hears("exited", 1)
    assert (ended.exit_code, ended.reason) == (127, "CannotStart")
    assert "failurePolicy.healthCheck" in ended.message


def test_changed_check_is_run_at_once_and_one_that_is_taken_back_holds_nobody(launch: Launch) -> None:
    launched = launch(["sleep", "600"])
    launched.sidecar.say(checked(1, "exit 1"))
    launched.sidecar.hears("unhealthy", 1)
    launched.sidecar.say(checked(1, "exit 0"))
    launched.sidecar.hears("idle", 1)
    launched.sidecar.say(checked(2, "sleep 600"))
    launched.sidecar.hears("checking", 2)
    launched.sidecar.say(order(2, Phase.HOLD))
    launched.sidecar.hears("idle", 2)


def test_newer_attempt_the_end_of_the_job_and_a_signal_end_a_running_check(
    launch: Launch, tmp_path: Path
) -> None:
    for way in ("attempt", "finish", "signal"):
        pid = tmp_path / way
        launched = launch(["sleep", "600"])
        launched.sidecar.say(checked(1, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600"))
        until(pid.exists, "the check runs")
        if way == "attempt":
            launched.sidecar.say(checked(2, "exit 0"))
            launched.sidecar.hears("idle", 2)
        elif way == "finish":
            launched.sidecar.say(checked(1, "", Phase.FINISH))
            assert launched.exit_code() == 0
        else:
            launched.signal(signal.SIGTERM)
            assert launched.exit_code() == 128 + signal.SIGTERM
        assert not alive(int(pid.read_text()))
        launched.end()


_UNKILLABLE = """
import os, signal, sys
real = os.kill
os.kill = lambda pid, number: number == signal.SIGKILL or real(pid, number)
from tiercheck.launcher.app import main
sys.exit(main(sys.argv[1:]))
"""


def test_check_that_hangs_in_a_driver_has_failed(launch: Launch) -> None:
    """As nvidia-smi does where a GPU is broken: SIGKILL does not end it."""
    launched = launch(["sleep", "600"], program=("-c", _UNKILLABLE))
    launched.sidecar.say(checked(1, "exec sleep 600", seconds=0.2))
    assert "SIGKILL does not end process" in launched.sidecar.hears("unhealthy", 1).message
    launched.process.kill()  # and what it started with it
