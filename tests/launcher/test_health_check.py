"""Promise: training starts once the user's check has passed; a command's last lines come with its end."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.launcher.launcher_harness import Launch, Launched, alive, order, released
from tests.scripted_sidecar import until
from tiercheck.launcher import command as output_module
from tiercheck.launcher.command import RelayedOutput
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


TORCHRUN = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
RuntimeError: boom
W1126 12:00:00.000000 9 site-packages/torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 11 closing signal SIGTERM
E1126 12:00:00.000000 9 site-packages/torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0 (pid: 10) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""  # noqa: E501


@pytest.fixture
def run(launch: Launch) -> Launch:
    return lambda script: released(launch, script, cleared="TIERCHECK_WARM")


def test_last_lines_of_stderr_come_with_the_exit_code_and_reach_the_log(run: Launch) -> None:
    launched = run("echo one >&2; echo 'CUDA error: out of memory' >&2; exit 3")
    event = launched.sidecar.hears("exited", 1)
    assert (event.exit_code, event.message) == (3, "one / CUDA error: out of memory")
    assert [launched.line(), launched.line()] == ["one", "CUDA error: out of memory"]


def test_lines_of_an_earlier_attempt_are_not_told_again(run: Launch) -> None:
    launched = run("[ $TIERCHECK_ATTEMPT = 1 ] && echo first >&2; exit 3")
    assert launched.sidecar.hears("exited", 1).message == "first"
    launched.sidecar.say(order(2, Phase.RELEASE))
    assert launched.sidecar.hears("exited", 2).message == ""


def test_signal_is_named_beside_the_last_lines(run: Launch) -> None:
    launched = run("echo it hangs >&2; kill -SEGV $$")
    assert launched.sidecar.hears("exited", 1).message.startswith("SIGSEGV: it hangs")


def test_command_that_writes_megabytes_is_held_back_by_nobody_and_nothing_is_lost(run: Launch) -> None:
    launched = run("head -c 3000000 /dev/zero | tr '\\0' x >&2; exit 3")
    assert launched.process.stdout is not None
    assert launched.process.stdout.read(3_000_000) == "x" * 3_000_000
    assert launched.sidecar.hears("exited", 1).message == "x" * 600


def test_log_that_nobody_takes_keeps_no_order_from_being_followed(run: Launch) -> None:
    launched = run("yes >&2")
    launched.sidecar.hears("started", 1)
    launched.sidecar.say(order(2, Phase.HOLD))
    launched.sidecar.hears("idle", 2)


def test_output_that_was_held_back_is_asked_for_again_although_it_could_go_on_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever looks at channels was told not to look at this one: the command would stand still for ever."""
    log, stderr = os.pipe()
    os.set_blocking(stderr, False)
    while output_module._is_full(stderr) is False:
        os.write(stderr, b"x" * 4096)
    monkeypatch.setattr(output_module, "_STDERR", stderr)
    output = RelayedOutput()
    os.write(output.writing, b"more")
    output.relay()
    watched = output.channel
    os.read(log, 1 << 20)
    assert watched is not None or output.blocked
    output.relay()
    assert (output.channel, output.blocked) == (output._reading, False)
    assert os.read(log, 1 << 20).endswith(b"more")
    output.close_writing()
    output.close()
    os.close(log)
    os.close(stderr)


def test_words_of_a_rank_are_told_rather_than_torchruns_report() -> None:
    output = RelayedOutput()
    os.write(output.writing, TORCHRUN.encode())
    assert output.last_lines().endswith("RuntimeError: boom")
    output.close_writing()
    output.close()


def test_lines_of_tiercheck_are_no_reason_of_a_failure() -> None:
    output = RelayedOutput()
    os.write(output.writing, b"no data\ntiercheck: starts at step 0\n")
    assert output.last_lines() == "no data"
    output.forget()
    os.write(output.writing, b"tiercheck: NoFreeSlot: step 4\n")
    assert output.last_lines() == ""
    output.close_writing()
    output.close()


def test_what_is_written_right_before_the_end_reaches_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Also of a health check that passed, whose lines nobody asks for."""
    output = RelayedOutput()
    os.write(output.writing, b"all devices are well\n")
    output.close_writing()
    output.close()
    assert capfd.readouterr().err == "all devices are well\n"
