"""Promise: a command that has left its step outlives its attempt; one that has not is ended in time."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launcher.launcher_harness import SLEEP, Launch, Launched, alive, order, released, shell
from tests.scripted_sidecar import until
from tiercheck.launcher.environment import command_environment
from tiercheck.protocol.directive import HealthCheck, Phase
from tiercheck.protocol.names import ENV_JOINS


def staying(launch: Launch) -> tuple[Launched, int]:
    """A launcher whose command has left its step for attempt 2, and the command's pid."""
    launched = released(launch, SLEEP)
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(2, Phase.HOLD, interrupt_seconds=600.0, listens=(1,)))
    launched.sidecar.say(order(2, Phase.HOLD, interrupt_seconds=600.0, listens=(1,), stays=(1,)))
    assert launched.sidecar.hears("idle", 2)
    return launched, pid


def test_command_that_left_its_step_is_that_of_the_next_attempt(launch: Launch) -> None:
    launched, pid = staying(launch)
    assert launched.sidecar.events[-1].stays
    launched.sidecar.say(order(2, Phase.RELEASE, interrupt_seconds=600.0, listens=(1,), stays=(1,)))
    assert launched.sidecar.hears("started", 2)
    assert alive(pid)
    launched.sidecar.say(order(3, Phase.HOLD))
    assert launched.sidecar.hears("idle", 3)
    assert not alive(pid), "nobody said of this attempt that it may stay"


def test_command_that_does_not_leave_its_step_is_ended(launch: Launch) -> None:
    launched = released(launch, SLEEP)
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(2, Phase.HOLD, interrupt_seconds=0.2, listens=(1,)))
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


RANKS = {"worker": 1, "workers": 2, "procs_per_worker": 2}
RANK = """
import os, time
line = f"{os.environ['RANK']} {os.getpid()} {os.environ.get('TIERCHECK_JOINS')}\\n"
os.write(1, line.encode())  # at once: the ranks of a pod share its output
time.sleep(600)
"""


def ranks(launched: Launched, count: int) -> dict[int, tuple[int, bool]]:
    """By rank of those that say so now: the pid, and whether it joins others."""
    said = [launched.line().split() for _ in range(count)]
    return {int(rank): (int(pid), joins == "1") for rank, pid, joins in said}


def two_ranks(launch: Launch, tmp_path: Path) -> tuple[Launched, dict[int, int]]:
    """Ranks 2 and 3 of attempt 1, of a command for torchrun, and their pids."""
    script = tmp_path / "train.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", str(script)]
    launched = launch(command, TIERCHECK_PROCS_PER_WORKER="2", TIERCHECK_WARM="0")
    launched.sidecar.say(order(1, Phase.RELEASE, **RANKS))
    return launched, {rank: pid for rank, (pid, _) in ranks(launched, 2).items()}


def test_lost_rank_of_a_pod_is_replaced_and_the_others_stay(launch: Launch, tmp_path: Path) -> None:
    launched, pids = two_ranks(launch, tmp_path)
    os.kill(pids[3], signal.SIGKILL)
    assert launched.sidecar.hears("exited", 1).exit_code == 137
    assert alive(pids[2])
    changes = {**RANKS, "interrupt_seconds": 600.0, "listens": (2,)}
    launched.sidecar.say(order(2, Phase.HOLD, **changes))
    launched.sidecar.say(order(2, Phase.HOLD, **changes, stays=(2,)))
    assert launched.sidecar.hears("idle", 2).stays == 1
    launched.sidecar.say(order(2, Phase.RELEASE, **changes, stays=(2,), joins=True))
    ((rank, (pid, joins)),) = ranks(launched, 1).items()
    assert launched.sidecar.hears("started", 2)
    assert (rank, joins) == (3, True)
    assert pid != pids[3]
    assert alive(pids[2])


def test_only_the_rank_that_does_not_leave_its_step_is_ended(launch: Launch, tmp_path: Path) -> None:
    launched, pids = two_ranks(launch, tmp_path)
    changes = {**RANKS, "interrupt_seconds": 0.3, "listens": (2, 3), "stays": (2,)}
    launched.sidecar.say(order(2, Phase.HOLD, **changes))
    assert launched.sidecar.hears("idle", 2).stays == 1
    assert [alive(pids[rank]) for rank in (2, 3)] == [True, False]


@pytest.mark.parametrize("changes", [{"listens": (3,)}, {"health_check": HealthCheck(("true",), 5.0)}])
def test_nobody_waits_for_a_rank_that_must_not_stay(
    launch: Launch, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Because it does not listen, or because its place is checked without it."""
    launched, pids = two_ranks(launch, tmp_path)
    os.kill(pids[3], signal.SIGKILL)
    launched.sidecar.hears("exited", 1)
    changes = {**RANKS, "interrupt_seconds": 600.0, "listens": (2, 3), **changes}
    launched.sidecar.say(order(2, Phase.HOLD, **changes))
    assert launched.sidecar.hears("idle", 2).stays == 0
    assert not alive(pids[2])


def test_command_that_waits_ends_with_its_job(launch: Launch) -> None:
    launched, pid = staying(launch)
    launched.sidecar.say(order(2, Phase.FINISH, stays=(1,)))
    assert launched.exit_code() == 0
    assert not alive(pid)


def test_only_a_command_that_starts_beside_others_that_stayed_is_told_to_join_them() -> None:
    assert ENV_JOINS not in command_environment({}, order(2, Phase.RELEASE))
    assert command_environment({}, order(2, Phase.RELEASE, joins=True))[ENV_JOINS] == "1"


def test_command_that_joins_others_is_started_before_the_release_and_begins_with_it(launch: Launch) -> None:
    launched = launch(shell(SLEEP))
    launched.sidecar.say(order(2, Phase.HOLD, joins=True))
    pid = int(launched.line().split()[0])
    assert launched.sidecar.hears("idle", 2)
    assert [event.event for event in launched.sidecar.events if event.attempt == 2] == ["idle"]
    launched.sidecar.say(order(2, Phase.RELEASE, joins=True))
    assert launched.sidecar.hears("started", 2)
    assert alive(pid)


@pytest.mark.parametrize("changes", [{"joins": False}, {"joins": True, "master_host": "127.0.0.8"}])
def test_command_that_was_started_for_another_release_is_started_anew(
    launch: Launch, changes: dict[str, object]
) -> None:
    """Because no other stayed, say."""
    launched = launch(shell(SLEEP))
    launched.sidecar.say(order(2, Phase.HOLD, joins=True))
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(2, Phase.RELEASE, **changes))
    assert launched.sidecar.hears("started", 2)
    assert int(launched.line().split()[0]) != pid
    assert not alive(pid)


def test_command_that_fails_before_the_release_has_ended_its_attempt(launch: Launch) -> None:
    launched = launch(shell("exit 3"))
    launched.sidecar.say(order(2, Phase.HOLD, joins=True))
    assert launched.sidecar.hears("exited", 2).exit_code == 3
    launched.sidecar.say(order(3, Phase.HOLD))
    assert launched.sidecar.hears("idle", 3)


def test_command_that_was_started_ahead_ends_with_its_attempt(launch: Launch) -> None:
    launched = launch(shell(SLEEP))
    launched.sidecar.say(order(2, Phase.HOLD, joins=True))
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(3, Phase.HOLD))
    assert launched.sidecar.hears("idle", 3)
    assert not alive(pid)
    launched.sidecar.say(order(3, Phase.RELEASE))
    assert launched.sidecar.hears("started", 3)
