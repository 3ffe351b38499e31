"""Promise: a command that has left its step outlives its attempt; one that has not is ended in time."""

from __future__ import annotations

import os
import signal

from tests.launcher.launcher_harness import SLEEP, Launch, Launched, alive, order, released
from tests.scripted_sidecar import until
from tiercheck.launcher.environment import command_environment
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.names import ENV_JOINS


def staying(launch: Launch) -> tuple[Launched, int]:
    """A launcher whose command has left its step for attempt 2, and the command's pid."""
    launched = released(launch, SLEEP)
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(2, Phase.HOLD, interrupt_seconds=600.0))
    launched.sidecar.say(order(2, Phase.HOLD, interrupt_seconds=600.0, stays=True))
    assert launched.sidecar.hears("idle", 2)
    return launched, pid


def test_command_that_left_its_step_is_that_of_the_next_attempt(launch: Launch) -> None:
    launched, pid = staying(launch)
    assert launched.sidecar.events[-1].stays
    launched.sidecar.say(order(2, Phase.RELEASE, interrupt_seconds=600.0, stays=True))
    assert launched.sidecar.hears("started", 2)
    assert alive(pid)
    launched.sidecar.say(order(3, Phase.HOLD))
    assert launched.sidecar.hears("idle", 3)
    assert not alive(pid), "nobody said of this attempt that it may stay"


def test_command_that_does_not_leave_its_step_is_ended(launch: Launch) -> None:
    launched = released(launch, SLEEP)
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(2, Phase.HOLD, interrupt_seconds=0.2))
    assert launched.sidecar.hears("idle", 2)
    assert not launched.sidecar.events[-1].stays
    assert not alive(pid)


def test_command_that_dies_while_it_waits_is_started_anew_and_joins_the_others(launch: Launch) -> None:
    launched, pid = staying(launch)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not launched.sidecar.hears("idle", 2).stays, "idle, and nothing stays")
    launched.sidecar.say(order(2, Phase.RELEASE, joins=True))
    assert launched.sidecar.hears("started", 2)
    assert int(launched.line().split()[0]) != pid


def test_command_that_waits_ends_with_its_job(launch: Launch) -> None:
    launched, pid = staying(launch)
    launched.sidecar.say(order(2, Phase.FINISH, stays=True))
    assert launched.exit_code() == 0
    assert not alive(pid)


def test_only_a_command_that_starts_beside_others_that_stayed_is_told_to_join_them() -> None:
    assert ENV_JOINS not in command_environment({}, order(2, Phase.RELEASE))
    assert command_environment({}, order(2, Phase.RELEASE, joins=True))[ENV_JOINS] == "1"
