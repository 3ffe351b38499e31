"""Promise: the last lines of a command on stderr are told with its end, and its log has them all."""

from __future__ import annotations

import os

import pytest

from tests.launcher.launcher_harness import Launch, order, released
from tiercheck.launcher import command as output_module
from tiercheck.launcher.command import RelayedOutput
from tiercheck.protocol.directive import Phase

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
def launch(launch: Launch) -> Launch:
    return lambda script: released(launch, script, merge_errors=True, cleared="TIERCHECK_WARM")


def test_last_lines_of_stderr_come_with_the_exit_code_and_reach_the_log(launch: Launch) -> None:
    launched = launch("echo one >&2; echo 'CUDA error: out of memory' >&2; exit 3")
    event = launched.sidecar.hears("exited", 1)
    assert (event.exit_code, event.message) == (3, "one / CUDA error: out of memory")
    assert [launched.line(), launched.line()] == ["one", "CUDA error: out of memory"]


def test_lines_of_an_earlier_attempt_are_not_told_again(launch: Launch) -> None:
    launched = launch("[ $TIERCHECK_ATTEMPT = 1 ] && echo first >&2; exit 3")
    assert launched.sidecar.hears("exited", 1).message == "first"
    launched.sidecar.say(order(2, Phase.RELEASE))
    assert launched.sidecar.hears("exited", 2).message == ""


def test_signal_is_named_beside_the_last_lines(launch: Launch) -> None:
    launched = launch("echo it hangs >&2; kill -SEGV $$")
    assert launched.sidecar.hears("exited", 1).message.startswith("SIGSEGV: it hangs")


def test_command_that_writes_megabytes_is_held_back_by_nobody_and_nothing_is_lost(launch: Launch) -> None:
    launched = launch("head -c 3000000 /dev/zero | tr '\\0' x >&2; exit 3")
    assert launched.process.stdout is not None
    assert launched.process.stdout.read(3_000_000) == "x" * 3_000_000
    assert launched.sidecar.hears("exited", 1).message == "x" * 600


def test_log_that_nobody_takes_keeps_no_order_from_being_followed(launch: Launch) -> None:
    launched = launch("yes >&2")
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


def test_what_is_written_right_before_the_end_reaches_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Also of a health check that passed, whose lines nobody asks for."""
    output = RelayedOutput()
    os.write(output.writing, b"all devices are well\n")
    output.close_writing()
    output.close()
    assert capfd.readouterr().err == "all devices are well\n"
